"""The walk of P ranks through one epoch: coverage, resume, uneven streams, and the fetching thread."""

import contextlib
import threading
import time

import numpy as np
import pytest
from feed_ranks import SHARES, WAIT_S, NumberStream, by_step, fetch_threads, numbers, on_ranks, taken
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.control import SoloControl
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed, Shelf, prefetched
from hvdtrain.data.sources import ArraySource
from hvdtrain.planning.batch.sampler import BatchShares, cut


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert not fetch_threads()


# --- sources ---------------------------------------------------------------------------------------------

@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 60), global_batch=st.integers(1, 70), shares=SHARES, seed=st.integers(0, 99),
       epoch=st.integers(0, 5), accumulate=st.integers(1, 3), micro_batch=st.integers(0, 4))
def test_every_sample_exactly_once_for_any_ranks(n, global_batch, shares, seed, epoch, accumulate,
                                                 micro_batch):
    ranks = [list(Feed(numbers(n), global_batch, rank=rank, size=len(shares), shares=shares, seed=seed,
                       accumulate=accumulate, micro_batch=micro_batch, prefetch=0).epoch(Cursor(epoch=epoch)))
             for rank in range(len(shares))]
    alone = list(Feed(numbers(n), global_batch, seed=seed, prefetch=0).epoch(Cursor(epoch=epoch)))
    assert by_step(ranks) == taken(alone)  # law 2: the global batch knows nothing of the ranks
    assert sorted(sum(by_step(ranks), [])) == list(range(n))
    for steps in zip(*ranks):
        assert len({(s.cursor_before, s.cursor_after, s.n_global, s.weight) for s in steps}) == 1
        assert sum(s.n_local for s in steps) == steps[0].n_global == steps[0].weight
        for step in steps:
            assert step.n_local == sum(len(micro[0]) for micro in step.micros)
            assert all(0 < len(micro[0]) <= (micro_batch or n) for micro in step.micros)
            assert all(np.array_equal(micro[0] * 10.0, micro[1]) for micro in step.micros)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), global_batch=st.integers(1, 12), resumed_batch=st.integers(1, 12),
       at=st.integers(0, 50), size=st.integers(1, 3), new_size=st.integers(1, 3), streamed=st.booleans())
def test_any_resume_point_gives_exactly_the_rest(n, global_batch, resumed_batch, at, size, new_size,
                                                 streamed):
    def walk(ranks, batch, cursor):
        def work(rank, control):
            data = NumberStream(n) if streamed else numbers(n)
            return list(Feed(data, batch, rank=rank, size=ranks, seed=3, control=control,
                             prefetch=0).epoch(cursor))
        return on_ranks(ranks, work)

    whole = walk(size, global_batch, Cursor(epoch=2))
    at = min(at, len(whole[0]))
    cursor = whole[0][at - 1].cursor_after if at else Cursor(epoch=2)
    rest = walk(new_size, global_batch, cursor)
    assert by_step(rest) == by_step(whole)[at:]
    assert [s.cursor_after for s in rest[0]] == [s.cursor_after for s in whole[0]][at:]
    other = walk(new_size, resumed_batch, cursor)
    assert sum(by_step(other), []) == sum(by_step(whole)[at:], [])


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 60), global_batch=st.integers(1, 9), size=st.integers(1, 4), prefetch=st.integers(0, 3),
       streamed=st.booleans(), data=st.data())
def test_a_new_cut_changes_who_takes_what_and_nothing_else(n, global_batch, size, prefetch, streamed, data):
    shares = st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any)
    cuts = data.draw(st.dictionaries(st.integers(0, 30), shares, max_size=3))

    def work(rank, control):
        feed = Feed(NumberStream(n) if streamed else numbers(n), global_batch, rank=rank, size=size, seed=3,
                    control=control, prefetch=prefetch)
        steps = []
        with contextlib.closing(feed.epoch(Cursor())) as batches:
            for batch in batches:
                steps.append(batch)
                following = batch.cursor_after.step
                if following in cuts:
                    feed.recut(BatchShares.of(cuts[following], 2), following + feed.ahead)
        return steps

    ranks = on_ranks(size, work)
    source = NumberStream(n) if streamed else numbers(n)
    alone = on_ranks(1, lambda rank, control: list(Feed(source, global_batch, seed=3, control=control,
                                                        prefetch=0).epoch(Cursor())))
    assert by_step(ranks) == taken(alone[0])
    in_force = [1.0] * size
    starts = {at + (prefetch + 1 if prefetch else 0): given for at, given in sorted(cuts.items()) if at > 0}
    for step, parts in enumerate(zip(*ranks)):
        in_force = starts.get(step, in_force)
        assert [part.n_local for part in parts] == np.diff(cut(parts[0].n_global, in_force)).tolist()


def test_a_sample_to_try_is_as_large_as_asked():
    x, y = Feed(numbers(5), 2).sample(12)
    assert x.tolist() == [*range(5), *range(5), 0, 1] and y.tolist() == [10 * i for i in x]
    streamed = Feed(NumberStream(3), 2, control=SoloControl())
    assert len(streamed.sample(7)[0]) == 7 and len(streamed.sample(2)[0]) == 2


def test_a_stream_that_was_sampled_is_opened_no_oftener():
    for sampled in (False, True):
        stream = NumberStream(10)
        opened = []
        chunks = stream.chunks
        stream.chunks = lambda epoch: opened.append(epoch) or chunks(epoch)
        feed = Feed(stream, 4, control=SoloControl())
        cursor = Cursor()
        for _ in range(3 if sampled else 0):
            assert len(feed.sample(6, cursor)[0]) == 6
        first = list(feed.epoch(cursor))
        assert taken(first) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and opened == [0]
        assert taken(list(feed.epoch(first[0].cursor_after))) == [[4, 5, 6, 7], [8, 9]] and opened == [0, 0]


def test_a_resumed_epoch_goes_on_with_the_stream_that_was_sampled():
    class Turning(NumberStream):
        """Another order at each opening, as of a `tf.data.Dataset` that reshuffles."""

        opened = 0

        def chunks(self, epoch):
            self.opened += 1
            yield from ((np.roll(x, self.opened), y) for x, y in super().chunks(epoch))

    whole = taken(list(Feed(Turning(10), 4, control=SoloControl()).epoch(Cursor())))
    feed = Feed(Turning(10), 4, control=SoloControl())
    feed.sample(2)  # before the checkpoint is restored
    at = Cursor().advance(4)
    feed.sample(1, at)
    assert taken(list(feed.epoch(at))) == whole[1:]


def test_cursor_counts_steps_and_epochs():
    feed = Feed(numbers(10), 4)
    steps = list(feed.epoch(Cursor()))
    assert [s.cursor_after for s in steps] == [Cursor(0, 1, 1, 4), Cursor(0, 2, 2, 8), Cursor(0, 3, 3, 10)]
    assert feed.steps_per_epoch == 3 and feed.steps_left(steps[0].cursor_after) == 2
    assert list(feed.epoch(steps[-1].cursor_after)) == []
    second = list(feed.epoch(steps[-1].cursor_after.next_epoch()))
    assert second[0].cursor_before == Cursor(1, 3, 0, 0)
    assert sum(taken(second), []) != sum(taken(steps), [])


def test_global_batch_below_the_world_leaves_ranks_without_samples():
    ranks = [list(Feed(numbers(5), 2, rank=rank, size=4, shuffle=False).epoch(Cursor())) for rank in range(4)]
    assert [taken(steps) for steps in ranks] == [[[0], [2], [4]], [[1], [3], []], [[], [], []], [[], [], []]]
    assert ranks[3][0].micros == [] and ranks[3][0].n_local == 0 and ranks[3][0].n_global == 2


def test_eval_epoch_is_in_order_and_has_the_same_steps_on_every_rank():
    ranks = [list(Feed(numbers(7), 3, rank=rank, size=3, seed=5).eval_epoch()) for rank in range(3)]
    assert by_step(ranks) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [steps[-1].n_local for steps in ranks] == [1, 0, 0]


def test_weight_is_summed_over_ranks_from_each_ranks_own_part():
    def work(rank, control):
        feed = Feed(numbers(7), 3, rank=rank, size=2, shuffle=False, control=control,
                    weight_fn=lambda batch: batch[1].sum())
        return [step.weight for step in feed.epoch(Cursor())]

    assert on_ranks(2, work) == [[30.0, 120.0, 60.0]] * 2


def test_a_rank_fetches_its_own_samples_only():
    class Noting(ArraySource):
        def fetch(self, indices_n):
            seen.extend(indices_n.tolist())
            return super().fetch(indices_n)

    seen = []
    steps = list(Feed(Noting((np.arange(20),)), 6, rank=1, size=3).epoch(Cursor()))
    assert seen == sum(taken(steps), []) and len(seen) == 7


def test_a_source_that_changes_by_epoch_is_told_the_epoch():
    class Counting(ArraySource):
        def fetch_in(self, indices_n, epoch):
            return (self.arrays[0][indices_n] + 100 * epoch,)

    feed = Feed(Counting([np.arange(4)]), 4, shuffle=False)
    for epoch in (0, 3):
        assert taken(feed.epoch(Cursor(epoch=epoch))) == [[100 * epoch + i for i in range(4)]]


def test_mistakes_are_named():
    with pytest.raises(UserError, match="global_batch"):
        Feed(numbers(4), 0)
    with pytest.raises(UserError, match="empty"):
        Feed(numbers(0), 4)
    with pytest.raises(UserError, match="shares"):
        Feed(numbers(4), 4, size=2, shares=[1.0])
    with pytest.raises(UserError, match="prefetch"):
        Feed(numbers(4), 4, prefetch=-1)
    with pytest.raises(UserError, match="sample 9 of a dataset that has 4"):
        Feed(numbers(4), 4).epoch(Cursor(samples=9))


def test_a_source_that_returns_too_few_samples_is_named():
    class Short(ArraySource):
        def fetch(self, indices_n):
            return super().fetch(indices_n[:-1])

    with pytest.raises(UserError, match="first axis is 4"):
        list(Feed(Short((np.arange(8),)), 4).epoch(Cursor()))


def test_ranks_with_different_data_are_told_on_every_rank():
    def work(rank, control):
        with pytest.raises(UserError, match="rank 1: \\(9,"):
            Feed(numbers(8 + rank), 4, rank=rank, size=2, control=control).check_ranks_agree()
        Feed(numbers(8), 4, rank=rank, size=2, control=control).check_ranks_agree()
        return "told"

    assert on_ranks(2, work) == ["told", "told"]


def test_a_row_that_a_rank_cannot_read_is_not_compared():
    """Any exception counts: training may never come to that row."""
    class Broken(ArraySource):
        fixed, broken = False, False

        def fetch(self, indices_n):
            if self.broken and 5 in indices_n:
                raise KeyError("no such file")
            return super().fetch(indices_n)

    def work(rank, control):
        data = Broken((np.arange(8),))
        data.broken = rank == 1
        feed = Feed(data, 4, rank=rank, size=2, control=control)
        return feed.compare(0), feed.unlike

    assert on_ranks(2, work) == [(7, "")] * 2


# --- the fetching thread ---------------------------------------------------------------------------------

@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_prefetch_is_bounded_and_ends_when_the_consumer_stops(ahead):
    made = []

    def items():
        try:
            for i in range(1000):
                made.append(i)
                yield i
        finally:
            made.append(f"closed in {threading.current_thread().name}")

    ahead_of = prefetched(items(), Shelf(ahead))
    assert [next(ahead_of), next(ahead_of)] == [0, 1]
    deadline = time.monotonic() + WAIT_S
    while len(made) < ahead + 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(made) == 2 + ahead + 1  # taken, waiting, in the thread's hand
    ahead_of.close()
    assert not fetch_threads() and made[-1] == "closed in hvdtrain-fetch"


def test_inline_prefetch_uses_no_thread():
    names = [threading.current_thread().name]
    steps = prefetched((threading.current_thread().name for _ in range(3)), Shelf(0))
    assert list(steps) == names * 3


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_exception_in_the_fetch_reaches_the_consumer_after_the_good_steps(prefetch):
    def work(rank, control):
        data = NumberStream(20, sizes=(2,), fail_at=10)
        steps = Feed(data, 4, control=control, prefetch=prefetch).epoch(Cursor())
        seen = [next(steps).n_local, next(steps).n_local]
        with pytest.raises(OSError, match="disk gone"):
            next(steps)
        return seen, data.closed

    assert on_ranks(1, work) == [([4, 4], 1)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_closing_an_epoch_early_closes_the_users_stream(prefetch):
    def work(rank, control):
        data = NumberStream(50)
        steps = Feed(data, 4, control=control, prefetch=prefetch).epoch(Cursor())
        next(steps)
        steps.close()
        return data.closed, len(fetch_threads())

    assert on_ranks(1, work) == [(1, 0)]


def test_an_epoch_that_is_dropped_ends_its_thread():
    steps = Feed(numbers(100), 2).epoch(Cursor())
    next(steps)
    assert fetch_threads()
    del steps
    assert not fetch_threads()


def test_buckets_of_length_are_the_same_on_any_number_of_ranks():
    """Each sample once, resumed at another global batch; rows of a batch are of similar length."""
    class Rows(ArraySource):
        lengths = (np.arange(90) * 37) % 91

    def work(rank, control, size, cursor=Cursor(), batch=6):
        feed = Feed(Rows((np.arange(90),)), batch, rank=rank, size=size, seed=4, control=control, bucket=6)
        return list(feed.epoch(cursor))

    alone = by_step([work(0, None, 1)])
    assert [sorted(step) for step in by_step(on_ranks(3, lambda r, c: work(r, c, 3)))] == list(map(sorted, alone))
    assert all(np.ptp(Rows.lengths[step]) < 15 for step in alone)
    rest = by_step([work(0, None, 1, Cursor(0, 4, 4, 24), 11)])
    assert sum(alone[:4] + rest, []) == sum(alone, []) and sorted(sum(alone, [])) == list(range(90))
    with pytest.raises(UserError, match="no lengths"):
        Feed(numbers(8), 4, bucket=4)
