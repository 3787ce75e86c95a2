"""Read this rank's share of each global batch of a source, by sample number: `SourceWalk`.

Sums over the ranks what a step holds. `hvdtrain.data.stream_walk` reads streams; `hvdtrain.data.feed` decides the cut
over ranks and micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Cursor, Unread
from hvdtrain.data.ledger import Comparison
from hvdtrain.data.sources import ArraySource, Source, Unreadable, checked, fetched, innermost
from hvdtrain.data.stream import Arrays
from hvdtrain.data.stream_reading import ShardPosition
from hvdtrain.planning.batch.sampler import bucketed, epoch_order

WeightFn = Callable[[Arrays], float]

_NONE = np.empty(0, np.int64)


class Bounds(Protocol):
    """From a step of the run and the samples of its global batch to a rank's share of them, [low, high).

    ``rank``: its place in the cut; None: this rank.
    """

    def __call__(self, step: int, n: int, rank: int | None = None) -> tuple[int, int]: ...


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
    by which the position moves on. ``counts_P``: samples of each rank, where they differ from the cut's. ``runs``:
    numbers of all that was read of a stream for the step, (first number, samples). ``waits``: the host has no share of
    this step, and may have samples of its shard left.
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
    runs: Sequence[tuple[int, int]] = ()
    waits: bool = False

    def weighed(self, weight_fn: WeightFn | None) -> LocalBatch:
        """Return this batch with ``own_weight``: its samples, or what ``weight_fn`` says of them."""
        weight = float(self.n_local if weight_fn is None or not self.n_local else weight_fn(self.arrays))
        return replace(self, own_weight=weight)


class SourceWalk:
    """Walk a source. Every rank knows all counts, so only a weight that is no count is summed.

    ``even``: give a rank without samples of a step arrays (0, ...) of their shapes. ``begins``: steps whose fetch is
    begun ahead, of data that can do so (`hvdtrain.data.workers.pool.Pooled`). ``skip``: leave out unreadable samples.
    ``most``: samples at the start that are all of it; 0: no limit. ``bucket``: ``data.bucket``.
    """

    def __init__(self, data: Source, global_batch: int, seed: int, control: Control | None, even: bool,
                 skip: bool = False, most: int = 0, bucket: int = 0) -> None:
        self.samples = min(len(data), most or len(data))
        if self.samples == 0:
            raise UserError("the dataset is empty", "at least one sample", "check its path and its filters")
        self._data: Any = data
        self._global_batch, self._seed = global_batch, seed
        self._control, self._even = control, even
        self.begins, self._left_out = int(hasattr(data, "begin")), 0
        self._most_unread = max(FEW_UNREAD, MOST_UNREAD * self.samples)
        self._skip = skip and not isinstance(data, ArraySource)  # whose samples have all been read
        self.bucket, self._lengths = bucket, lengths_of(data, self.samples) if bucket else _NONE
        self._empty: Arrays = ()
        self._read: Arrays = ()
        self.decodes = 0
        """Samples that this rank and its workers have fetched for batches; comparisons of ranks are not counted."""
        self._first = np.unique(np.linspace(0, self.samples - 1, READ_BEFORE, dtype=np.int64))
        self._comparison, self.head, self.reads = Comparison(data, self.samples, seed), None, True
        self.shards = ShardPosition()

    def settle(self) -> str:
        """Return "": each rank reads its share."""
        return ""

    def replay(self, cursor: Cursor) -> str:
        """Return "": samples are fetched by number."""
        return ""

    @property
    def unlike(self) -> str:
        """Return why samples cannot be verified, the same on all ranks; "" where they can."""
        return self._comparison.unlike

    def batches(self, cursor: Cursor, shuffle: bool, bounds: Bounds) -> Generator[LocalBatch, None, None]:
        """Yield this rank's shares from ``cursor`` to the end of its epoch, in the fetching thread."""
        if cursor.samples > self.samples:
            raise UserError(f"the run is at sample {cursor.samples} of a dataset that has {self.samples}",
                            "a position inside the epoch", "resume with the data of the checkpoint, or start again")
        self._left_out = 0
        return self._batches(self.order(cursor.epoch, shuffle), cursor, bounds)

    def order(self, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the order of the samples in ``epoch``, int64[N]."""
        order_N = epoch_order(self.samples, self._seed, epoch, shuffle)
        return bucketed(order_N, self._lengths, self.bucket, self._seed, epoch) if self.bucket and shuffle else order_N

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
            self._empty = emptied(self.sample(1, Cursor()) if self._skip else self._fetch(index_1))
        return self._empty

    def _fetch(self, indices_n: np.ndarray, epoch: int = 0) -> Arrays:
        return fetched(self._data, indices_n, epoch)


def emptied(arrays: Arrays) -> Arrays:
    """Return arrays (0, ...) of the same shapes and types."""
    return tuple(np.empty((0, *np.shape(array)[1:]), np.asarray(array).dtype) for array in arrays)


def lengths_of(data: Any, n: int) -> np.ndarray:
    """Return the lengths of ``data``'s samples, int64[n]; `UserError` for data that has none."""
    found = getattr(innermost(data), "lengths", None)
    lengths_N = np.asarray([] if found is None else found)
    if lengths_N.ndim != 1 or len(lengths_N) < n or lengths_N.dtype.kind not in "iu":
        raise UserError("data.bucket, and the data has no lengths of its samples",
                        "an attribute lengths, one whole number for each, or rows of input_ids with a data collator",
                        "set lengths on the dataset, or leave data.bucket out")
    return lengths_N.astype(np.int64)
