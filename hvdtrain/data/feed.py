"""Cut each global batch over the ranks and into micro-batches: `Feed` yields one rank's batches, step by step.

Owns the plan of cuts, the steps of an epoch and the thread that fetches ahead. `hvdtrain.data.batches` reads the data
and calls the control plane.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from hvdtrain.cluster.control import every_rank
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Cursor, StepBatch, Unread
from hvdtrain.core.timeline import active, current, span
from hvdtrain.data.batches import LocalBatch, SourceWalk, WeightFn
from hvdtrain.data.sources import Source
from hvdtrain.data.stream import Arrays, Stream
from hvdtrain.data.stream_walk import StreamWalk
from hvdtrain.data.weighting import LabelWeight
from hvdtrain.planning.batch.sampler import BatchShares, at_least, cut, micro_batches, padded, steps_per_epoch


class Feed:
    """Walk one rank through a `Source` or a `Stream` in global batches that the ranks share.

    ``global_batch``: samples of a step over all ranks; may be below ``size`` and not divisible by it. ``shares``:
    weights float[size] of the cut, equal by default; `recut` changes it from a step on. ``seed``, ``shuffle``: order of
    a source. ``accumulate``, ``micro_batch``: see `hvdtrain.planning.batch.sampler.micro_batches`. ``control``: sums
    float64[k] over ranks; needed for a stream and for ``weight_fn``. ``weight_fn``: this rank's arrays of a step ->
    their weight, the sample count by default. ``prefetch``: batches fetched ahead by a background thread, 0: inline.
    ``even_micros``: give every rank the same number of micro-batches in each step, empty ones where samples are
    lacking, so that all ranks enter the collectives of a forward pass (synchronised BatchNorm). ``skip_unread``: leave
    out samples that cannot be read (`hvdtrain.data.sources.Unreadable`); collective. ``most``: walk through the first
    so many samples alone; 0: all. ``samples``: those of an epoch, None for a stream. ``unread``: samples that all ranks
    have left out of the current or last walk. ``reading``: a lock that keeps the background thread from reading while
    others hold it, since other data may share its files and generators. ``readers``: which ranks read a stream
    (``data.readers``). ``bucket``: ``data.bucket``. ``ordered``: keep a stream's order, which hosts that divide its
    files change. ``walk``: what reads the data. Errors: `UserError` for empty data, a global batch < 1, unusable
    shares. Rank 0 warns where the ranks' streams differ.
    """

    def __init__(self, data: Source | Stream, global_batch: int, *, rank: int = 0, size: int = 1,
                 shares: Sequence[float] | None = None, seed: int = 0, shuffle: bool = True,
                 accumulate: int | Sequence[int] = 1, micro_batch: int = 0, control: Control | None = None,
                 weight_fn: WeightFn | None = None, prefetch: int = 2, even_micros: bool = False,
                 skip_unread: bool = False, most: int = 0, readers: str = "each",
                 bucket: int = 0, ordered: bool = False) -> None:
        assert 0 <= rank < size and isinstance(data, (Source, Stream))
        at_least("global_batch", global_batch, 1)
        at_least("data.prefetch", prefetch, 0)
        for each in (accumulate,) if isinstance(accumulate, int) else accumulate:
            micro_batches(0, each, micro_batch)
        self.data: Any = data
        self.global_batch, self.prefetch = int(global_batch), prefetch
        self.rank, self.size, self.seed, self.shuffle = rank, size, seed, shuffle
        self.control, self.weight_fn, self.even_micros = control, weight_fn, even_micros
        shares = [1.0] * size if shares is None else [float(share) for share in shares]
        if len(shares) != size:
            raise UserError(f"{count(len(shares), 'share')} for {count(size, 'rank')}", "one share per rank",
                            f"give {size} shares")
        cut(0, shares)
        self._cuts = [(0, BatchShares.of(shares, accumulate, micro_batch))]
        self.unread, self._named = 0, set[int]()
        self.reading = threading.Lock()
        self.undivided: UserError | None = None
        self._unnamed: list[Unread] = []
        self.walk: SourceWalk | StreamWalk
        if isinstance(data, Source):
            self.walk = SourceWalk(data, self.global_batch, seed, control, even_micros, skip_unread, most, bucket)
        else:
            assert control is not None, "detecting the end of a stream on all ranks"
            self.walk = StreamWalk(data, self.global_batch, rank, control, even_micros, most, readers, prefetch,
                                   ordered)
        self.samples: int | None = self.walk.samples

    @property
    def unlike(self) -> str:
        """Return why the samples of this epoch cannot be verified, the same on all ranks; "" where they can."""
        return self.walk.unlike

    @property
    def head(self) -> tuple[int, int] | None:
        """Return (epoch, checksum) of a stream's first samples in the epoch opened last; None for a source."""
        return self.walk.head

    @property
    def ahead(self) -> int:
        """Return how many steps after the next one may be fetched already, and so keep their cut."""
        return (self.prefetch + 1 if self.prefetch else 0) + self.walk.begins

    def recut(self, cut: BatchShares, from_step: int) -> None:
        """Cut by ``cut`` from step ``from_step`` of the run on; all ranks call it alike, between two steps.

        During an epoch ``from_step`` has to be `ahead` steps after the next one at least. The global batch of a step
        stays the same (law 2). Errors: ``undivided``, where that is set and ``cut`` divides a batch.
        """
        assert len(cut.shares_P) == self.size
        if self.undivided is not None and self.divides(cut):
            raise self.undivided
        self._cuts = [(at, old) for at, old in self._cuts if at < from_step] + [(from_step, cut)]

    def divides(self, cut: BatchShares | None = None) -> bool:
        """Return whether ``cut``, by default the first one, makes several micro-batches of a global batch."""
        cut = cut or self.cut_at(0)
        counts = np.diff(cut.offsets(min(self.global_batch, self.samples or self.global_batch))).tolist()
        return sum(len(cut.bounds(count, rank)) for rank, count in enumerate(counts)) > 1

    def cut_at(self, step: int) -> BatchShares:
        return next(cut for at, cut in reversed(self._cuts) if at <= step)

    def weigh(self, weight: LabelWeight | None) -> None:
        """Weigh steps by ``weight``, unless a ``weight_fn`` was given or every sample weighs 1; collective."""
        if weight is None or self.weight_fn is not None:
            return
        assert self.control is not None
        if self.control.agree(weight.varies(self.data, () if self.samples is None else self.read_before())):
            self.weight_fn = weight

    def sample(self, n: int, cursor: Cursor = Cursor()) -> Arrays:
        """Return ``n`` samples to try a model on, repeated if there are fewer; a stream is not opened again for it."""
        return self.walk.sample(n, cursor)

    @property
    def steps_per_epoch(self) -> int | None:
        return self.steps_left(Cursor())

    def steps_left(self, cursor: Cursor) -> int | None:
        if self.samples is None:
            return None
        return steps_per_epoch(max(self.samples - cursor.samples, 0), self.global_batch)

    def check_ranks_agree(self) -> None:
        """Raise `UserError` on every rank if lengths, batch or seed differ: ranks would wait for ever."""
        if self.control is None:
            return
        everyone = every_rank(self.control)  # a partitioned model takes x on its first rank and y on its last
        found = everyone.gather((self.samples, self.global_batch, self.seed, self.shuffle))
        if len(set(found)) > 1:
            table = ", ".join(f"rank {rank}: {values}" for rank, values in enumerate(found))
            raise UserError(f"ranks differ in (samples, global_batch, seed, shuffle): {table}",
                            "the same on every rank",
                            "give every rank the same data and configuration; the sampler divides it")
        self.walk.check_alike(everyone)

    def compare(self, epoch: int) -> int:
        """Compare a few samples of all ranks; return how many since the last time, 0 for all. Collective."""
        return 0 if self.control is None else self.walk.compare(every_rank(self.control), epoch)

    def read_before(self) -> Arrays:
        """Return a few samples spread over a source, which is read once for them."""
        assert isinstance(self.walk, SourceWalk)
        return self.walk.read_before()

    def epoch(self, cursor: Cursor) -> Generator[StepBatch, None, None]:
        """Yield the steps from ``cursor`` on, as many on every rank. Close the iterator to stop early."""
        self.unread = 0
        self.walk.settle()
        return self._steps(cursor, self.walk.batches(cursor, self.shuffle, self._bounds))

    def eval_epoch(self) -> Generator[StepBatch, None, None]:
        """Yield every sample once, in order; a rank without samples of a step gets no micro-batches."""
        self.unread = 0
        self.walk.settle()
        return self._steps(Cursor(), self.walk.batches(Cursor(), False, self._bounds))

    def left_out(self, whose: str = "") -> list[str]:
        """Report each unreadable sample once; the same on every rank. ``whose``: of which data."""
        words = []
        for number, place, reason in self._unnamed:
            if number not in self._named:
                self._named.add(number)
                words.append(f"sample {number} {whose}cannot be read and is skipped: {place}: {reason}")
        self._unnamed = []
        return words

    def _bounds(self, step: int, n: int, rank: int | None = None) -> tuple[int, int]:
        first = self.rank if rank is None else rank
        low, high = self.cut_at(step).offsets(n)[first:first + 2].tolist()
        return low, high

    def _steps(self, cursor: Cursor, batches: Generator[LocalBatch, None, None]) -> Generator[StepBatch, None, None]:
        shelf: Shelf[LocalBatch] = Shelf(self.prefetch)
        # A rank that receives its rows must not hold the lock while it waits for one whose lock others hold.
        reading = self.reading if self.walk.reads else contextlib.nullcontext()
        with contextlib.closing(prefetched(batches, shelf, reading)) as ahead:
            for batch in self.walk.totalled(ahead, cursor, self.weight_fn):
                after = cursor.advance(batch.consumed)
                self.unread += len(batch.all_unread)
                self._unnamed += batch.all_unread
                yield StepBatch(cursor, after, self._micros(batch, cursor.step), batch.n_local, batch.n_global,
                                batch.weight, batch.own_weight, batch.numbers, batch.unread, batch.all_unread,
                                partial(_coming, self, shelf, cursor.step + 1))
                cursor = after

    def _micros(self, batch: LocalBatch, step: int) -> list[Arrays]:
        cut = self.cut_at(step)
        bounds = cut.bounds(batch.n_local, self.rank)
        if self.even_micros:
            counts_P = np.diff(cut.offsets(batch.n)).tolist() if batch.counts_P is None else batch.counts_P
            bounds = padded(bounds, cut.rounds(counts_P))
        return [tuple(array[start:stop] for array in batch.arrays) for start, stop in bounds]


def _coming(feed: Feed, shelf: Shelf[LocalBatch], step: int) -> Arrays:
    batch = shelf.first()
    if batch is None or not batch.n_local:
        return ()
    return tuple(array[:feed.cut_at(step).bounds(batch.n_local, feed.rank)[0][1]] for array in batch.arrays)


T = TypeVar("T")

_END: Any = object()

_JOIN_S = 10.0
"""Longest wait for the thread after its stop: it may be inside a user's fetch, which cannot be interrupted."""


class Shelf(Generic[T]):
    """Results of a background thread: at most ``ahead`` of them wait."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)

    def first(self) -> T | None:
        """Return the next result without taking it; None where there is none now."""
        with self.ready.mutex:
            kind, value = self.ready.queue[0] if self.ready.queue else ("end", None)
        return value if kind == "item" else None


def prefetched(items: Generator[T, None, None], shelf: Shelf[T],
               reading: contextlib.AbstractContextManager[object] = contextlib.nullcontext(),
               ) -> Generator[T, None, None]:
    """Yield ``items`` made ahead by a thread, whose exceptions are raised here; closing this joins the thread.

    ``reading``: what the thread enters to make each item.
    """
    if shelf.ahead == 0:
        with contextlib.closing(items):
            yield from items
        return
    ready, stop = shelf.ready, threading.Event()
    timeline = current()

    def work() -> None:
        last: tuple[str, Any] = ("end", None)
        try:
            with contextlib.closing(items), active(timeline, "input") if timeline else contextlib.nullcontext():
                while True:
                    with reading, span("fetch"):
                        item = next(items, _END)
                    if item is _END:
                        break
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
