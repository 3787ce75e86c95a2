"""Data that several seams pass on: parameters, buckets, one step's batch, messages between ranks.

Owns pure data only; the contracts of what computes with it are the files beside.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core.cursor import Cursor

Unread = tuple[int, str, str]
"""A sample that could not be read: its number, its place, and why."""


@dataclass(frozen=True)
class ParamSpec:
    """One trainable tensor as the exchange sees it: deterministic name, shape, numpy dtype name.

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
    """One flat vector: which parameters it holds (indices into the model's list) and where each begins.

    ``group``: the ranks that sum it, as the prefix of its collectives' names (`hvdtrain.core.group.Group.name`).
    ``first``: index of the first bucket of its group: ranks of one group may have unlike buckets before it.
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
        """What the names of its collectives begin with."""
        return f"{self.group}.b{self.number}"

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed vector."""
        return self.n * itemsize(self.dtype)


@dataclass(frozen=True)
class Shards:
    """A bucket cut into one shard for each rank that sums it: ``sizes`` in elements, of which ``rank`` is this one's.
    """

    sizes: tuple[int, ...]
    rank: int

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each shard ends."""
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
    """One rank's part of one global batch.

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


class Word(NamedTuple):
    """What ``rank`` had to tell all others: ``topic`` says which callback it is for."""

    rank: int
    topic: str
    text: str


Array = Any
Batch = tuple[Any, ...]
Pair = tuple[Any, Any]
