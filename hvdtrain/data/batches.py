"""Read this rank's share of each global batch: `SourceWalk` by sample number, `StreamWalk` in the data's own order.

Both sum over the ranks what a step holds. `hvdtrain.data.feed` decides the cut over ranks and micro-batches.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.cluster.control import every_rank
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Cursor, Unread
from hvdtrain.data.ledger import Comparison
from hvdtrain.data.sources import ArraySource, Source, Unreadable, checked, fetched
from hvdtrain.data.stream import Arrays, Stream, fingerprint, rebatch
from hvdtrain.planning.batch.sampler import epoch_order

WeightFn = Callable[[Arrays], float]

_NONE = np.empty(0, np.int64)
_UNEVEN = "the ranks' streams differ in length: steps continue with the remaining samples"
_DIFFERENT = ("the ranks read different streams: each takes its share of what it reads, so samples are lost "
              "or repeated; use the same seed for the shuffle and do not split the stream by rank (a stream that draws "
              "random numbers for each sample needs a seed too)")
HEAD_ROWS = 16  # samples at the start of a stream's epoch that are compared after a resumption
Bounds = Callable[[int, int], tuple[int, int]]
"""From a step of the run and the samples of its global batch to this rank's share of them, [low, high)."""

READ_BEFORE = 7
"""Samples of a source that are read before the first step: to compare ranks, and to judge the loss by them."""

FEW_UNREAD, MOST_UNREAD = 3, 0.01
"""Samples, and fraction of the data: a run ends where more of them cannot be read."""


@dataclass(frozen=True)
class LocalBatch:
    """This rank's ``n_local`` of a global batch's ``n`` samples, completed by `totalled` with sums over all ranks.

    ``numbers``: int64[n_local], of a stream the positions in it; None where the ranks' streams are of several lengths.
    ``unread``: (number, place, reason) of samples of this rank that were left out, which ``n_local`` does not count.
    ``check``: a stream's checksum of all ``n``. ``own_weight``: this rank's part of ``weight``. ``consumed``: samples
    by which the position moves on. ``counts_P``: samples of each rank, where they differ from the cut's.
    """

    n: int
    n_local: int
    arrays: Arrays
    check: int = 0
    numbers: np.ndarray | None = None
    unread: tuple[Unread, ...] = ()
    own_weight: float = 0.0
    n_global: int = 0
    weight: float = 0.0
    consumed: int = 0
    counts_P: Sequence[int] | None = None
    all_unread: tuple[Unread, ...] = ()

    def weighed(self, weight_fn: WeightFn | None) -> LocalBatch:
        """Return this batch with ``own_weight``: its samples, or what ``weight_fn`` says of them."""
        weight = float(self.n_local if weight_fn is None or not self.n_local else weight_fn(self.arrays))
        return replace(self, own_weight=weight)


class SourceWalk:
    """Walk a source. Every rank knows all counts, so only a weight that is no count is summed.

    ``even``: give a rank without samples of a step arrays (0, ...) of their shapes. ``begins``: steps whose fetch is
    begun ahead, of data that can do so (`hvdtrain.data.workers.pool.Pooled`). ``skip``: leave out unreadable samples.
    ``most``: samples at the start that are all of it; 0: no limit.
    """

    def __init__(self, data: Source, global_batch: int, seed: int, control: Control | None, even: bool,
                 skip: bool = False, most: int = 0) -> None:
        self.samples = min(len(data), most or len(data))
        if self.samples == 0:
            raise UserError("the dataset is empty", "at least one sample", "check its path and its filters")
        self._data: Any = data
        self._global_batch, self._seed = global_batch, seed
        self._control, self._even = control, even
        self.begins, self._left_out = int(hasattr(data, "begin")), 0
        self._most_unread = max(FEW_UNREAD, MOST_UNREAD * self.samples)
        self._skip = skip and not isinstance(data, ArraySource)  # whose samples have all been read
        self._empty: Arrays = ()
        self._read: Arrays = ()
        self.decodes = 0
        """Samples that this rank and its workers have fetched for batches; comparisons of ranks are not counted."""
        self._first = np.unique(np.linspace(0, self.samples - 1, READ_BEFORE, dtype=np.int64))
        self._comparison, self.head = Comparison(data, self.samples, seed), None

    @property
    def unlike(self) -> str:
        """Return why samples cannot be verified, the same on all ranks; "" where they can."""
        return self._comparison.unlike

    def batches(self, cursor: Cursor, shuffle: bool, bounds: Bounds) -> Generator[LocalBatch, None, None]:
        """Yield this rank's shares from ``cursor`` to the end of its epoch, in the fetching thread."""
        if cursor.samples > self.samples:
            raise UserError(f"the run is at sample {cursor.samples} of a dataset that has {self.samples}",
                            "a position inside the epoch", "resume with the data of the checkpoint, or start again")
        order_N, self._left_out = epoch_order(self.samples, self._seed, cursor.epoch, shuffle), 0
        return self._batches(order_N, cursor, bounds)

    def _batches(self, order_N: np.ndarray, cursor: Cursor, bounds: Bounds) -> Generator[LocalBatch, None, None]:
        def wanted() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for step, at in enumerate(range(cursor.samples, self.samples, self._global_batch), cursor.step):
                indices = order_N[at:at + self._global_batch]
                low, high = bounds(step, len(indices))
                yield indices, indices[low:high]

        for indices, own, begun in self._ahead(wanted(), cursor.epoch):
            read, arrays, unread = self._readable(own, begun, cursor.epoch)
            arrays = arrays if len(read) else self._none_like(indices[:1])
            yield LocalBatch(len(indices), len(read), arrays, numbers=read, unread=unread)

    def _ahead(self, wanted: Iterator[tuple[np.ndarray, np.ndarray]],
               epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        """Yield (numbers of a step, this rank's, its fetch under way), with the next step's fetch begun."""
        data = self._data
        begun: deque[tuple[np.ndarray, np.ndarray, Any]] = deque()
        try:
            for indices, own in wanted:
                self.decodes += len(own)
                begun.append((indices, own, data.begin(own, epoch) if self.begins and len(own) else None))
                if len(begun) > self.begins:
                    yield begun.popleft()
            while begun:
                yield begun.popleft()
        finally:
            for _, _, left in begun:
                if left is not None:
                    data.drop(left)

    def _readable(self, indices_n: np.ndarray, begun: Any = None,
                  epoch: int = 0) -> tuple[np.ndarray, Arrays, tuple[Unread, ...]]:
        """Return those of the samples that can be read, their arrays, and the others, where they may be left out."""
        unread: list[Unread] = []
        while len(indices_n):
            try:
                arrays = (self._fetch(indices_n, epoch) if begun is None
                          else checked(self._data.collect(begun), len(indices_n)))
                return indices_n, arrays, tuple(unread)
            except Unreadable as error:
                if not self._skip or error.number not in indices_n:
                    raise
                unread.append((error.number, error.place, error.reason))
                indices_n, begun = indices_n[indices_n != error.number], None
                self.decodes += len(indices_n)  # fetched again without it
        return indices_n, (), tuple(unread)

    def totalled(self, batches: Iterator[LocalBatch], cursor: Cursor,
                 weight_fn: WeightFn | None) -> Iterator[LocalBatch]:
        """Yield each batch with its step's weight; `UserError` if too many are unreadable. Collective."""
        for batch in (each.weighed(weight_fn) for each in batches):
            if self._skip:
                yield self._readable_total(batch)
                continue
            weight = float(batch.n)
            if weight_fn is not None:
                assert self._control is not None
                weight = float(self._control.sum(np.array([batch.own_weight]))[0])
            yield replace(batch, n_global=batch.n, weight=weight, consumed=batch.n)

    def _readable_total(self, batch: LocalBatch) -> LocalBatch:
        """Add up the samples of a step that the ranks could read; collective."""
        mine = np.array([batch.n_local, batch.own_weight, len(batch.unread)], np.float64)
        n_global, weight, n_unread = mine if self._control is None else self._control.sum(mine)
        batch = replace(batch, n_global=int(n_global), weight=float(weight), consumed=batch.n)
        if not n_unread:
            return batch
        rows = [(batch.n_local, batch.unread)]
        rows = rows if self._control is None else self._control.gather(rows[0])
        unread = tuple(each for _, left_out in rows for each in left_out)
        self._left_out += len(unread)
        if self._left_out > self._most_unread:
            number, place, reason = unread[-1]
            raise UserError(f"{self._left_out} of {self.samples} samples cannot be read, the latest of them {number}: "
                            f"{place}: {reason}", f"{MOST_UNREAD:.0%} at most, or {FEW_UNREAD}",
                            "fix the data; on_bad_sample: skip tolerates only a few")
        return replace(batch, counts_P=[n for n, _ in rows] if self._even else None, all_unread=unread)

    def sample(self, n: int, cursor: Cursor) -> Arrays:
        """Return ``n`` readable samples, repeated where there are fewer; `Unreadable` where too few are."""
        read, arrays, unread = self._readable(np.unique(np.arange(n) % self.samples))
        for number in range(n, self.samples):
            if len(read) or len(unread) > self._most_unread:
                break
            read, arrays, more = self._readable(np.array([number]))
            unread += more
        if not len(read):
            raise Unreadable(*unread[0])
        return tuple(np.resize(array, (n, *array.shape[1:])) for array in arrays)

    def check_alike(self, control: Control) -> None:
        """Compare samples over all ranks (`Comparison.begin`); collective."""
        self._comparison.begin(control, self._first, self.read_before())

    def compare(self, control: Control, epoch: int) -> int:
        """Compare other samples in each ``epoch`` (`Comparison.again`); collective."""
        return self._comparison.again(control, epoch)

    def read_before(self) -> Arrays:
        """Return `READ_BEFORE` samples spread over the source, which is read once for them."""
        if not self._read:
            _, self._read, _ = self._readable(self._first)
        return self._read or self.sample(1, Cursor())

    def _none_like(self, index_1: np.ndarray) -> Arrays:
        """Return arrays (0, ...) of a sample's shapes where the walk is ``even``; else ()."""
        if self._even and not self._empty:
            self._empty = _emptied(self.sample(1, Cursor()) if self._skip else self._fetch(index_1))
        return self._empty

    def _fetch(self, indices_n: np.ndarray, epoch: int = 0) -> Arrays:
        return fetched(self._data, indices_n, epoch)


class StreamWalk:
    """Walk a stream, which the ranks read alike and whose end they find together.

    ``even``: give a rank whose stream has ended arrays (0, ...) of the shapes that it had. ``unlike``: why the samples
    of the epoch cannot be verified, the same on all ranks. ``head``: (epoch, checksum) of the first `HEAD_ROWS` samples
    of the latest epoch that this rank has opened. ``most``: as of `SourceWalk`.
    """

    samples, begins = None, 0

    def __init__(self, data: Stream, global_batch: int, rank: int, control: Control, even: bool, most: int = 0) -> None:
        self._data, self._global_batch, self._even, self._most = data, global_batch, even, most
        self._rank, self._control, self._everyone = rank, control, every_rank(control)
        self._empty: Arrays = ()
        self.decodes = 0
        self._warned: set[str] = set()
        self.unlike = ""
        self.head: tuple[int, int] | None = None
        self._peeked: tuple[tuple[int, int], Arrays | None, Generator[Arrays, None, None]] | None = None

    def batches(self, cursor: Cursor, shuffle: bool, bounds: Bounds) -> Generator[LocalBatch, None, None]:
        """Yield this rank's shares from ``cursor`` to the end of its epoch; a stream does its own shuffling."""
        with contextlib.closing(self._continued(cursor)) as batches:
            for step, batch in enumerate(batches, cursor.step):
                at = cursor.samples + (step - cursor.step) * self._global_batch
                self.decodes += len(batch[0])
                if self._most:
                    batch = tuple(array[:max(0, self._most - at)] for array in batch)
                    if not len(batch[0]):
                        return
                low, high = bounds(step, len(batch[0]))
                mine = tuple(array[low:high] for array in batch)
                yield LocalBatch(len(batch[0]), high - low, mine, fingerprint(batch), np.arange(at + low, at + high))

    def totalled(self, batches: Iterator[LocalBatch], cursor: Cursor,
                 weight_fn: WeightFn | None) -> Iterator[LocalBatch]:
        """Yield batches until all streams have ended; `UserError` for an epoch without samples. Collective."""
        first, self.unlike = True, ""
        while True:
            batch = next(batches, LocalBatch(0, 0, (), numbers=_NONE)).weighed(weight_fn)
            mine = np.array([batch.n_local, batch.own_weight, batch.n, batch.n ** 2, batch.check, batch.check ** 2],
                            np.float64)
            sums, size = self._control.sum(mine), self._everyone.size
            read = sums[2:] if self._everyone is self._control else self._everyone.sum(mine[2:])
            n_global, (seen, seen2, checks, checks2) = int(sums[0]), map(int, read)
            if n_global == 0:
                if first and cursor.samples == 0:
                    raise _no_samples(cursor.epoch)
                return
            alike = size * seen2 == seen ** 2  # no variance over ranks
            if not alike:
                self._refute(_UNEVEN)
                batch = replace(batch, numbers=None)
            elif size * checks2 != checks ** 2:
                self._refute(_DIFFERENT)
            first, counts_P = False, None
            if self._even:
                batch = self._shaped(batch)
                counts_P = None if alike else self._control.gather(batch.n_local)
            # Where some have ended, the longest stream still reads whole batches: keep its position.
            consumed = n_global if alike else self._global_batch
            yield replace(batch, n_global=n_global, weight=float(sums[1]), consumed=consumed, counts_P=counts_P)

    def sample(self, n: int, cursor: Cursor) -> Arrays:
        """Return ``n`` samples of the batch at ``cursor``, with which `batches` continues: one opening."""
        place = (cursor.epoch, cursor.samples)
        if self._peeked is None or self._peeked[0] != place:
            batches = self._continued(cursor)
            self._peeked = (place, next(batches, None), batches)
        first = self._peeked[1]
        if first is None:
            raise _no_samples(cursor.epoch)
        return tuple(np.resize(array, (n, *array.shape[1:])) for array in first)

    def check_alike(self, control: Control) -> None:
        """Do nothing: `totalled` compares each batch, where the stream is read anyway."""

    def compare(self, control: Control, epoch: int) -> int:
        """Return 0: `totalled` has compared all batches."""
        return 0

    def _opened(self, cursor: Cursor) -> Generator[Arrays, None, None]:
        chunks = self._data.chunks(cursor.epoch)
        try:
            yield from rebatch(self._headed(chunks, cursor.epoch), self._global_batch, cursor.samples)
        finally:
            if hasattr(chunks, "close"):
                chunks.close()

    def _headed(self, chunks: Iterable[Arrays], epoch: int) -> Iterator[Arrays]:
        """Yield ``chunks`` and set ``head`` once their first samples have been read."""
        rows: list[np.ndarray] = []
        n, self.head = 0, None
        for chunk in chunks:
            if n < HEAD_ROWS and isinstance(chunk, tuple) and all(map(np.ndim, chunk)):
                for row in zip(*(array[:HEAD_ROWS - n] for array in chunk)):
                    rows, n = [*rows, *map(np.asarray, row)], n + 1
                self.head = (epoch, fingerprint(tuple(rows))) if n == HEAD_ROWS else None
            yield chunk

    def _continued(self, cursor: Cursor) -> Generator[Arrays, None, None]:
        """Yield the batches from ``cursor``, out of what `sample` has opened where that is of the same epoch."""
        # Some streams have another order when they are opened again: a resumed run must not open its epoch twice.
        peeked, self._peeked = self._peeked, None
        if peeked is None or peeked[0][0] != cursor.epoch or peeked[0][1] > cursor.samples:
            yield from self._opened(cursor)
        elif peeked[1] is not None:
            with contextlib.closing(peeked[2]) as rest:
                batches = itertools.chain([peeked[1]], rest)
                yield from rebatch(batches, self._global_batch, cursor.samples - peeked[0][1])

    def _shaped(self, batch: LocalBatch) -> LocalBatch:
        """Give ``batch`` arrays (0, ...) of the stream's shapes where the stream has ended on this rank only."""
        if batch.arrays:
            self._empty = self._empty or _emptied(batch.arrays)
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


def _emptied(arrays: Arrays) -> Arrays:
    return tuple(np.empty((0, *np.shape(array)[1:]), np.asarray(array).dtype) for array in arrays)


def _no_samples(epoch: int) -> UserError:
    return UserError(f"the stream has no samples in epoch {epoch}", "samples in every epoch",
                     "give a dataset that can be iterated again, not an exhausted generator")
