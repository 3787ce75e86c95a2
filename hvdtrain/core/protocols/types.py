"""Pure data that several packages pass on: parameters, buckets, a step's batch, positions, shortages of memory.

The contracts of what computes with them are the other files of this folder.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core.errors import UserError

Unread = tuple[int, str, str]
"""A sample that could not be read: its number, its place, and why."""


@dataclass(frozen=True)
class ParamSpec:
    """A trainable tensor as the exchange sees it: deterministic name, shape, numpy dtype name.

    ``place``: which of the rank's devices it lives on, 0 but for models that are split over several. ``block``: the
    block of the model it belongs to, counted from 0; no bucket holds tensors of two blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: int = 0
    block: int = 0

    @property
    def n(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Bucket:
    """A flat vector: which parameters it holds (indices into the model's list) and where each begins.

    ``group``: the ranks that sum it, as the prefix of its collectives' names (`hvdtrain.core.mesh.Group.name`).
    ``first``: index of the first bucket of its group: ranks of one group may have different buckets before it.
    """

    index: int
    params: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    n: int
    dtype: str
    place: int = 0
    group: str = "world"
    first: int = 0

    @property
    def number(self) -> int:
        """Its number within its group, the same on every rank of it."""
        return self.index - self.first

    @property
    def name(self) -> str:
        """Return the prefix of the names of its collectives."""
        return f"{self.group}.b{self.number}"

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed vector."""
        return self.n * itemsize(self.dtype)


@dataclass(frozen=True)
class Shards:
    """A bucket cut into a shard for each rank that sums it: ``sizes`` in elements; ``rank``: this one's."""

    sizes: tuple[int, ...]
    rank: int

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Return the end of each shard."""
        return tuple(itertools.accumulate(self.sizes))

    @property
    def own(self) -> slice:
        """This rank's elements."""
        end = self.ends[self.rank]
        return slice(end - self.sizes[self.rank], end)


def itemsize(dtype: str) -> int:
    """Bytes of one element; numpy does not know bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@dataclass(frozen=True)
class StepBatch:
    """A rank's share of one global batch.

    ``micros``: tuples of arrays (b, ...), none empty; no micro-batch at all on a rank that has no samples
    of this step. With a feed's ``even_micros`` as many as on every other rank, the last ones empty (0, ...).
    ``n_local``, ``n_global``: samples of this rank and of all ranks. ``weight``: the global weight W that
    the summed loss is divided by (law 1); ``own_weight``: this rank's part of it. ``cursor_before``,
    ``cursor_after``: positions around the step, equal on all ranks. ``numbers``: int64[n_local] of this rank's samples;
    of a stream positions in it, or None where the ranks' streams differ in length. ``own_unread``, ``unread``: samples
    of this rank and of all ranks that could not be read and were left out; without any left ``n_global`` is 0.
    ``coming``: what this rank's next step is likely to begin with, as far as that is fetched already, else ().
    """

    cursor_before: Cursor
    cursor_after: Cursor
    micros: list[tuple[np.ndarray, ...]]
    n_local: int
    n_global: int
    weight: float
    own_weight: float
    numbers: np.ndarray | None = None
    own_unread: tuple[Unread, ...] = ()
    unread: tuple[Unread, ...] = ()
    coming: Callable[[], tuple[np.ndarray, ...]] = tuple


class Announcement(NamedTuple):
    """Message of ``rank`` to all others; ``topic`` names the callback it is for."""

    rank: int
    topic: str
    text: str


Array = Any
Batch = tuple[Any, ...]
Pair = tuple[Any, Any]


REPEAT = "out of memory"
"""What a rank tells the others under that ran out and wants the step repeated (`hvdtrain.engine.run.Announcement`)."""

ALONE = "out of memory, handled alone"
"""... and that needs nobody for it: in evaluation, and in a step in which the copies do not meet."""

MOST_WORDS = 300
"""Characters of an error's words that are kept."""


class Shortage(NamedTuple):
    """A micro-batch of ``size`` samples did not fit in ``phase`` ("training", "evaluation") of step ``step``.

    ``then``: samples that are tried next, the same number after a clean-up; -1: no smaller number is left. ``why``: the
    error's words.
    """

    step: int
    phase: str
    size: int
    then: int
    why: str

    def spelled(self) -> str:
        """Return it as text for the other ranks."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> Shortage:
        """Undo `spelled`."""
        return cls(*json.loads(text))

    def words(self) -> str:
        """Return it as the end of a sentence that begins with the rank."""
        held = f"with micro-batches of {self.size}" if self.size else "without a sample"
        goes_on = f"it continues with {self.then}"
        if self.then == self.size:
            goes_on = "it frees memory and tries that size again"
        elif self.then < 0:
            goes_on = "it has no smaller size to try"
        return f"ran out of memory in {self.phase} {held}; {goes_on}"


class Ceiling:
    """The largest micro-batch that a rank tries: ``limit`` samples, 0: any. ``lowered``: a shortage has set it.

    The first time at a size the same is tried again, since fragments of memory may have been in the way; then half of
    it. It never rises within a run.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.lowered = False
        self._tried = -1

    def lower(self, size: int) -> int:
        """Return the samples to try after ``size`` did not fit; -1 where no smaller number is left."""
        if size != self._tried:
            self._tried = size
            return size
        if size <= 1:
            return -1
        self.limit, self.lowered = -(-size // 2), True
        return self.limit

    def follow(self, size: int, then: int) -> None:
        """Do as another rank of the same copy did when ``size`` did not fit."""
        self._tried = size
        if 0 <= then < size:
            self.limit, self.lowered = then, True


class Lost(MemoryError):
    """A step of a pipeline cannot be finished, for which memory lacked on a rank of the copy: on this one, if ``own``.

    ``why``: the error's words. Without ``fits`` no smaller size would do.
    """

    def __init__(self, why: str, fits: bool = True, own: bool = True) -> None:
        super().__init__(why)
        self.why, self.fits, self.own = why, fits, own


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, Lost):
        return error.why
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:MOST_WORDS] if lines else type(error).__name__


def among(words: Iterable[Announcement], *topics: str) -> Iterator[tuple[int, Shortage]]:
    """Yield (rank, shortage) of those ``words`` that tell one under ``topics``."""
    for word in words:
        if word.topic in topics:
            yield word.rank, Shortage.read(word.text)


@dataclass(frozen=True)
class Cursor:
    """A position between two steps, the same on every rank.

    ``epoch``: passes completed. ``step``: global steps completed in the run. ``epoch_step``: steps
    completed in this epoch. ``samples``: samples of this epoch consumed by all ranks together; this is what
    a resumed run skips, so that it is exact at another global batch too.
    """

    epoch: int = 0
    step: int = 0
    epoch_step: int = 0
    samples: int = 0

    def advance(self, samples: int) -> Cursor:
        """Return the position after one more step that consumed ``samples`` samples over all ranks."""
        return Cursor(self.epoch, self.step + 1, self.epoch_step + 1, self.samples + int(samples))

    def next_epoch(self) -> Cursor:
        """Return the position at the start of the next epoch."""
        return Cursor(self.epoch + 1, self.step, 0, 0)

    def to_dict(self) -> dict[str, int]:
        """Return plain integers by name, fit for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Undo `to_dict`; `UserError` for missing or unknown names and for values that cannot be a
        position."""
        names = [field.name for field in dataclasses.fields(cls)]
        fit = isinstance(values, Mapping) and sorted(values) == sorted(names) and all(
            type(values[name]) is int and values[name] >= 0 for name in names)
        if not fit or values["epoch_step"] > values["step"]:
            raise UserError(f"the data position is {values!r}",
                            f"whole numbers >= 0 named {', '.join(names)}, epoch_step not above step",
                            "resume from another checkpoint: this one is damaged or not hvdtrain's")
        return cls(**values)
