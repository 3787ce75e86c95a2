"""A stream whose files several hosts divide: each sample once and read once, also after a resume on other hosts."""

import itertools
import warnings

import numpy as np
import pytest
from feed_ranks import fetch_threads, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.data.stream import ShuffledStream
from hvdtrain.data.stream_readers import grouped
from hvdtrain.planning.batch.sampler import BatchShares

HOSTS = [[[0], [1]], [[0], [1], [2]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 2]]]
SIZES = st.lists(st.integers(0, 9), min_size=3, max_size=6).filter(lambda sizes: all(sizes[:3]))


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert not fetch_threads()


class Files:
    """Files of numbered samples, read in chunks of two; file i of n goes to shard i mod n. ``read``: by all shards."""

    def __init__(self, sizes, first=None, read=None):
        first = np.cumsum([0, *sizes]).tolist() if first is None else first
        self.files, self.read = list(zip(first, sizes)), [0] if read is None else read
        self.num_shards = len(sizes)

    def shard(self, num_shards, index):
        mine = self.files[index::num_shards]
        return type(self)([n for _, n in mine], [first for first, _ in mine], self.read)

    def chunks(self, epoch):
        return self._rows(epoch, 0)

    def _rows(self, epoch, skipped):
        rows = [first + i for first, n in self.files for i in range(n)][skipped:]
        for at in range(0, len(rows), 2):
            x = np.array(rows[at:at + 2])
            self.read[0] += len(x)
            yield x, x + 1000.0 * epoch


class Seeks(Files):
    def chunks_from(self, epoch, samples):
        return self._rows(epoch, samples)


def held(steps):
    """Return the samples and the numbers of a rank's steps."""
    return ([int(i) for step in steps for micro in step.micros for i in micro[0]],
            [int(number) for step in steps for number in step.numbers])


def size_of(hosts):
    return sum(map(len, hosts))


def feed_of(hosts, rank, control, data, batch=5, readers="auto", **more):
    return Feed(data, batch, rank=rank, size=size_of(hosts), control=control, readers=readers, **more)


@settings(max_examples=25, deadline=None)
@given(hosts=st.sampled_from(HOSTS), sizes=SIZES, prefetch=st.integers(0, 2), even=st.booleans(),
       weights=st.lists(st.integers(0, 3), min_size=8, max_size=8), batch=st.integers(1, 7), when=st.integers(0, 3))
def test_hosts_read_each_sample_once(hosts, sizes, prefetch, even, weights, batch, when):
    """Also hosts without shares, new shares while the epoch lasts, and batches of fewer samples than hosts."""
    size, n = size_of(hosts), sum(sizes)
    shares = [weights[:size] if any(weights[:size]) else None, weights[4:4 + size]]

    def work(rank, control):
        data = Files(sizes)
        feed = feed_of(hosts, rank, control, data, batch, shares=shares[0], prefetch=prefetch, even_micros=even)
        note, before = feed.walk.settle(), data.read[0]
        if any(shares[1]):
            feed.recut(BatchShares.of(shares[1]), when)
        steps = list(feed.epoch(Cursor(2)))
        ranges = feed.walk.shards.ranges(n)
        return note, held(steps), [(s.n_local, s.n_global, s.weight, len(s.micros)) for s in steps], (
            data.read[0] - before, ranges, feed.walk.shards.taken)

    ranks = on_ranks(size, work, hosts)
    assert {f"{len(hosts)} hosts divide the stream's {len(sizes)} files" in note for note, *_ in ranks} == {True}
    assert sorted(sum((samples for _, (samples, _), *_ in ranks), [])) == list(range(n))
    ranges, taken = ranks[0][3][1:]
    assert sorted(sum((numbers for _, (_, numbers), *_ in ranks), [])) == [i for each in ranges for i in range(*each)]
    assert sum(taken) == n and all(rank[3][1:] == (ranges, taken) for rank in ranks)
    assert sum(read for *_, (read, _, _) in ranks) == n, "no sample is read by two hosts"
    for step in zip(*(steps for *_, steps, _ in ranks), strict=True):
        n_global = sum(n_local for n_local, *_ in step)
        assert 0 < n_global <= batch and {facts[1:3] for facts in step} == {(n_global, n_global)}
        assert not even or len({micros for *_, micros in step}) == 1


@settings(max_examples=25, deadline=None)
@given(before=st.sampled_from(HOSTS), after=st.sampled_from([*HOSTS, [[0]], [[0, 1, 2]]]), sizes=SIZES,
       stop=st.integers(1, 4), kind=st.sampled_from([Files, Seeks]), readers=st.sampled_from(["auto", "host", "each"]))
def test_an_epoch_resumes_on_other_hosts(before, after, sizes, stop, kind, readers):
    """No sample is lost or repeated; the next epoch is divided among the new hosts. Twice, to resume a resumed one."""
    n = sum(sizes)

    def first(rank, control):
        feed = feed_of(before, rank, control, kind(sizes))
        feed.walk.settle()
        with_rest = feed.epoch(Cursor())
        steps = list(itertools.islice(with_rest, stop))
        with_rest.close()
        return held(steps), steps[-1].cursor_after, feed.walk.shards.saved(steps[-1].cursor_after)

    def resumed(cursor, saved, readers, steps=None, hosts=after):
        def work(rank, control):
            data = kind(sizes)
            feed = feed_of(hosts, rank, control, data, readers=readers, prefetch=2)
            feed.walk.settle()
            feed.walk.shards.restored(cursor, saved.get("shards", ()))
            cost, from_here = feed.walk.replay(cursor), feed.epoch(cursor)
            found = list(itertools.islice(from_here, steps))
            from_here.close()
            at = found[-1].cursor_after if found else cursor
            return held(found), at, feed.walk.shards.saved(at), cost, feed.walk.shards.ranges(at.samples)

        return on_ranks(size_of(hosts), work, hosts)

    started = on_ranks(size_of(before), first, before)
    cursor, saved = started[0][1:]
    assert saved == {} or sum(saved["shards"]) == cursor.samples
    middle = resumed(cursor, saved, readers, steps=1)
    end = resumed(middle[0][1], middle[0][2], "auto", hosts=before)
    everything = [one[0] for one in [*started, *middle, *end]]
    assert sorted(i for samples, _ in everything for i in samples) == list(range(n))
    assert sorted(i for _, numbers in everything for i in numbers) == [
        i for each in end[0][4] for i in range(*each)]
    assert ("are read again" in middle[0][3]) == (kind is Files)


@pytest.mark.parametrize("sizes, readers, more, words", [
    ([4, 4], "auto", {}, ""), ([4, 4, 4, 4], "host", {}, ""), ([4, 4, 4, 4], "auto", {"ordered": True}, ""),
    ([4, 4, 4, 4], "auto", {"most": 6}, ""), ([4, 0, 4, 4], "auto", {}, "a host would have no samples")])
def test_files_that_are_not_divided_keep_law_2(sizes, readers, more, words):
    hosts, n = [[0], [1], [2, 3]], min(sum(sizes), more.get("most", 99))

    def work(rank, control):
        feed = feed_of(hosts, rank, control, Files(sizes), readers=readers, **more)
        note = feed.walk.settle()
        return note, list(feed.epoch(Cursor(1)))

    ranks = on_ranks(4, work, hosts)
    assert all(words in note and "rank 2 for rank 3" in note and "law 2" not in note for note, _ in ranks)
    batches = [sum((held([one])[0] for one in step), []) for step in zip(*(steps for _, steps in ranks), strict=True)]
    assert batches == [list(range(at, min(at + 5, n))) for at in range(0, n, 5)]


def test_shards_that_begin_alike_are_not_divided():
    class Ignores(Files):
        def shard(self, num_shards, index):
            return self

    def work(rank, control):
        feed = feed_of([[0], [1]], rank, control, Ignores([3, 3]))
        return feed.walk.settle(), held(list(feed.epoch(Cursor())))[0]

    ranks = on_ranks(2, work, [[0], [1]])
    assert all("begin with the same samples" in note for note, _ in ranks)
    assert sorted(sum((samples for _, samples in ranks), [])) == list(range(6))


def test_a_divided_epoch_needs_the_files_that_it_began_with():
    def work(rank, control):
        feed = feed_of([[0], [1]], rank, control, Files([5, 5]))
        feed.walk.settle()
        feed.walk.shards.restored(Cursor(0, 1, 1, 6), [2, 2, 2])
        with pytest.raises(UserError, match="divided into 3 shards, and the data has 2 files"):
            feed.walk.replay(Cursor(0, 1, 1, 6))

    on_ranks(2, work, [[0], [1]])


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0], [1]], [[0, 1], [2, 3]]])
@pytest.mark.parametrize("identities, draws, extra", [
    (["a"] * 4, False, 0), ([""] * 4, False, 16), (["a", "b"] * 2, False, 16), (["a"] * 4, True, None)])
def test_ranks_with_one_identity_read_each_sample_once(hosts, identities, draws, extra):
    """Others read the first samples to compare them; those that draw random numbers are read by each rank."""
    class Known(Files):
        def chunks(self, epoch):
            for x, y in super().chunks(epoch):
                yield x, y + np.random.random() if draws else y

    sizes, size = [30, 40, 20, 50], size_of(hosts)

    def work(rank, control):
        data = Known(sizes)
        data.identity = identities[rank]
        feed = feed_of(hosts, rank, control, data, 24)
        note = feed.walk.settle()
        feed.sample(24)
        return note, [held(feed.epoch(Cursor(epoch)))[0] for epoch in range(2)], feed.walk.decodes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = on_ranks(size, work, hosts)
    for epoch in range(2):
        assert draws or sorted(sum((samples[epoch] for _, samples, _ in ranks), [])) == list(range(140))
    decodes = sum(n for *_, n in ranks)
    assert all(("global random generators" in note) == draws for note, *_ in ranks)
    assert draws or 280 <= decodes <= 280 + extra * size and (decodes == 280) == (extra == 0)


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0], [1]]])
@pytest.mark.parametrize("identities", [["", ""], ["a", "b"], ["a", ""], [None, None], [1, 1]])
def test_a_stream_that_differs_between_ranks_is_read_by_each(hosts, identities):
    class OfRank(Files):
        def chunks(self, epoch):
            for x, y in super().chunks(epoch):
                yield x, y + self.rank

    def work(rank, control):
        data = OfRank([30, 40, 20, 50])
        data.identity, data.rank = identities[rank], rank
        feed = feed_of(hosts, rank, control, data, 24)
        return feed.walk.settle(), feed.walk.readers.shards

    assert on_ranks(2, work, hosts) == [
        ("data.readers: each rank reads the whole stream: the ranks read different samples at its start", 1)] * 2


def test_a_shuffle_buffer_is_one_of_each_shard():
    stream = ShuffledStream(Files([9, 9, 9]), 6, seed=3)
    shards = [stream.shard(3, i) for i in range(3)]
    rows = [np.concatenate([x for x, _ in shard.chunks(1)]) for shard in shards]
    assert stream.num_shards == 3 and [sorted(r.tolist()) for r in rows] == [list(range(i, i + 9)) for i in (0, 9, 18)]
    assert all((np.diff(r) < 0).any() for r in rows)


def test_hosts_that_share_a_replica_read_together():
    assert grouped([{0, 1}, {2}, {3, 4}]) == [[0, 1], [2], [3, 4]]
    assert grouped([{0}, {0, 1}, {2}, {3}, {2}]) == [[0, 1], [2], [3]]
