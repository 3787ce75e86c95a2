"""The batches of one rank, step by step: `Feed` joins data, cut, micro-batches and position.

Owns the walk through an epoch and the background fetch. Does not compute, does not move samples between
ranks, and calls the control plane in the consumer's thread only, and only where a count or weight is not
known locally.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.data.cursor import Cursor
from hvdtrain.data.sampler import Cut, at_least, cut, epoch_order, micro_batches, padded, steps_per_epoch
from hvdtrain.data.sources import ArraySource, Source
from hvdtrain.data.stream import Arrays, Stream, fingerprint, rebatch
from hvdtrain.errors import UserError
from hvdtrain.protocols import Control

_JOIN_S = 10.0
"""Longest wait for the fetching thread after its stop: it may be inside a user's fetch, which cannot be
interrupted."""
_UNEVEN = "the ranks' streams differ in length: steps go on with the samples there are"
_DIFFERENT = ("the ranks read different streams: each takes its cut of what it reads, so samples are lost or "
              "repeated; seed the shuffle alike and do not split the stream by rank")


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one global batch.

    ``micros``: tuples of arrays (b, ...), none empty; no micro-batch at all on a rank that has no samples
    of this step. With a feed's ``even_micros`` as many as on every other rank, the last ones empty (0, ...).
    ``n_local``, ``n_global``: samples of this rank and of all ranks. ``weight``: the global weight W that
    the summed loss is divided by (law 1); ``own_weight``: this rank's part of it. ``cursor_before``,
    ``cursor_after``: positions around the step, equal on all ranks.
    """

    cursor_before: Cursor
    cursor_after: Cursor
    micros: list[Arrays]
    n_local: int
    n_global: int
    weight: float
    own_weight: float


@dataclass(frozen=True)
class _Part:
    """What the fetching thread hands over: a global batch's size and checksum, this rank's arrays, and their cut."""

    cut: Cut
    seen: int
    check: int
    n_local: int
    arrays: Arrays


class Feed:
    """Walks one rank through a `Source` or a `Stream` in global batches that the ranks share.

    ``global_batch``: samples of a step over all ranks; may be below ``size`` and not divisible by it.
    ``shares``: weights float[size] of the cut, equal by default; `recut` changes it from a step on.
    ``seed``, ``shuffle``: order of a source; a stream keeps its own. ``accumulate``, ``micro_batch``: see
    `sampler.micro_batches`.
    ``control``: sums float64[k] over ranks; needed for a stream and for ``weight_fn``. ``weight_fn``: this
    rank's arrays of a step -> their weight (for instance valid tokens); without it the weight is the sample
    count.
    ``prefetch``: batches fetched ahead by a background thread, 0 fetches inline.
    ``even_micros``: give every rank the same number of micro-batches in each step, empty ones where samples are
    lacking, so that all ranks enter the collectives of a forward pass (synchronised BatchNorm).
    Errors: `UserError` for empty data, a global batch < 1, unusable shares. Ranks whose streams differ get a
    warning from rank 0: in length (the run goes on while one of them has samples) or in their first sample.
    """

    def __init__(self, data: Source | Stream, global_batch: int, *, rank: int = 0, size: int = 1,
                 shares: Sequence[float] | None = None, seed: int = 0, shuffle: bool = True,
                 accumulate: int = 1, micro_batch: int = 0, control: Control | None = None,
                 weight_fn: Callable[[Arrays], float] | None = None, prefetch: int = 2,
                 even_micros: bool = False) -> None:
        assert 0 <= rank < size and isinstance(data, (Source, Stream))
        at_least("global_batch", global_batch, 1)
        at_least("data.prefetch", prefetch, 0)
        micro_batches(0, accumulate, micro_batch)
        self.data: Any = data
        self.global_batch, self.prefetch = int(global_batch), prefetch
        self.rank, self.size, self.seed, self.shuffle = rank, size, seed, shuffle
        self.control, self.weight_fn, self.even_micros = control, weight_fn, even_micros
        self.samples: int | None = len(data) if isinstance(data, Source) else None
        shares = [1.0] * size if shares is None else [float(share) for share in shares]
        if len(shares) != size:
            raise UserError(f"{len(shares)} shares for {size} ranks",
                            "one share per rank",
                            f"give {size} shares")
        cut(0, shares)
        self._warned: set[str] = set()
        self._peeked: tuple[tuple[int, int], Arrays | None, Generator[Arrays, None, None]] | None = None
        self._empty: Arrays = ()
        self._read: Arrays = ()
        self._cuts = [(0, Cut.of(shares, accumulate, micro_batch))]
        if self.samples == 0:
            raise UserError("the dataset is empty", "at least one sample", "check its path and its filters")
        assert control is not None or (weight_fn is None and self.samples is not None)

    @property
    def ahead(self) -> int:
        """How many steps after the next one may have been fetched already, and so keep their cut."""
        return self.prefetch + 1 if self.prefetch else 0

    def recut(self, cut: Cut, from_step: int) -> None:
        """Cut by ``cut`` from step ``from_step`` of the run on; every rank calls it alike, between two steps.

        While an epoch is walked, ``from_step`` has to be `ahead` steps after the next one at least. What a step
        consists of stays as it is (law 2): the ranks take other parts of it.
        """
        assert len(cut.shares_P) == self.size
        self._cuts = [(at, old) for at, old in self._cuts if at < from_step] + [(from_step, cut)]

    def cut_at(self, step: int) -> Cut:
        """The cut of step ``step`` of the run."""
        return next(cut for at, cut in reversed(self._cuts) if at <= step)

    def sample(self, n: int, cursor: Cursor = Cursor()) -> Arrays:
        """``n`` samples to try a model on, over and over where there are fewer. Not collective.

        Of a source the first ones. Of a stream the global batch at ``cursor``, which is kept: the walk from there goes
        on with it, so that the stream is opened no oftener than without this.
        """
        if self.samples is not None:
            return self._fetch(np.arange(n) % self.samples)
        place = (cursor.epoch, cursor.samples)
        if self._peeked is None or self._peeked[0] != place:
            batches = self._global_batches(cursor)
            self._peeked = (place, next(batches, None), batches)
        first = self._peeked[1]
        if first is None:
            raise UserError(f"the stream has no samples in epoch {cursor.epoch}", "samples in every epoch",
                            "give a dataset that can be iterated anew, not a spent generator")
        return tuple(np.resize(array, (n, *array.shape[1:])) for array in first)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch; None for a stream, whose length nobody knows."""
        return None if self.samples is None else steps_per_epoch(self.samples, self.global_batch)

    def steps_left(self, cursor: Cursor) -> int | None:
        """Steps from ``cursor`` to the end of its epoch; None for a stream."""
        if self.samples is None:
            return None
        return steps_per_epoch(max(self.samples - cursor.samples, 0), self.global_batch)

    def check_ranks_agree(self) -> None:
        """Make sure that all ranks hold a source of one length and the same batch and seed; collective.

        Ranks whose datasets differ in length would take different numbers of steps and wait for one another
        forever.
        Errors: `UserError` on every rank alike.
        """
        mine = (self.samples, self.global_batch, self.seed, self.shuffle)
        found = [mine] if self.control is None else self.control.gather(mine)
        if len(set(found)) > 1:
            table = ", ".join(f"rank {rank}: {values}" for rank, values in enumerate(found))
            raise UserError(f"ranks differ in (samples, global_batch, seed, shuffle): {table}",
                            "the same on every rank",
                            "give every rank the same data and configuration; the sampler does the cut")
        if self.control is not None and self.samples is not None and len(set(self.control.gather(self._probe()))) > 1:
            self._tell_unlike_data()

    def _probe(self) -> int:
        """A checksum of the first, middle and last sample."""
        return fingerprint(self.read_before(), rows=3)

    def read_before(self) -> Arrays:
        """The first, middle and last sample of a source, which is asked for them once."""
        assert self.samples
        self._read = self._read or self._fetch(np.unique([0, self.samples // 2, self.samples - 1]))
        return self._read

    def _tell_unlike_data(self) -> None:
        """Arrays must be the same on every rank; a dataset may draw random numbers when it is read."""
        if isinstance(self.data, ArraySource):
            raise UserError("ranks hold different arrays", "the same data in the same order on every rank",
                            "seed what shuffles or splits it; the sampler does the cut")
        self._warn_once("the ranks read different samples at the same place: seed what shuffles or splits the data "
                        "alike, unless the dataset draws random numbers when it is read")

    def epoch(self, cursor: Cursor) -> Generator[StepBatch, None, None]:
        """Yield the steps from ``cursor`` to the end of its epoch, the same number on every rank.

        What a step holds depends on (seed, epoch, position) only, so a walk that starts in the middle of an
        epoch continues as the walk from its beginning would have. Close the iterator to stop early; that
        ends its thread.
        """
        if self.samples is None:
            return self._stream_steps(cursor)
        if cursor.samples > self.samples:
            raise UserError(f"the run stands at sample {cursor.samples} of a dataset that has {self.samples}",
                            "a position inside the epoch",
                            "resume with the data of the checkpoint, or start anew")
        return self._source_steps(cursor, epoch_order(self.samples, self.seed, cursor.epoch, self.shuffle))

    def eval_epoch(self) -> Generator[StepBatch, None, None]:
        """Yield every sample once, in the data's own order, in the same number of steps on every rank.

        A rank whose part of a step is empty gets a `StepBatch` without micro-batches, so that it can enter
        the collectives of that step; metrics as (sum, weight) are then exact.
        """
        if self.samples is None:
            return self._stream_steps(Cursor())
        return self._source_steps(Cursor(), epoch_order(self.samples, self.seed, 0, shuffle=False))

    # --- a source: every rank knows all counts, so only an own weight is summed ----------------------------

    def _source_steps(self, cursor: Cursor, order_N: np.ndarray) -> Generator[StepBatch, None, None]:
        parts_ahead = prefetched(self._source_parts(cursor, order_N), self.prefetch)
        with contextlib.closing(parts_ahead) as parts:
            for part in parts:
                weight = float(part.seen)
                if self.weight_fn:
                    weight = float(self._sum([self._local_weight(part)])[0])
                after = cursor.advance(part.seen)
                yield self._step(cursor, after, part, part.seen, weight)
                cursor = after

    def _source_parts(self, cursor: Cursor, order_N: np.ndarray) -> Generator[_Part, None, None]:
        for step, at in enumerate(range(cursor.samples, len(order_N), self.global_batch), cursor.step):
            indices, cut = order_N[at:at + self.global_batch], self.cut_at(step)
            low, high = self._mine(cut, len(indices))
            arrays = self._fetch(indices[low:high]) if high > low else self._none_like(indices[:1])
            yield _Part(cut, len(indices), 0, high - low, arrays)

    def _fetch(self, indices_n: np.ndarray) -> Arrays:
        fetched = self.data.fetch(indices_n)
        arrays = (fetched,) if isinstance(fetched, np.ndarray) else tuple(fetched)
        if not arrays or any(np.ndim(array) == 0 or len(array) != len(indices_n) for array in arrays):
            shapes = [np.shape(array) for array in arrays]
            raise UserError(f"fetching {len(indices_n)} samples gave arrays of shapes {shapes}",
                            f"arrays whose first axis is {len(indices_n)}",
                            "mend the dataset's fetch()")
        return arrays

    def _none_like(self, index_1: np.ndarray) -> Arrays:
        """Arrays (0, ...) of the shapes and dtypes of a sample, which is read once, where empty micro-batches are
        made of them; else ()."""
        if self.even_micros and not self._empty:
            self._empty = _emptied(self._fetch(index_1))
        return self._empty if self.even_micros else ()

    # --- a stream: ranks read it alike and find out together that it has ended -----------------------------

    def _stream_steps(self, cursor: Cursor) -> Generator[StepBatch, None, None]:
        first = True
        with contextlib.closing(prefetched(self._stream_parts(cursor), self.prefetch)) as parts:
            while True:
                part = next(parts, _Part(self.cut_at(cursor.step), 0, 0, 0, ()))
                sums = self._sum([part.n_local, self._local_weight(part), part.seen, part.seen ** 2,
                                  part.seen > 0, part.check, part.check ** 2])
                n_global, seen, seen2, ranks, checks, checks2 = (int(sums[i]) for i in (0, 2, 3, 4, 5, 6))
                if n_global == 0:
                    if first and cursor.samples == 0:
                        raise UserError(f"the stream has no samples in epoch {cursor.epoch}",
                                        "samples in every epoch",
                                        "give a dataset that can be iterated anew, not a spent generator")
                    return
                alike = self.size * seen2 == seen ** 2  # no variance over ranks
                if not alike:
                    self._warn_once(_UNEVEN)
                if first and ranks * checks2 != checks ** 2:
                    self._warn_once(_DIFFERENT)
                # Where some have ended, the longest stream still reads whole batches: keep its position.
                after = cursor.advance(n_global if alike else self.global_batch)
                counts_P = None
                if self.even_micros:
                    part = self._shaped(part)
                    counts_P = None if alike else self._gathered(part.n_local)
                yield self._step(cursor, after, part, n_global, float(sums[1]), counts_P)
                cursor, first = after, False

    def _shaped(self, part: _Part) -> _Part:
        """``part``, with empty arrays of the stream's shapes where the stream has ended on this rank only."""
        if part.arrays:
            self._empty = self._empty or _emptied(part.arrays)
            return part
        if not self._empty:
            raise UserError(f"rank {self.rank}'s stream has no sample, and sync_batchnorm has every rank run the model",
                            "at least one sample on every rank", "give every rank the same stream, or set "
                            "sync_batchnorm: false")
        return replace(part, arrays=self._empty)

    def _global_batches(self, cursor: Cursor) -> Generator[Arrays, None, None]:
        """Whole global batches of a stream, from ``cursor`` to the end of its epoch."""
        with contextlib.closing(_closable(self.data.chunks(cursor.epoch))) as chunks:
            yield from rebatch(chunks, self.global_batch, cursor.samples)

    def _continued(self, cursor: Cursor) -> Generator[Arrays, None, None]:
        """The same, beginning with what `sample` has read already."""
        peeked, self._peeked = self._peeked, None
        if peeked is None or peeked[0] != (cursor.epoch, cursor.samples):
            yield from self._global_batches(cursor)
        elif peeked[1] is not None:
            with contextlib.closing(peeked[2]) as rest:
                yield peeked[1]
                yield from rest

    def _stream_parts(self, cursor: Cursor) -> Generator[_Part, None, None]:
        with contextlib.closing(self._continued(cursor)) as batches:
            for step, batch in enumerate(batches, cursor.step):
                cut = self.cut_at(step)
                low, high = self._mine(cut, len(batch[0]))
                mine = tuple(array[low:high] for array in batch)
                yield _Part(cut, len(batch[0]), fingerprint(batch), high - low, mine)

    def _warn_once(self, text: str) -> None:
        if self.rank == 0 and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)

    # --- both ----------------------------------------------------------------------------------------------

    def _step(self, before: Cursor, after: Cursor, part: _Part, n_global: int, weight: float,
              counts_P: Sequence[int] | None = None) -> StepBatch:
        """``counts_P``: samples of every rank, where they are not those of the cut."""
        bounds = part.cut.bounds(part.n_local, self.rank)
        if self.even_micros:
            counts_P = np.diff(part.cut.offsets(part.seen)).tolist() if counts_P is None else counts_P
            bounds = padded(bounds, part.cut.rounds(counts_P))
        micros = [tuple(array[start:stop] for array in part.arrays) for start, stop in bounds]
        return StepBatch(before, after, micros, part.n_local, n_global, weight, self._local_weight(part))

    def _mine(self, cut: Cut, n: int) -> tuple[int, int]:
        offsets = cut.offsets(n)
        return int(offsets[self.rank]), int(offsets[self.rank + 1])

    def _local_weight(self, part: _Part) -> float:
        if part.n_local == 0 or self.weight_fn is None:
            return float(part.n_local)
        return float(self.weight_fn(part.arrays))

    def _sum(self, values: Sequence[float]) -> np.ndarray:
        assert self.control is not None
        return self.control.sum(np.asarray(values, dtype=np.float64))

    def _gathered(self, number: int) -> list[int]:
        assert self.control is not None
        return self.control.gather(number)


def _emptied(arrays: Arrays) -> Arrays:
    """(0, ...) arrays of the same sample shapes and dtypes."""
    return tuple(np.empty((0, *np.shape(array)[1:]), np.asarray(array).dtype) for array in arrays)


def prefetched(items: Generator[Any, None, None], ahead: int) -> Generator[Any, None, None]:
    """Yield ``items``, made up to ``ahead`` in advance by one background thread; inline for ``ahead`` == 0.

    An exception in the thread is raised here. Closing this generator stops the thread, closes ``items``
    inside it and waits for its end.
    """
    if ahead == 0:
        with contextlib.closing(items):
            yield from items
        return
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def work() -> None:
        last: tuple[str, Any] = ("end", None)
        try:
            with contextlib.closing(items):
                for item in items:
                    ready.put(("item", item))
                    if stop.is_set():
                        return
        except BaseException as error:  # handed over whole: the consumer decides
            last = ("error", error)
        ready.put(last)

    thread = threading.Thread(target=work, name="hvdtrain-fetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stop.set()
        with contextlib.suppress(queue.Empty):  # makes room for the one item the thread may still hold
            while True:
                ready.get_nowait()
        if thread is not threading.current_thread():  # a garbage collection in it may call this
            thread.join(_JOIN_S)


def _closable(items: Iterator[Any]) -> Generator[Any, None, None]:
    """Wrap an iterator so that it has a ``close``; closes the inner one where that is possible."""
    try:
        yield from items
    finally:
        close = getattr(items, "close", None)
        if close:
            close()
