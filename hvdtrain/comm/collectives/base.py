"""Parts of collectives that transports share, and `NullCollectives`, which moves nothing: vectors cut into a
consecutive part for each rank, their sum in the ranks' order, memory that is reused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.buckets import ALIGNMENT
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Array, Collectives, Exchange, Handle

TILE = 1 << 15
"""Elements added at a time: with a few ranks' tiles it stays in a core's own cache."""


def begins(sizes_P: Sequence[int]) -> list[int]:
    """Return where each part begins.

    >>> begins([3, 0, 2])
    [0, 3, 3]
    """
    found, at = [], 0
    for size in sizes_P:
        found.append(at)
        at += size
    return found


def windows(sizes_P: Sequence[int], most: int) -> Iterator[tuple[int, list[int]]]:
    """Yield (where it begins, elements of each rank's part in it) of consecutive pieces of the whole vector.

    One piece where no rank's part, as often as there are ranks, exceeds ``most`` elements, else pieces of at most
    ``most`` / P of them, so that what one rank receives of all is no more; nothing for an empty vector.

    >>> list(windows([3, 0, 2], 9)), list(windows([3, 0, 2], 6))
    ([(0, [3, 0, 2])], [(0, [2, 0, 0]), (2, [1, 0, 1]), (4, [0, 0, 1])])
    """
    n, P = sum(sizes_P), len(sizes_P)
    width = n if P * max(sizes_P) <= most else max(1, most // P)
    first = begins(sizes_P)
    for begin in range(0, n, max(1, width)):
        end = min(n, begin + width)
        yield begin, [max(0, min(end, at + k) - max(begin, at)) for at, k in zip(first, sizes_P)]


def aligned(n: int, dtype: str) -> np.ndarray:
    """Return new memory (n,) at a multiple of `ALIGNMENT`, where frameworks read it in place."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(n * itemsize + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin:begin + n * itemsize].view(dtype)


def add_rows(rows: Sequence[np.ndarray], out_K: np.ndarray) -> None:
    """Write the sum of the ranks' rows (K,), added in their order, to ``out_K``; float16 is added in float32.

    ``out_K`` may be one of the rows. Each element is rounded as often and in the same order as in
    any other sum in rank order: the same bits.
    """
    tile = np.empty(min(TILE, out_K.size), np.float32 if out_K.dtype == np.float16 else out_K.dtype)
    # A warning made an error would stop this rank alone; who looks at the sums tells what is not finite.
    with np.errstate(all="ignore"):
        for begin in range(0, out_K.size, TILE):
            end = min(begin + TILE, out_K.size)
            sum_T = tile[:end - begin]
            if len(rows) == 1 or tile.dtype != out_K.dtype:
                np.copyto(sum_T, rows[0][begin:end])
                rest = rows[1:]
            else:
                np.add(rows[0][begin:end], rows[1][begin:end], out=sum_T)
                rest = rows[2:]
            for row_K in rest:
                sum_T += row_K[begin:end]
            out_K[begin:end] = sum_T


class WithoutMemory:
    """Defaults of `hvdtrain.core.protocols.Collectives` for a transport without memory of its own."""

    overlaps = False
    drives = False

    @property
    def moves_parts(self) -> bool:
        return self.overlaps

    def buffer(self, n: int, dtype: str) -> np.ndarray | None:
        return None

    def buffers(self, n: int, dtype: str, slots: int) -> list[np.ndarray]:
        return []

    def flight(self, n: int, dtype: str) -> np.ndarray | None:
        return None

    def looked(self) -> tuple[int, float]:
        return 0, 0.0

    def drive(self, exchange: Exchange, outgoing: Callable[[Array], np.ndarray], arrived: Callable[[np.ndarray], Array],
              name: str) -> Handle:
        raise NotImplementedError


class Scratch:
    """Memory that is reused from call to call, one vector of each dtype, as long as the longest that was asked for."""

    def __init__(self) -> None:
        self._kept: dict[np.dtype, np.ndarray] = {}

    def vector(self, n: int, dtype: np.dtype) -> np.ndarray:
        """Return (n,) of any content, valid until the next call."""
        if dtype not in self._kept or self._kept[dtype].size < n:
            self._kept.pop(dtype, None)  # before the new one is made
            self._kept[dtype] = np.empty(n, dtype)
        return self._kept[dtype][:n]


DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"})


class ReadyHandle:
    """Handle of a collective that is complete."""

    __slots__ = ("_value",)

    def __init__(self, value: Array) -> None:
        self._value = value

    def wait(self) -> Array:
        return self._value

    def done(self) -> bool:
        return True


class NullCollectives(WithoutMemory):
    """Collectives that move nothing: right for one rank, a yardstick for more, with right shapes and wrong values.

    Each rank receives its own data in place of others'. Works on arrays of any backend, also while TensorFlow traces.
    """

    name = "null"
    dtypes = DTYPES
    reductions = frozenset({"adasum"})
    overlaps = True
    in_graph = True
    host = False

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank, self.size = rank, size

    def among(self, group: Group) -> NullCollectives:
        return NullCollectives(group.index, group.size)

    def allreduce(self, flat_N: Array, name: str, op: str = "sum") -> ReadyHandle:
        return ReadyHandle(flat_N)

    def allgather(self, x_K: Array, name: str) -> ReadyHandle:
        """Return every row as this rank's own."""
        return ReadyHandle(_rows(x_K[None], self.size))

    def alltoall(self, x_PK: Array, name: str) -> ReadyHandle:
        return ReadyHandle(x_PK)

    def alltoallv(self, flat_N: Array, sent_P: Sequence[int], got_P: Sequence[int], name: str) -> ReadyHandle:
        """Return every part as this rank's own, which are as long as those of others."""
        begin, k = sum(sent_P[:self.rank]), sent_P[self.rank]
        assert list(got_P) == [k] * self.size, f"shards of {list(got_P)} elements cannot be joined"
        return ReadyHandle(_rows(flat_N[begin:begin + k][None], self.size).reshape(-1) if self.size > 1 else flat_N)

    def reducescatter(self, flat_N: Array, name: str) -> ReadyHandle:
        n = int(flat_N.shape[0])
        assert n % self.size == 0, f"reducescatter of {n} elements over {self.size} ranks"
        part = n // self.size
        return ReadyHandle(flat_N[self.rank * part:(self.rank + 1) * part])

    def reducescatterv(self, flat_N: Array, sizes_P: Sequence[int], name: str) -> ReadyHandle:
        begin = sum(sizes_P[:self.rank])
        return ReadyHandle(flat_N[begin:begin + sizes_P[self.rank]])

    def allgatherv(self, part_K: Array, sizes_P: Sequence[int], name: str) -> ReadyHandle:
        assert self.size == 1, "shards of other ranks cannot be joined"
        return ReadyHandle(part_K)

    def broadcast(self, x_N: Array, name: str, root: int = 0) -> ReadyHandle:
        return ReadyHandle(x_N)


def gather_rows(wire: Collectives, x: np.ndarray, name: str) -> np.ndarray:
    """Return the rows of all ranks, one rank behind the other; shorter shares travel padded. Collective."""
    n_P = wire.allgather(np.array([len(x)], np.int64), f"{name}.rows").wait().reshape(-1)
    padded = np.zeros((int(n_P.max()), *x.shape[1:]), x.dtype)
    padded[:len(x)] = x
    all_PK = wire.allgather(padded.reshape(-1), name).wait().reshape(wire.size, *padded.shape)
    return np.concatenate([rows[:n] for rows, n in zip(all_PK, n_P)])


def _rows(x_1K: Any, size: int) -> Any:
    """Repeat one row ``size`` times with the array's own library."""
    if size == 1:
        return x_1K
    if isinstance(x_1K, np.ndarray):
        return np.repeat(x_1K, size, axis=0)
    if hasattr(x_1K, "expand"):
        return x_1K.expand(size, -1)
    return sys.modules["tensorflow"].repeat(x_1K, size, axis=0)
