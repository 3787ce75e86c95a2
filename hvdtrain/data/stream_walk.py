"""Read this rank's share of each global batch of a stream, in the stream's own order: `StreamWalk`.

Sums over the ranks what a step holds. `hvdtrain.data.stream_readers` decides which ranks read what,
`hvdtrain.data.stream_reading` opens the stream, and `hvdtrain.data.host_reader` moves rows between the ranks of a host.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from hvdtrain.cluster.control import agreed, every_rank
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.batches import Bounds, LocalBatch, WeightFn, emptied
from hvdtrain.data.stream import Arrays, RowQueue, Stream, between, fingerprint, joined, numbers_of
from hvdtrain.data.stream_readers import Readers, choose, no_samples
from hvdtrain.data.stream_reading import ShardPosition, StreamReading
from hvdtrain.data.stream_state import CANNOT
from hvdtrain.planning.batch.sampler import BatchShares

_NONE = np.empty(0, np.int64)
_UNEVEN = "the ranks' streams differ in length: steps continue with the remaining samples"
_DIFFERENT = ("the ranks read different streams: each takes its share of what it reads, so samples are lost "
              "or repeated; use the same seed for the shuffle and do not split the stream by rank (a stream that draws "
              "random numbers for each sample needs a seed too)")
KEPT_BATCHES = 4  # consumed batches whose positions a save may still want

Limits = Callable[[int, int], tuple[int, int]]
"""From the rows that were read for a step and a place in the cut to its rows of them, [low, high)."""


class StreamWalk:
    """Walk a stream, which the ranks read alike or receive from one reader per host, and whose end they find together.

    Each host reads the whole stream, or one shard of its files, of which its ranks take their shares of each step.
    ``even``: give a rank whose stream has ended arrays (0, ...) of the shapes that it had. ``unlike``: why the samples
    of the epoch cannot be verified, the same on all ranks. ``most``: as of `SourceWalk`. ``readers``: the key
    ``data.readers``. ``ahead``: batches that a rank fetches before they are computed. ``ordered``: keep the stream's
    order, so that its files are not divided. ``shards``: samples of each shard that the epoch has consumed.
    """

    samples, begins = None, 0

    def __init__(self, data: Stream, global_batch: int, rank: int, control: Control, even: bool, most: int = 0,
                 readers: str = "each", ahead: int = 0, ordered: bool = False) -> None:
        self._global_batch, self._even, self._most = global_batch, even, most
        self._rank, self._control, self._everyone = rank, control, every_rank(control)
        self._empty: Arrays = ()
        self.reading = StreamReading(data, self._seen)
        self._warned: set[str] = set()
        self.unlike = ""
        self._key, self._ahead, self._ordered = readers, ahead, ordered or bool(most)
        self._settled = readers == "each" or self._everyone.size == 1
        self.readers = Readers(self._everyone)
        self.shards = ShardPosition()
        self.positions = self.reading.positions
        self._number = 0
        self._rest: int | None = None

    @property
    def decodes(self) -> int:
        """Return how many samples this rank has read."""
        return self.reading.decodes

    @property
    def head(self) -> tuple[int, int] | None:
        """Return (epoch, checksum) of the first samples of the latest epoch that this rank has opened."""
        return self.reading.heads.get(len(self.shards.taken))

    @property
    def reads(self) -> bool:
        """Return whether this rank reads the stream, and does not receive its rows."""
        return self.readers.reads

    def settle(self) -> str:
        """Decide which ranks read the stream; return a note about it, "" for none. Collective, the first time."""
        if self._settled:
            return ""
        self._settled = True
        self.readers, note = choose(self.reading, self._everyone, self._rank, self._global_batch, self._key,
                                    self._ahead, self._ordered)
        self._empty = emptied(self.readers.tried)
        return note

    def order(self, epoch: int, shuffle: bool) -> None:
        """Return None: a stream has its own order."""

    def replay(self, cursor: Cursor) -> str:
        """Open the stream at ``cursor``; return what it costs, "" where it begins there or can seek. Collective.

        Errors: `UserError` where the data cannot be divided into the shards of the epoch.
        """
        taken, groups = self.shards.at(cursor, self.readers.shards), max(1, len(self.readers.groups))
        if not cursor.samples:
            return ""
        if len(taken) > 1:
            agreed(self._everyone, lambda: self.reading.stream(0, len(taken)), "data")
        kept = (f"the stream's files stay divided into {len(taken)} shards until the end of epoch {cursor.epoch}"
                if len(taken) > 1 and len(taken) != groups else "")
        why = "" if self.reading.seeks(len(taken)) else CANNOT
        if why and len(taken) == 1:
            why = self.positions.why
            if self.reads:
                why = self.reading.seek(cursor.epoch, cursor.samples, self._global_batch)
        if not why:
            return kept and f"resume: {kept}"
        again = max(sum(taken[group::groups]) for group in range(groups))
        took_s = again * self.reading.sample_s
        about = f", about {took_s:.2g} s as at its start" if took_s else ""
        host = " by a host" if len(taken) > 1 else ""
        return (f"resume: {why}, so {count(again, 'sample')} of epoch {cursor.epoch} "
                f"are read again{host} and dropped{about}{kept and '; ' + kept}")

    def batches(self, cursor: Cursor, shuffle: bool, bounds: Bounds) -> Generator[LocalBatch, None, None]:
        """Yield this rank's shares from ``cursor`` to the end of its epoch; a stream does its own shuffling."""
        self._number += 1
        self._rest = None
        self.shards.begin(cursor, self.readers.shards)
        return self._read(cursor, bounds, self._number) if self.reads else self._received(self._number)

    def _read(self, cursor: Cursor, bounds: Bounds, number: int) -> Generator[LocalBatch, None, None]:
        host, taken, by_host = self.readers.host, list(self.shards.taken), self._by_host
        mine = range(self.readers.group, len(taken), len(self.readers.groups)) if by_host else range(len(taken))
        self.reading.close(but=[(index, len(taken)) for index in mine])
        with (contextlib.closing(self.reading.numbered(mine, cursor.epoch, taken)) as chunks,
              contextlib.nullcontext() if host is None else host.walk(number)):
            queue, at = RowQueue(chunks), cursor.samples
            for step in itertools.count(cursor.step):
                wanted, limits = self._cut(step, bounds) if by_host else (self._global_batch, partial(bounds, step))
                parts, runs = queue.take(wanted)
                n = sum([len(part[0]) for part in parts])
                if self._most and n:
                    parts, n = between(parts, 0, max(0, self._most - at)), min(n, max(0, self._most - at))
                if not n and wanted:
                    return
                check = 0
                if self.readers.checks and not by_host:
                    parts = [joined(parts)]
                    check = fingerprint(parts[0])
                parts = parts or [self._empty]
                if host is not None:
                    host.send(number, parts, n, check, partial(limits, n), runs)
                low, high = limits(n, self._rank)
                yield LocalBatch(n, high - low, joined(between(parts, low, high)), check, numbers_of(runs, low, high),
                                 runs=runs, waits=not wanted)
                at += n

    @property
    def _by_host(self) -> bool:
        """Return whether the ranks of a host take their rows from shards of their own in this epoch."""
        return len(self.shards.taken) > 1 and bool(self.readers.groups)

    def _cut(self, step: int, bounds: Bounds) -> tuple[int, Limits]:
        """Return how many rows this host's ranks take of its shards in a step, and the division among them."""
        places = self.readers.groups[self.readers.group]
        counts = [high - low for low, high in (bounds(step, self._global_batch, place) for place in places)]
        if not any(counts) and self._rest is not None and step >= self._rest:
            hosts = len(self.readers.groups)  # in turn, where there are more of them than samples in a batch
            of_hosts = np.diff(BatchShares.of([1] * hosts).offsets(self._global_batch)).tolist()
            mine = of_hosts[(self.readers.group + step) % hosts]
            counts = np.diff(BatchShares.of([1] * len(places)).offsets(mine)).tolist()
        shares = BatchShares.of(counts if any(counts) else [1] * len(places))

        def limits(n: int, place: int) -> tuple[int, int]:
            low, high = shares.offsets(n)[places.index(place):][:2].tolist()
            return low, high

        return sum(counts), limits

    def _received(self, number: int) -> Generator[LocalBatch, None, None]:
        assert self.readers.host is not None
        for n, check, low, high, arrays, runs in self.readers.host.rows(number):
            yield LocalBatch(n, high - low, arrays, check, numbers_of(runs, low, high), runs=runs)

    def _seen(self) -> None:
        if self.readers.host is not None and self._number:
            self.readers.host.reading(self._number)

    def totalled(self, batches: Iterator[LocalBatch], cursor: Cursor,
                 weight_fn: WeightFn | None) -> Iterator[LocalBatch]:
        """Yield batches until all streams have ended; `UserError` for an epoch without samples. Collective, unless one
        rank reads for all others: then each knows the totals, and waits for nobody but the reader.
        """
        first, self.unlike, by_host = True, "", self._by_host
        known = self.readers.host is not None and not self.readers.checks and not by_host and weight_fn is None
        for step in itertools.count(cursor.step):
            batch, error = self._next(batches, weight_fn)
            taken = self.shards.counted(batch.runs)
            if known:
                n_global, weight, alike, same, failed = batch.n, float(batch.n), True, True, error is not None
                waits = 0
            else:
                counted = np.array([batch.waits, *taken]) * self.readers.counts
                n_global, weight, alike, same, failed, (waits, *taken) = _summed(
                    self._control, self._everyone, batch, error, counted)
            if failed:
                agreed(self._everyone, partial(_raise, error), "data")
            if n_global == 0:
                if waits:  # the samples that are left are on hosts whose ranks have no share of a step
                    # All readers begin to take them with the same one, which none has reached yet.
                    self._rest = step + self._ahead + 3 if self._rest is None else self._rest
                    continue
                if first and cursor.samples == 0:
                    raise no_samples(cursor.epoch)
                return
            if by_host:
                alike = n_global == self._global_batch and self._rest is None  # as the cut has it
                batch = replace(batch, n=n_global)
            elif not alike:
                self._refute(_UNEVEN)
                batch = replace(batch, numbers=None)
            elif not same:
                self._refute(_DIFFERENT)
            first, counts_P = False, None
            if self._even:
                batch = self._shaped(batch)
                counts_P = None if alike else self._control.gather(batch.n_local)
            # Where some have ended, the longest stream still reads whole batches: keep its position.
            consumed = n_global if by_host or alike else self._global_batch
            self.positions.forget(cursor.samples - KEPT_BATCHES * self._global_batch)
            cursor = cursor.advance(consumed)
            self.shards.advance(consumed, taken)
            yield replace(batch, n_global=n_global, weight=weight, consumed=consumed, counts_P=counts_P)

    def _next(self, batches: Iterator[LocalBatch], weight_fn: WeightFn | None) -> tuple[LocalBatch, UserError | None]:
        """Return the next batch, without samples at the end of the stream and with an error of this rank."""
        last = LocalBatch(0, 0, (), numbers=_NONE)
        try:
            with contextlib.nullcontext() if self.readers.host is None else self.readers.host.waiting():
                return next(batches, last).weighed(weight_fn), None
        except UserError as error:
            return last, error

    def sample(self, n: int, cursor: Cursor) -> Arrays:
        """Return ``n`` samples of the batch at ``cursor``, with which `batches` continues: one opening.

        Where one rank of a host reads, of the first batch of the run: a replay would hold up the others.
        """
        if self.readers.tried:
            return tuple(np.resize(array, (n, *array.shape[1:])) for array in self.readers.tried)
        parts = self.reading.start(0, 1, cursor.epoch, cursor.samples, self._global_batch)
        if not parts:
            raise no_samples(cursor.epoch)
        rows = joined(between(parts, 0, min(n, self._global_batch)))
        return tuple(np.resize(array, (n, *array.shape[1:])) for array in rows)

    def check_alike(self, control: Control) -> None:
        """Do nothing: `totalled` compares each batch, where the stream is read anyway."""

    def compare(self, control: Control, epoch: int) -> int:
        """Return 0: `totalled` has compared all batches."""
        return 0

    def _shaped(self, batch: LocalBatch) -> LocalBatch:
        """Give ``batch`` arrays (0, ...) of the stream's shapes where the stream has ended on this rank only."""
        if batch.arrays:
            self._empty = self._empty or emptied(batch.arrays)
            return batch
        if not self._empty:
            raise UserError(f"rank {self._rank}'s stream has no sample, and with sync_batchnorm "
                            "every rank runs the model", "at least one sample on every rank",
                            "give every rank the same stream, or set sync_batchnorm: false")
        return replace(batch, arrays=self._empty)

    def _refute(self, text: str) -> None:
        self.unlike = self.unlike or text.partition(":")[0]
        if self._rank == 0 and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)


def _summed(control: Control, everyone: Control, batch: LocalBatch, error: UserError | None,
            counted_K: np.ndarray) -> tuple[int, float, bool, bool, bool, list[int]]:
    """Return samples and weight of a step over the ranks of ``control``, whether the batches that ``everyone`` has read
    have one length and one checksum, whether any rank has an error, and the sum of ``counted_K``.
    """
    mine = np.array([batch.n_local, batch.own_weight, batch.n, batch.n ** 2, batch.check, batch.check ** 2,
                     error is not None, *counted_K], np.float64)
    sums, size = control.sum(mine), everyone.size
    read = sums[2:] if everyone is control else everyone.sum(mine[2:])
    seen, seen2, checks, checks2, failed, *counted = map(int, read)
    # No variance over ranks.
    return int(sums[0]), float(sums[1]), size * seen2 == seen ** 2, size * checks2 == checks ** 2, failed > 0, counted


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error
