"""Streams through the feed: every sample once, uneven lengths, resumption, warnings where ranks read different data."""

import warnings
from collections import Counter

import numpy as np
import pytest
from feed_ranks import SHARES, NumberStream, by_step, fetch_threads, numbers, on_ranks, taken
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.control import ReplicaControl
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import ArraySource
from hvdtrain.data.stream import ShuffledStream, fingerprint, rebatch


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert not fetch_threads()


# --- streams ---------------------------------------------------------------------------------------------

@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), global_batch=st.integers(1, 15), shares=SHARES,
       sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_stream_gives_every_sample_once_in_order(n, global_batch, shares, sizes):
    ranks = on_ranks(len(shares), lambda rank, control: list(
        Feed(NumberStream(n, sizes), global_batch, rank=rank, size=len(shares), shares=shares,
             control=control, prefetch=rank % 3).epoch(Cursor())))
    assert by_step(ranks) == [list(range(n))[i:i + global_batch] for i in range(0, n, global_batch)]
    assert ranks[0][-1].cursor_after.samples == n


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 25), min_size=2, max_size=4).filter(any),
       global_batch=st.integers(1, 9))
def test_streams_of_different_lengths_end_together(lengths, global_batch):
    size = len(lengths)

    def work(rank, control):
        feed = Feed(NumberStream(lengths[rank]), global_batch, rank=rank, size=size, control=control,
                    prefetch=1)
        return list(feed.epoch(Cursor(samples=0, epoch=1)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ranks = on_ranks(size, work)
        except UserError as error:  # no rank's cut of the first batch held a sample
            assert "no samples" in str(error)
            return
    assert len({len(steps) for steps in ranks}) == 1
    for steps in zip(*ranks):
        assert len({(s.cursor_after, s.n_global, s.weight) for s in steps}) == 1
        assert sum(s.n_local for s in steps) == steps[0].n_global > 0
    for rank, steps in enumerate(ranks):
        counts = Counter(sum(taken(steps), []))
        assert set(counts.values()) <= {1} and set(counts) <= {1000 + i for i in range(lengths[rank])}


@pytest.mark.parametrize("lengths, global_batch, at", [((20, 7), 6, 2), ((9, 1), 3, 1)])
def test_uneven_streams_resume_at_the_position_of_the_longest(lengths, global_batch, at):
    def work(rank, control, cursor):
        feed = Feed(NumberStream(lengths[rank]), global_batch, rank=rank, size=2, control=control)
        return list(feed.epoch(cursor))

    with pytest.warns(UserWarning, match="differ in length"):
        whole = on_ranks(2, lambda rank, control: work(rank, control, Cursor()))
        rest = on_ranks(2, lambda rank, control: work(rank, control, whole[0][at - 1].cursor_after))
    assert whole[0][at - 1].cursor_after.samples == at * global_batch
    assert len(rest[0]) > 1 and by_step(rest) == by_step(whole)[at:]


def test_ranks_that_read_different_streams_are_warned():
    class Shifted(NumberStream):
        def chunks(self, epoch):
            for x, y in super().chunks(epoch):
                yield x + self.shift, y

    def work(rank, control):
        data = Shifted(8)
        data.shift = rank
        return len(list(Feed(data, 4, rank=rank, size=2, control=control).epoch(Cursor())))

    with pytest.warns(UserWarning, match="read different streams"):
        assert on_ranks(2, work) == [2, 2]


def test_ranks_of_one_partitioned_model_are_compared_too():
    """Of which the first takes x, and the last y."""
    def work(make):
        def one(rank, control):
            feed = Feed(make(rank), 4, control=ReplicaControl(control, [0], 0), prefetch=0)
            feed.check_ranks_agree()
            list(feed.epoch(Cursor()))
            return feed.unlike
        return on_ranks(2, one)

    with pytest.raises(UserError, match="ranks hold different samples"):
        work(lambda rank: ArraySource((np.roll(np.arange(9), rank),)))
    with pytest.raises(UserError, match="ranks differ in"):
        work(lambda rank: numbers(8 + rank))
    with pytest.warns(UserWarning, match="read different streams"):
        assert all(work(lambda rank: (NumberStream, Swapped)[rank](9)))
    assert work(lambda rank: NumberStream(9)) == ["", ""]


class Swapped(NumberStream):
    def chunks(self, epoch):
        yield from ((x[::-1], y) for x, y in super().chunks(epoch))


def test_equal_streams_warn_of_nothing_and_use_one_sum_per_step():
    def work(rank, control):
        list(Feed(NumberStream(9), 4, rank=rank, size=3, control=control).epoch(Cursor()))
        return control.sums

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_ranks(3, work) == [4, 4, 4]


def test_an_empty_stream_is_named_on_every_rank():
    def work(rank, control):
        with pytest.raises(UserError, match="no samples in epoch 0"):
            list(Feed(NumberStream(0), 4, rank=rank, size=2, control=control).epoch(Cursor()))
        return "told"

    assert on_ranks(2, work) == ["told", "told"]


def test_stream_evaluates_every_sample():
    ranks = on_ranks(2, lambda rank, control: list(
        Feed(NumberStream(5), 3, rank=rank, size=2, control=control).eval_epoch()))
    assert by_step(ranks) == [[0, 1, 2], [3, 4]]


def test_rebatch_skips_and_joins_across_chunks():
    chunks = [(np.arange(a, b),) for a, b in ((0, 3), (3, 3), (3, 10), (10, 11))]
    assert [b[0].tolist() for b in rebatch(chunks, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [b[0].tolist() for b in rebatch(chunks, 4, 5)] == [[5, 6, 7, 8], [9, 10]]
    assert list(rebatch(chunks, 4, 11)) == list(rebatch(chunks, 4, 99)) == []


@pytest.mark.parametrize("chunks, words", [
    ([[np.zeros(2)]], "a list as a chunk"),
    ([()], "tuple as a chunk"),
    ([(np.float64(1),)], "tuple as a chunk"),
    ([(np.zeros(2), np.zeros(3))], r"\[2, 3\] samples"),
    ([(np.zeros((2, 3)),), (np.zeros((2, 4)),)], "first chunk"),
    ([(np.zeros(2, int),), (np.zeros(2),)], "first chunk"),
])
def test_rebatch_names_chunks_that_do_not_fit(chunks, words):
    with pytest.raises(UserError, match=words):
        list(rebatch(chunks, 3))


@pytest.mark.parametrize("rows, width", [(3, 2), (64, 4096)])
def test_fingerprint_tells_samples_in_another_order_apart(rows, width):
    batch = (np.random.default_rng(0).normal(size=(rows, width)).astype("f"), np.ones(rows))
    order = [0, *range(2, rows), 1]
    assert fingerprint(batch) == fingerprint((np.asfortranarray(batch[0]), batch[1].copy()))
    assert fingerprint(batch) != fingerprint((batch[0][order], batch[1]))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 60), buffer=st.integers(1, 70), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
       epoch=st.integers(0, 3))
def test_a_shuffle_buffer_gives_each_sample_once_in_an_order_of_seed_and_epoch(n, buffer, sizes, epoch):
    def order(sizes, seed=1, epoch=epoch):
        chunks = list(ShuffledStream(NumberStream(n, sizes), buffer, seed).chunks(epoch))
        return [int(x) - 1000 * epoch for chunk in chunks for x in chunk[0]]

    found = order(sizes)
    assert sorted(found) == list(range(n)) and found == order([5])
    assert all(place >= number - buffer for place, number in enumerate(found))
    if n >= 50 and buffer >= 10:
        assert found != list(range(n)) and found not in (order(sizes, seed=2), order(sizes, epoch=epoch + 1))


def test_a_shuffle_buffer_delays_a_sample_by_its_size_on_average():
    found = np.concatenate([x for x, _ in ShuffledStream(NumberStream(20000, [100]), 200, 0).chunks(0)])
    delay = (np.argsort(found) + 200 - np.arange(20000))[:15000]
    assert delay.min() >= 1 and 190 < delay.mean() < 210
    assert (delay <= 200).mean() == pytest.approx(0.63, abs=0.03)
