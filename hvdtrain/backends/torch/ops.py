"""PyTorch's implementation of `hvdtrain.protocols.Ops`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Array = torch.Tensor


class Ops:
    """Array operations on ``device``; results stay there."""

    name = "torch"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def zeros(self, n: int, dtype: str) -> Array:
        return torch.zeros(n, dtype=getattr(torch, dtype), device=self.device)

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

    def topk(self, flat_N: Array, k: int) -> tuple[Array, Array]:
        # A stable sort keeps ties in index order; torch.topk leaves their order open.
        index_k = torch.sort(flat_N.abs(), descending=True, stable=True).indices[:k]
        return flat_N[index_k], index_k

    def take(self, flat_N: Array, index_k: Array) -> Array:
        return flat_N[index_k]

    def scatter_add(self, n: int, index_k: Array, values_k: Array) -> Array:
        return torch.zeros(n, dtype=values_k.dtype, device=values_k.device).index_add_(0, index_k, values_k)

    def matmul(self, a: Array, b: Array) -> Array:
        return a @ b

    def transpose(self, a: Array) -> Array:
        return a.T

    def orthogonalize(self, m_NR: Array) -> Array:
        columns: list[Array] = []
        for r in range(m_NR.shape[1]):
            c = m_NR[:, r]
            for q in columns:
                c = c - (q @ c) * q
            columns.append(c / (torch.linalg.vector_norm(c) + 1e-8))
        return torch.stack(columns, dim=1)

    def sum_squares(self, x: Array) -> Array:
        narrow = x.dtype in (torch.float16, torch.bfloat16)  # whose squares overflow or vanish
        return torch.linalg.vector_norm(x, dtype=torch.float32 if narrow else None).square()

    def abs_max(self, x: Array) -> Array:
        return x.abs().amax() if x.numel() else x.new_zeros(())

    def round(self, x: Array) -> Array:
        return torch.round(x)

    def all_finite(self, x: Array) -> Array:
        return torch.isfinite(x).all()

    def to_host(self, x: Array) -> np.ndarray:
        """Numpy view of a CPU tensor; a copy of one on another device."""
        return x.detach().cpu().numpy()

    def from_host(self, x: np.ndarray) -> Array:
        return torch.from_numpy(x if x.flags.writeable else x.copy()).to(self.device)
