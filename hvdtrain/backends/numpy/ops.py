"""The readable reference of `hvdtrain.protocols.Ops`, in numpy.

Owns what each operation means; the other backends' ops must pass the same cases (tests/conformance/ops_cases.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TINY = 1e-8
"""Keeps a zero column of `Ops.orthogonalize` zero instead of NaN."""


class Ops:
    """Functional array operations: no argument is changed."""

    name = "numpy"

    def zeros(self, n: int, dtype: str) -> np.ndarray:
        """A vector of ``n`` zeros."""
        return np.zeros(n, dtype)

    def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """``x`` as ``dtype``; floats become integers by dropping the fraction."""
        return x.astype(dtype)

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The same elements in row-major order; one entry of ``shape`` may be -1."""
        return x.reshape(tuple(shape))

    def pack(self, xs: Sequence[np.ndarray]) -> np.ndarray:
        """Flatten and join: arrays of any shape and one dtype -> (N,)."""
        return np.concatenate([x.reshape(-1) for x in xs])

    def unpack(self, flat_N: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Undo `pack`."""
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        assert sum(sizes) == flat_N.size, f"{flat_N.size} elements for shapes {list(map(tuple, shapes))}"
        ends = np.cumsum(sizes)
        return [flat_N[end - n:end].reshape(tuple(shape)) for end, n, shape in zip(ends, sizes, shapes)]

    def bits16(self, x: np.ndarray) -> np.ndarray:
        """The bits of float32 ``x`` rounded to bfloat16 (to nearest, ties to even), as int16.

        Adding 0x7fff, plus 1 where the kept part is odd, carries into it exactly when rounding must go up. That
        could turn a NaN into infinity, so a NaN is cut and made quiet instead.
        """
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
        quiet = (bits >> 16) | np.uint32(0x40)
        return np.where(np.isnan(x), quiet, rounded).astype(np.uint16).view(np.int16)

    def from_bits16(self, bits: np.ndarray) -> np.ndarray:
        """Undo `bits16`: int16 -> float32."""
        return (np.ascontiguousarray(bits, np.int16).view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def topk(self, flat_N: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k entries of largest magnitude, largest first: (values (k,), indices int64 (k,)).

        Ties go to the lower index.
        """
        index_k = np.argsort(-np.abs(flat_N), kind="stable")[:k].astype(np.int64)
        return flat_N[index_k], index_k

    def take(self, flat_N: np.ndarray, index_k: np.ndarray) -> np.ndarray:
        """The entries at ``index_k``: (k,)."""
        return flat_N[index_k]

    def scatter_add(self, n: int, index_k: np.ndarray, values_k: np.ndarray) -> np.ndarray:
        """A zero vector of n elements with ``values_k`` added at ``index_k``; an index may repeat."""
        result_N = np.zeros(n, values_k.dtype)
        np.add.at(result_N, index_k, values_k)
        return result_N

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """(m, k) x (k, n) -> (m, n)."""
        return a @ b

    def transpose(self, a: np.ndarray) -> np.ndarray:
        """(m, n) -> (n, m)."""
        return a.T

    def orthogonalize(self, m_NR: np.ndarray) -> np.ndarray:
        """Columns made orthonormal by modified Gram-Schmidt, as in PowerSGD (Vogels et al., NeurIPS 2019, algorithm 1).

        Column j is normalised, then taken out of the columns after it. A zero column stays zero.
        """
        q = m_NR.copy()
        for j in range(q.shape[1]):
            q[:, j] /= np.sqrt((q[:, j] ** 2).sum()) + TINY
            q[:, j + 1:] -= np.outer(q[:, j], q[:, j] @ q[:, j + 1:])
        return q

    def sum_squares(self, x: np.ndarray) -> np.ndarray:
        """Scalar sum of squares, accumulated and returned in float32, or float64 for float64 ``x``."""
        wide = x.reshape(-1).astype(np.float64 if x.dtype == np.float64 else np.float32)
        return np.asarray((wide * wide).sum())

    def abs_max(self, x: np.ndarray) -> np.ndarray:
        """Scalar largest magnitude, in ``x``'s dtype; 0 of nothing."""
        return np.asarray(np.abs(x).max(initial=0)).astype(x.dtype)

    def round(self, x: np.ndarray) -> np.ndarray:
        """To the nearest integer, ties to even; keeps the dtype."""
        return np.rint(x)

    def all_finite(self, x: np.ndarray) -> np.ndarray:
        """Scalar boolean array: no NaN and no infinity in ``x``; True of nothing."""
        return np.asarray(np.isfinite(x).all())

    def to_host(self, x: np.ndarray) -> np.ndarray:
        """``x`` itself."""
        return np.asarray(x)

    def from_host(self, x: np.ndarray) -> np.ndarray:
        """``x`` itself."""
        return np.asarray(x)
