"""Vectors cut into one consecutive part for each rank: windows on them, and the sum of one part in the ranks' order.

Pure but for `Scratch`, which keeps memory from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hvdtrain.core.protocols import Array, Exchange, Handle

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
    """Part of `hvdtrain.core.protocols.Collectives` of a transport that has no memory of its own, nor squares sums."""

    overlaps = False
    drives = False

    @property
    def moves_parts(self) -> bool:
        """As all else."""
        return self.overlaps

    def buffer(self, n: int, dtype: str) -> np.ndarray | None:
        """None."""
        return None

    def buffers(self, n: int, dtype: str, slots: int) -> list[np.ndarray]:
        """[]."""
        return []

    def flight(self, n: int, dtype: str) -> np.ndarray | None:
        """None."""
        return None

    def looked(self) -> tuple[int, float]:
        """Nothing."""
        return 0, 0.0

    def drive(self, exchange: Exchange, outgoing: Callable[[Array], np.ndarray], arrived: Callable[[np.ndarray], Array],
              name: str) -> Handle:
        """Never called, as it does not `drives`."""
        raise NotImplementedError


class Scratch:
    """Memory that is reused from call to call, one vector of each dtype, as long as the longest that was asked for."""

    def __init__(self) -> None:
        self._kept: dict[np.dtype, np.ndarray] = {}

    def vector(self, n: int, dtype: np.dtype) -> np.ndarray:
        """(n,) whose content is left open, valid until the next call."""
        if dtype not in self._kept or self._kept[dtype].size < n:
            self._kept.pop(dtype, None)  # before the new one is made
            self._kept[dtype] = np.empty(n, dtype)
        return self._kept[dtype][:n]
