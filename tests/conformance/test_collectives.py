"""The collectives that run in one process pass the cases that all must pass, and catch what they promise to catch."""

import numpy as np
import pytest
from collectives_cases import CASES, as_is, name_of

from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_null_is_right_in_a_world_of_one(check):
    check(NullCollectives(), as_is, as_is)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_lockstep(check, size):
    LockstepWorld(size).run(lambda control, wire: check(wire, as_is, as_is), timeout_s=20)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_null_in_a_larger_world_has_the_right_shapes(size):
    wire = NullCollectives(size - 1, size)
    x = np.arange(6 * size, dtype=np.float32)
    assert wire.allreduce(x, "a").wait() is x
    assert wire.allgather(x, "a").wait().shape == (size, 6 * size)
    assert wire.alltoall(x.reshape(size, 6), "a").wait().shape == (size, 6)
    assert wire.reducescatter(x, "a").wait().shape == (6,)
    assert wire.broadcast(x, "a").wait() is x
