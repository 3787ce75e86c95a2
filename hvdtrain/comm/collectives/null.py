"""Collectives that move nothing: right in a world of one rank, a yardstick in a larger one.

Owns `NullCollectives` and `Done`, the handle of work that is complete. With several ranks the results have the right
shapes and wrong values: what a run costs without its exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.collectives.parts import WithoutMemory
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Array

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"})


class Done:
    """Handle of a collective whose result is there."""

    __slots__ = ("_value",)

    def __init__(self, value: Array) -> None:
        self._value = value

    def wait(self) -> Array:
        """Return the result."""
        return self._value

    def done(self) -> bool:
        return True


class NullCollectives(WithoutMemory):
    """Every rank hears only itself. Works on arrays of any backend, also while TensorFlow traces."""

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
        """As little between the ranks of ``group``."""
        return NullCollectives(group.index, group.size)

    def allreduce(self, flat_N: Array, name: str, op: str = "sum") -> Done:
        """(N,) -> the same (N,)."""
        return Done(flat_N)

    def allgather(self, x_K: Array, name: str) -> Done:
        """(K,) -> (P, K), every row this rank's own."""
        return Done(_rows(x_K[None], self.size))

    def alltoall(self, x_PK: Array, name: str) -> Done:
        """(P, K) -> the same (P, K)."""
        return Done(x_PK)

    def alltoallv(self, flat_N: Array, sent_P: Sequence[int], got_P: Sequence[int], name: str) -> Done:
        """(N,) -> (N',), each part this rank's own, which are as long as those of others."""
        begin, k = sum(sent_P[:self.rank]), sent_P[self.rank]
        assert list(got_P) == [k] * self.size, f"parts of {list(got_P)} elements cannot be made up"
        return Done(_rows(flat_N[begin:begin + k][None], self.size).reshape(-1) if self.size > 1 else flat_N)

    def reducescatter(self, flat_N: Array, name: str) -> Done:
        """(N,) -> this rank's (N/P,) of its own vector."""
        n = int(flat_N.shape[0])
        assert n % self.size == 0, f"reducescatter of {n} elements over {self.size} ranks"
        part = n // self.size
        return Done(flat_N[self.rank * part:(self.rank + 1) * part])

    def reducescatterv(self, flat_N: Array, sizes_P: Sequence[int], name: str) -> Done:
        """(N,) -> this rank's part of its own (sizes_P[rank],)."""
        begin = sum(sizes_P[:self.rank])
        return Done(flat_N[begin:begin + sizes_P[self.rank]])

    def allgatherv(self, part_K: Array, sizes_P: Sequence[int], name: str) -> Done:
        """(N,) -> the same (N,), of one rank."""
        assert self.size == 1, "parts of others cannot be made up"
        return Done(part_K)

    def broadcast(self, x_N: Array, name: str, root: int = 0) -> Done:
        """(N,) -> the same (N,), whoever ``root`` is."""
        return Done(x_N)


def _rows(x_1K: Any, size: int) -> Any:
    """Repeat one row ``size`` times with the array's own library."""
    if size == 1:
        return x_1K
    if isinstance(x_1K, np.ndarray):
        return np.repeat(x_1K, size, axis=0)
    if hasattr(x_1K, "expand"):
        return x_1K.expand(size, -1)
    return sys.modules["tensorflow"].repeat(x_1K, size, axis=0)
