"""Exchanging nothing works on any framework's arrays."""

import numpy as np
import pytest

from hvdtrain.comm.collectives.base import NullCollectives, ReadyHandle


def test_done():
    assert ReadyHandle(3).wait() == 3


def test_a_rank_outside_the_world_is_our_bug():
    with pytest.raises(AssertionError):
        NullCollectives(2, 2)


def test_arrays_that_are_not_numpy_s():
    """An array library known by its methods only: it must not be converted."""
    class Array(np.ndarray):
        pass

    x = np.arange(4.0).view(Array)
    wire = NullCollectives()
    assert isinstance(wire.allgather(x, "a").wait(), Array) and wire.allgather(x, "a").wait().shape == (1, 4)
    assert isinstance(wire.reducescatter(x, "a").wait(), Array)


def test_each_rank_keeps_its_part_of_a_reducescatter():
    parts = [NullCollectives(r, 3).reducescatter(np.arange(6), "a").wait().tolist() for r in range(3)]
    assert parts == [[0, 1], [2, 3], [4, 5]]
