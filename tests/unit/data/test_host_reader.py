"""A stream that one rank of a host reads for the others: same batches, one reading, errors on all its ranks."""

import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from feed_ranks import NumberStream, by_step, fetch_threads, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.messages.carrier import Boxes, ThreadCarrier
from hvdtrain.core.errors import PeerFailed, UserError, WaitTimeout
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.data.host_reader import HostReader
from hvdtrain.planning.batch.sampler import BatchShares


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert not fetch_threads()


class Counted(NumberStream):
    """Numbers, with how many samples each rank has read. ``draws``: from numpy's global generator."""

    def __init__(self, n, sizes=(3, 1, 4), error=None, at=0, draws=False):
        super().__init__(n, sizes)
        self.error, self.at, self.draws, self.read, self.opened = error, at, draws, 0, 0

    def chunks(self, epoch):
        self.opened += 1
        for x, y in super().chunks(epoch):
            self.read += len(x)
            if self.error is not None and self.read > self.at:
                raise self.error
            yield x, y + (np.random.random() if self.draws else 0)


def facts(steps):
    return [(s.cursor_after, s.n_local, s.n_global, s.weight, None if s.numbers is None else s.numbers.tolist(),
             [[(a.dtype, a.shape, a.tobytes()) for a in micro] for micro in s.micros]) for s in steps]


def walked(size, hosts, cursors, readers="host", make=lambda rank: Counted(23), shares=None, **more):
    """Return by rank the facts of the epochs from ``cursors`` on, and the samples that the rank has read."""
    def work(rank, control):
        data = make(rank)
        feed = Feed(data, 5, rank=rank, size=size, shares=shares, control=control, readers=readers, **more)
        return [facts(feed.epoch(cursor)) for cursor in cursors], data.read

    rows = on_ranks(size, work, hosts)
    return [row[0] for row in rows], [row[1] for row in rows]


@settings(max_examples=15, deadline=None)
@given(hosts=st.sampled_from([[[0, 1]], [[0, 1, 2]], [[0, 2], [1, 3]], [[0], [1, 2]]]), prefetch=st.integers(0, 2),
       at=st.sampled_from([0, 5, 20]), even=st.booleans(), weights=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_a_host_with_one_reader_gets_the_batches_of_ranks_that_all_read(hosts, prefetch, at, even, weights):
    size = sum(map(len, hosts))
    shares = weights[:size] if any(weights[:size]) else None
    cursors = [Cursor(1, at // 5, at // 5, at), Cursor(2, 5, 0, 0)]
    more = {"shares": shares, "prefetch": prefetch, "even_micros": even}
    each, _ = walked(size, hosts, cursors, "each", **more)
    host, read = walked(size, hosts, cursors, "host", **more)
    assert host == each
    readers = {min(ranks) for ranks in hosts}
    assert [n > 0 for n in read] == [rank in readers for rank in range(size)]
    auto, read = walked(size, hosts, cursors, "auto", **more)
    assert auto == each and all(n <= 8 for rank, n in enumerate(read) if rank not in readers)


def test_abandoned_walks_and_new_shares_are_not_confused():
    def work(rank, control):
        feed = Feed(Counted(60), 6, rank=rank, size=3, control=control, readers="host", prefetch=2)
        found = []
        for epoch in range(4):
            steps = feed.epoch(Cursor(epoch, 0, 0, 0))
            for _, step in zip(range(epoch), steps):
                found.append(step.micros[0][0].tolist() if step.micros else [])
            steps.close()
        feed.recut(BatchShares.of([0, 2, 1]), 0)
        rest = list(feed.epoch(Cursor(7, 0, 0, 0)))
        return found, [step.n_local for step in rest], np.concatenate([s.micros[0][0] for s in rest if s.micros] or [
            np.zeros(0)]).tolist()

    ranks = on_ranks(3, work, [[0, 1, 2]])
    assert [found for found, _, _ in ranks] == [
        [[1000 * e + 6 * t + 2 * r + i for i in range(2)] for e in range(4) for t in range(e)] for r in range(3)]
    assert [set(n) for _, n, _ in ranks] == [{0}, {4}, {2}]
    assert sorted(sum((numbers for _, _, numbers in ranks), [])) == list(range(7000, 7060))


def test_an_error_of_the_reader_is_one_of_all_ranks():
    """A mistake of the user's with the same message; any other error names the rank that reads."""
    wrong = UserError("a bad row", "a good row", "fix it")

    def work(rank, control):
        feed = Feed(Counted(40, error=wrong if control.rank % 2 == 0 else None, at=12), 5, rank=rank, size=4,
                    control=control, readers="host")
        with pytest.raises(UserError, match="a bad row") as error:
            list(feed.epoch(Cursor()))
        return str(error.value)

    texts = set(on_ranks(4, work, [[0, 1], [2, 3]]))
    assert len(texts) == 1 and "fix it" in texts.pop().lower()

    def breaks(rank, control):
        feed = Feed(Counted(40, error=OSError("disk gone"), at=12), 5, rank=rank, size=2, control=control,
                    readers="host", prefetch=2 * rank)
        with pytest.raises((OSError, PeerFailed), match="disk gone") as error:
            for _ in feed.epoch(Cursor()):
                continue
        return type(error.value)

    assert on_ranks(2, breaks, [[0, 1]]) == [OSError, PeerFailed]


@pytest.mark.parametrize("make, words", [
    (lambda rank: Counted(20, draws=True), "global random generators"),
    (lambda rank: Counted(20, sizes=(3 + rank,)) if rank else Shifted(20), "different samples at its start")])
def test_a_stream_that_depends_on_the_rank_is_read_by_each(make, words):
    def work(rank, control):
        data = make(rank)
        feed = Feed(data, 5, rank=rank, size=2, control=control, readers="auto", prefetch=0)
        note = feed.walk.settle()
        assert feed.walk.settle() == ""
        steps = list(feed.epoch(Cursor()))
        return note, data.read, data.opened, len(steps)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = on_ranks(2, work, [[0, 1]])
    assert all(words in note and "each rank reads" in note for note, *_ in rows)
    assert [row[1:] for row in rows] == [(20, 1, 4)] * 2  # what was read for the comparison is used


class Shifted(Counted):
    def chunks(self, epoch):
        yield from ((x + 1, y) for x, y in super().chunks(epoch))


def test_samples_to_try_come_from_the_reader_and_the_note_says_who_reads():
    def work(rank, control):
        data = Counted(20)
        feed = Feed(data, 4, rank=rank, size=3, control=control, readers="host")
        note = feed.walk.settle()
        tried = [array.tolist() for array in feed.sample(6, Cursor())]
        return note, tried, by_rank(feed), data.opened

    def by_rank(feed):
        return list(feed.epoch(Cursor()))

    rows = on_ranks(3, work, [[0, 1, 2]])
    assert {row[0] for row in rows} == {
        "data.readers: one rank of a host reads the stream for the others: rank 0 for ranks 1-2"}
    assert [row[1] for row in rows] == [[[0, 1, 2, 3, 0, 1], [0.0] * 6]] * 3
    assert by_step([row[2] for row in rows]) == [list(range(i, i + 4)) for i in range(0, 20, 4)]
    assert [row[3] for row in rows] == [1, 0, 0]


def test_a_wait_has_a_bound_only_while_the_rank_needs_the_rows():
    carrier = ThreadCarrier(Boxes(), 1, 2, 0.05)
    carrier.ranks = [0, 1]
    host = HostReader(carrier, 1, {0: 0, 1: 1}, 0.05)
    errors = []

    def take():
        try:
            next(host.rows(1))
        except WaitTimeout as error:
            errors.append(str(error))

    thread = threading.Thread(target=take, name="hvdtrain-fetch-test", daemon=True)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive() and not errors
    with host.waiting():
        thread.join(5)
    assert not thread.is_alive() and "rank 0 reads for this host" in errors[0]


def test_a_reader_that_hangs_is_waited_for_no_longer_than_the_bound(monkeypatch):
    """The rank asks for its rows just after the fetching thread has begun to wait for them."""
    now = [0.0]
    monkeypatch.setattr("hvdtrain.data.host_reader.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Silent:
        ranks, timeout_s = [0, 1], 10.0

        def take(self, source, tag):
            return self

        def wait(self):
            now[0] += self.timeout_s
            host.wanted_since = 1.0
            raise WaitTimeout("no message")

    host = HostReader(Silent(), 1, {0: 0, 1: 1}, 10.0)
    with pytest.raises(WaitTimeout, match="rank 1 waited 10 s for its rows"):
        next(host.rows(1))
    assert 11 <= now[0] <= 12.5


def test_a_replay_is_announced_and_a_stream_that_can_seek_has_none():
    class Seeks(Counted):
        def chunks_from(self, epoch, samples):
            self.opened += 1
            yield np.arange(samples, self.n) + 1000 * epoch, np.zeros(self.n - samples)

    def work(rank, control):
        found = []
        for kind in (Counted, Seeks):
            data = kind(20)
            feed = Feed(data, 5, rank=rank, size=2, control=control, readers="host")
            feed.walk.settle()
            at = Cursor(0, 2, 2, 10)
            costs = feed.walk.replay(at), feed.walk.replay(Cursor(1, 4, 0, 0))
            found.append((*costs, facts(feed.epoch(Cursor(3, 2, 2, 10))), data.read))
        feed = Feed(data, 5, rank=rank, size=2, control=control, readers="host")  # of an epoch that has been tried
        feed.walk.settle()
        before = data.read
        return found, facts(feed.epoch(at)) == facts(Feed(
            Counted(20), 5, rank=rank, size=2, control=control).epoch(at)), data.read - before

    for ((cost, none, steps, read), (no_cost, _, same, little)), alike, more in on_ranks(2, work, [[0, 1]]):
        assert "10 samples of epoch 0 are read again" in cost and none == no_cost == ""
        assert steps == same and len(steps) == 2 and (read, little) in ((28, 8), (0, 0))
        assert alike and more == 0, "the place is sought, not read up to"


def test_a_reader_that_replays_for_long_is_waited_for():
    class Slow(Counted):
        def chunks(self, epoch):
            for chunk in super().chunks(epoch):
                time.sleep(0.05 if epoch else 0)
                yield chunk

    def work(rank, control):
        feed = Feed(Slow(60, sizes=(2,)), 5, rank=rank, size=2, control=control, readers="host")
        feed.walk.settle()
        host = feed.walk.readers.host
        host._timeout_s = host._carrier.timeout_s = 0.6
        cost_s = feed.walk.replay(Cursor(1, 10, 10, 50))
        return [step.n_global for step in feed.epoch(Cursor(1, 10, 10, 50))], cost_s

    assert [found for found, _ in on_ranks(2, work, [[0, 1]])] == [[5, 5]] * 2
