"""Readable reference of `hvdtrain.core.protocols.Ops`; all pass tests/conformance/ops_cases.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.comm.compressors.base import DEPENDENT, LEAST, sample
from hvdtrain.comm.reducer.transport import ArrayCell
from hvdtrain.core.protocols import Collectives


class Ops:
    """Functional array operations: no argument is changed."""

    name = "numpy"
    writes = True

    def zeros(self, n: int, dtype: str) -> np.ndarray:
        return np.zeros(n, dtype)

    def buffer(self, n: int, dtype: str, own: np.ndarray | None = None) -> np.ndarray:
        return self.zeros(n, dtype) if own is None else own

    def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Return ``x`` as ``dtype``; floats become integers by dropping the fraction, NaN becomes any integer."""
        with np.errstate(over="ignore", invalid="ignore"):  # quiet, as the frameworks are
            return x.astype(dtype)

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(tuple(shape))

    def pack(self, xs: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([x.reshape(-1) for x in xs])

    def unpack(self, flat_N: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        assert sum(sizes) == flat_N.size, f"{flat_N.size} elements for shapes {list(map(tuple, shapes))}"
        ends = np.cumsum(sizes)
        return [flat_N[end - n:end].reshape(tuple(shape)) for end, n, shape in zip(ends, sizes, shapes)]

    def bits16(self, x: np.ndarray) -> np.ndarray:
        """Return the bits of float32 ``x`` rounded to bfloat16 (to nearest, ties to even), as int16.

        Adding 0x7fff, plus 1 where the kept part is odd, carries into it exactly when rounding must go up. That could
        turn a NaN into infinity, so a NaN is truncated and made quiet instead.
        """
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
        quiet = (bits >> 16) | np.uint32(0x40)
        return np.where(np.isnan(x), quiet, rounded).astype(np.uint16).view(np.int16)

    def from_bits16(self, bits: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(bits, np.int16).view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def bitcast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        bits = np.ascontiguousarray(x).view(dtype)
        if not bits.flags.aligned:  # PyTorch raises too; numpy alone would read such memory, slowly
            raise ValueError(f"bitcast to {dtype} of a vector that begins between two elements of that type")
        return bits

    def topk(self, flat_N: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        magnitude_N = np.abs(flat_N)
        stride, place = sample(flat_N.size, k)
        index_C = np.arange(flat_N.size)
        if place:
            sampled = magnitude_N[::stride]
            least = max(np.partition(sampled, sampled.size - place)[sampled.size - place], LEAST)
            few_C = np.flatnonzero(magnitude_N >= least)
            index_C = few_C if few_C.size >= k else index_C
        index_k = index_C[_largest(magnitude_N[index_C], k)].astype(np.int64)
        return flat_N[index_k], index_k

    def take(self, flat_N: np.ndarray, index_k: np.ndarray) -> np.ndarray:
        return flat_N[index_k]

    def drop(self, flat_N: np.ndarray, index_k: np.ndarray) -> np.ndarray:
        kept_N = flat_N.copy()
        kept_N[index_k] = 0
        return kept_N

    def by_part(self, index_k: np.ndarray, ends_P: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (order (k,) that sorts the indices, how many lie in each part int32 (P,))."""
        order_k = np.argsort(index_k, kind="stable")
        return order_k, np.diff(np.searchsorted(index_k[order_k], ends_P), prepend=0).astype(np.int32)

    def scatter_add(self, n: int, index_k: np.ndarray, values_k: np.ndarray) -> np.ndarray:
        """Return a zero vector of n elements with ``values_k`` added at ``index_k``; an index may repeat.

        Both may have shape (P, k), with no index twice in a row: rows are added in order, so the bits are defined.
        """
        result_N = np.zeros(n, values_k.dtype)
        np.add.at(result_N, index_k.reshape(-1), values_k.reshape(-1))
        return result_N

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b

    def transpose(self, a: np.ndarray) -> np.ndarray:
        return a.T

    def plus(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + y

    def minus_scaled(self, x: np.ndarray, y: np.ndarray, scale: float) -> np.ndarray:
        return x - scale * y

    def orthogonalize(self, m_NR: np.ndarray) -> np.ndarray:
        """Make columns orthonormal, as in PowerSGD (Vogels et al., NeurIPS 2019, algorithm 1): (n, r) with n >= r.

        Gram-Schmidt's result by Householder's means: m = q r with a positive diagonal of r, one kernel instead of r (r
        + 1) / 2. |r_jj| is what column j keeps beside those before it, r's column (in the 1-norm, which does not
        overflow) its length. A column that is zero or depends on those before it becomes zero, not noise blown up to
        length 1; one that is not finite becomes NaN.
        """
        q, r = np.linalg.qr(m_NR)
        kept_R, length_R = np.diagonal(r), np.abs(r).sum(axis=0)
        sign_R = np.where(np.abs(kept_R) <= DEPENDENT * length_R, 0, np.sign(kept_R))
        return q * (sign_R + length_R * 0).astype(q.dtype)

    def sum_squares(self, x: np.ndarray) -> np.ndarray:
        wide = x.reshape(-1).astype(np.float64 if x.dtype == np.float64 else np.float32)
        with np.errstate(over="ignore"):
            return np.asarray((wide * wide).sum())

    def total(self, scalars: Sequence[np.ndarray]) -> np.ndarray:
        return np.asarray(sum((np.float64(one) for one in scalars), np.float64(0.0)))

    def abs_max(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs(x).max(initial=0)).astype(x.dtype)

    def abs_max_rows(self, x_BK: np.ndarray) -> np.ndarray:
        return np.maximum(x_BK.max(axis=1), -x_BK.min(axis=1))

    def round(self, x: np.ndarray) -> np.ndarray:
        return np.rint(x)

    def overwrite(self, x: np.ndarray, by: np.ndarray) -> np.ndarray:
        np.copyto(x, by)
        return x

    def all_finite(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.isfinite(x).all())

    def select(self, which: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x if which else y

    def cell(self, value: np.ndarray) -> ArrayCell:
        return ArrayCell(value)

    def during_backward(self, wire: Collectives) -> Collectives:
        return wire

    def free_bytes(self) -> None:
        return None

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x)

    def from_host(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x)


def _largest(magnitude_C: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the k largest in order: (k,). Of those that equal the k-th largest the first are in."""
    if k == 0:
        return np.zeros(0, np.int64)
    magnitude_C = np.where(np.isnan(magnitude_C), np.inf, magnitude_C)
    bar = np.partition(magnitude_C, magnitude_C.size - k)[magnitude_C.size - k]
    above_C, at_C = magnitude_C > bar, magnitude_C == bar
    return np.flatnonzero(above_C | (at_C & (np.cumsum(at_C) <= k - above_C.sum())))
