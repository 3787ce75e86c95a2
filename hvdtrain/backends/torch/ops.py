"""PyTorch's implementation of `hvdtrain.core.protocols.Ops`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvdtrain.backends.torch import placement
from hvdtrain.comm.compressors.base import DEPENDENT, LEAST, sample
from hvdtrain.comm.reducer.transport import ArrayCell
from hvdtrain.core.protocols import Collectives

Array = torch.Tensor


class Ops:
    """Array operations on ``device`` (this rank's own by default); results stay there."""

    name = "torch"
    writes = True

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = placement.device() if device is None else torch.device(device)

    def zeros(self, n: int, dtype: str) -> Array:
        return torch.zeros(n, dtype=getattr(torch, dtype), device=self.device)

    def buffer(self, n: int, dtype: str, own: np.ndarray | None = None) -> Array:
        return self.zeros(n, dtype) if own is None else self.from_host(own)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(getattr(torch, dtype))

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return x.reshape(tuple(shape))

    def pack(self, xs: Sequence[Array]) -> Array:
        return torch.cat([x.reshape(-1) for x in xs])

    def unpack(self, flat_N: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        sizes = [int(np.prod(s, dtype=np.int64)) for s in shapes]
        return [part.reshape(tuple(s)) for part, s in zip(torch.split(flat_N, sizes), shapes)]

    def bits16(self, x: Array) -> Array:
        return x.to(torch.bfloat16).view(torch.int16)

    def from_bits16(self, bits: Array) -> Array:
        return bits.view(torch.bfloat16).to(torch.float32)

    def bitcast(self, x: Array, dtype: str) -> Array:
        return x.view(getattr(torch, dtype))

    def topk(self, flat_N: Array, k: int) -> tuple[Array, Array]:
        magnitude_N = flat_N.abs()
        stride, place = sample(len(flat_N), k)
        if place:
            least = torch.topk(magnitude_N[::stride], place).values[-1].clamp(min=LEAST)
            index_C = torch.nonzero(magnitude_N >= least).view(-1)
            if len(index_C) >= k:
                index_k = index_C[_largest(magnitude_N[index_C], k)]
                return flat_N[index_k], index_k
        index_k = _largest(magnitude_N, k)
        return flat_N[index_k], index_k

    def take(self, flat_N: Array, index_k: Array) -> Array:
        return flat_N[index_k]

    def by_part(self, index_k: Array, ends_P: Sequence[int]) -> tuple[Array, Array]:
        sorted_k, order_k = torch.sort(index_k)
        below_P = torch.searchsorted(sorted_k, torch.tensor(ends_P, device=index_k.device))
        return order_k, below_P.diff(prepend=below_P.new_zeros(1)).to(torch.int32)

    def scatter_add(self, n: int, index_k: Array, values_k: Array) -> Array:
        result_N = torch.zeros(n, dtype=values_k.dtype, device=values_k.device)
        if index_k.dim() == 1:
            return result_N.index_add_(0, index_k, values_k)
        for row_k, of_row_k in zip(index_k, values_k):  # one after another: on a GPU the order in a call is open
            result_N.index_add_(0, row_k, of_row_k)
        return result_N

    def drop(self, flat_N: Array, index_k: Array) -> Array:
        return flat_N.index_fill(0, index_k, 0)

    def matmul(self, a: Array, b: Array) -> Array:
        return a @ b

    def transpose(self, a: Array) -> Array:
        return a.T

    def plus(self, x: Array, y: Array) -> Array:
        return x + y

    def minus_scaled(self, x: Array, y: Array, scale: float) -> Array:
        return torch.sub(x, y, alpha=scale)

    def orthogonalize(self, m_NR: Array) -> Array:
        q, r = torch.linalg.qr(m_NR)
        kept_R, length_R = r.diagonal(), r.abs().sum(0)
        return q * (torch.where(kept_R.abs() <= DEPENDENT * length_R, 0.0, kept_R.sign()) + length_R * 0.0)

    def sum_squares(self, x: Array) -> Array:
        if x.is_cpu and x.dtype in (torch.float32, torch.float64) and x.is_contiguous():
            flat_N = x.view(-1)
            return torch.dot(flat_N, flat_N)  # half the CPU time of a norm over large vectors on two threads
        narrow = x.dtype in (torch.float16, torch.bfloat16)  # whose squares overflow or vanish
        return torch.linalg.vector_norm(x, dtype=torch.float32 if narrow else None).square()

    def total(self, scalars: Sequence[Array]) -> Array | float:
        if self.device.type == "cpu":  # on a GPU each number would be waited for
            number = 0.0
            for one in scalars:  # `sum` compensates for rounding from Python 3.12 on
                number += one.item()
            return number
        total = self.zeros(1, "float64")[0]
        for one in scalars:
            total = total + one.to(torch.float64)
        return total

    def abs_max(self, x: Array) -> Array:
        return x.abs().amax() if x.numel() else x.new_zeros(())

    def abs_max_rows(self, x_BK: Array) -> Array:
        return x_BK.abs().amax(1)

    def round(self, x: Array) -> Array:
        return torch.round(x)

    def overwrite(self, x: Array, by: Array) -> Array:
        return x.copy_(by) if by is not x else x

    def all_finite(self, x: Array) -> Array:
        return torch.isfinite(x).all()

    def select(self, which: Array, x: Array, y: Array) -> Array:
        return torch.where(which, x, y)

    def cell(self, value: Array) -> ArrayCell:
        return ArrayCell(value.to(self.device))

    def during_backward(self, wire: Collectives) -> Collectives:
        return wire

    def free_bytes(self) -> int | None:
        return placement.free_bytes(self.device)

    def to_host(self, x: Array) -> np.ndarray:
        return x.detach().cpu().numpy()

    def from_host(self, x: np.ndarray) -> Array:
        return torch.from_numpy(x if x.flags.writeable else x.copy()).to(self.device)


def _largest(magnitude_C: Array, k: int) -> Array:
    """Return the indices of the k largest in order, as the numpy reference; torch.topk leaves ties open."""
    if k == 0:
        return magnitude_C.new_zeros(0, dtype=torch.int64)
    magnitude_C = torch.where(magnitude_C.isnan(), torch.inf, magnitude_C)
    bar = torch.kthvalue(magnitude_C, len(magnitude_C) - k + 1).values
    above_C, at_C = magnitude_C > bar, magnitude_C == bar
    return torch.nonzero(above_C | (at_C & (at_C.cumsum(0) <= k - above_C.sum()))).view(-1)
