"""As many micro-batches on every rank (``even_micros``): padding, empty arrays of the right kind, and the stand-in."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import ArraySource
from hvdtrain.data.weighting import PlaceholderSample
from hvdtrain.planning.batch.sampler import BatchShares, micro_batches, padded


def source(n):
    return ArraySource((np.arange(2 * n, dtype=np.float32).reshape(n, 2), np.arange(n)))


class Counting:
    """A stream of ``n`` samples."""

    def __init__(self, n):
        self.n = n

    def chunks(self, epoch):
        for i in range(self.n):
            yield np.full((1, 3), i, np.float32), np.array([i])


def test_padding_closed_forms():
    assert padded([(0, 3), (3, 5)], 4) == [(0, 3), (3, 5), (5, 5), (5, 5)]
    assert padded([], 2) == [(0, 0), (0, 0)]
    assert padded([(0, 1)], 1) == [(0, 1)]
    cut = BatchShares((1.0, 1.0, 0.0), (1, 3, 2), (4, 0, 0))
    assert cut.rounds([9, 2, 0]) == 3  # 9 samples by 4, 2 samples in 2 parts, none
    assert cut.rounds([4, 1, 0]) == 1 and cut.rounds([0, 0, 0]) == 0


@hypothesis_settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 17), st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
       st.integers(1, 3), st.integers(0, 4))
def test_every_rank_runs_as_many_and_nothing_else_changes(n, global_batch, shares, accumulate, micro_batch):
    size = len(shares)
    rows = []
    for rank in range(size):
        settings = {"rank": rank, "size": size, "shares": shares, "accumulate": accumulate, "prefetch": 0,
                    "micro_batch": micro_batch}
        even = list(Feed(source(n), global_batch, even_micros=True, **settings).epoch(Cursor()))
        plain = list(Feed(source(n), global_batch, **settings).epoch(Cursor()))
        for a, b in zip(even, plain, strict=True):
            assert (a.n_local, a.n_global, a.weight, a.own_weight) == (b.n_local, b.n_global, b.weight, b.own_weight)
            own, rest = a.micros[:len(b.micros)], a.micros[len(b.micros):]
            for mine, want in zip(own, b.micros, strict=True):
                assert all(np.array_equal(x, y) for x, y in zip(mine, want, strict=True))
            assert all(micro[0].shape == (0, 2) and micro[1].shape == (0,) for micro in rest)
            assert all((micro[0].dtype, micro[1].dtype) == (np.float32, np.int64) for micro in rest)
            assert len({id(micro) for micro in a.micros}) == len(a.micros)  # the loop knows the last one by identity
        rows.append([len(step.micros) for step in even])
    assert all(row == rows[0] for row in rows)
    assert all(count == max(len(micro_batches(k, accumulate, micro_batch))
                            for k in np.diff(BatchShares.of(shares).offsets(s)))
               for count, s in zip(rows[0], [global_batch] * (n // global_batch) + [n % global_batch]))


@pytest.mark.parametrize("lengths, rounds", [([11, 11], [2, 2, 2]), ([11, 4], [2, 2, 2]), ([3, 10], [2, 2, 1])],
                         ids=["alike", "one short", "one long"])
def test_streams_that_end_apart_go_on_together(lengths, rounds):
    def rank(control, wire):
        feed = Feed(Counting(lengths[control.rank]), 4, rank=control.rank, size=2, control=control, micro_batch=1,
                    even_micros=True, prefetch=1)
        return [[micro[0].shape for micro in step.micros] for step in feed.epoch(Cursor())]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 is told that the streams differ
        first, second = LockstepWorld(2).run(rank)
    assert [len(step) for step in first] == [len(step) for step in second] == rounds
    got = sum(shape[0] for row in (first, second) for step in row for shape in step)
    assert got == sum(len(part) for r, n in enumerate(lengths) for part in
                      ([i
                        for i in range(at,
                                       min(at + 4, n))][slice(*BatchShares.of([1, 1]).offsets(min(4, n - at))[r:r + 2])]
                       for at in range(0, n, 4)))
    assert all(shape[1:] == (3,) for row in (first, second) for step in row for shape in step)


def test_a_rank_whose_stream_has_nothing_is_told():
    def rank(control, wire):
        feed = Feed(Counting(6 * control.rank), 4, rank=control.rank, size=2, control=control, even_micros=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(feed.epoch(Cursor()))

    with pytest.raises(UserError, match="rank 0's stream has no sample"):
        LockstepWorld(2).run(rank, timeout_s=5.0)


def test_the_stand_in_is_a_sample_of_the_kind_that_is_missing():
    stand_in, empty = PlaceholderSample(), (np.empty((0, 2), np.float32), np.empty(0, np.int64))
    x, y = stand_in.instead(empty)
    assert x.tolist() == [[0.0, 0.0]] and y.tolist() == [0] and (x.dtype, y.dtype) == (np.float32, np.int64)
    stand_in.saw((np.full((4, 2), 7, np.float32), np.arange(3, 7)))
    x, y = stand_in.instead(empty)
    assert x.tolist() == [[7.0, 7.0]] and y.tolist() == [3]
    assert stand_in.instead((np.empty((0, 5), np.float32), empty[1]))[0].tolist() == [[0.0] * 5]  # another length
