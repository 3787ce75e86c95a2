"""`SyncBatchNorm`: batch normalization over the samples of all ranks, on CPUs and GPUs.

With n_r, m_r, s_r the number, mean and sum of squared deviations of rank r's values of a channel, and N = sum n_r::

    mean = sum n_r m_r / N        var = sum (s_r + n_r (m_r - mean)^2) / N
    dx = weight / sqrt(var + eps) * (dy - sum(dy) / N - x^ sum(dy x^) / N),  x^ = (x - mean) / sqrt(var + eps)
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain import job
from hvdtrain.core.process_sets import Sum
from hvdtrain.torch import ops


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of any dimension whose statistics in training are those of all ranks' samples.

    Every rank calls it equally often, in the same order; ranks may have different numbers of samples, and the single
    one that `hvdtrain.torch.shard` gives to a rank without samples does not count. Gradients of weight and bias are
    this rank's own, which the optimizer exchanges.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm got {input.dim()} dimensions; expected samples x channels, or more")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        whole = self.training or self.running_mean is None
        if not whole or job.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        data = sys.modules.get("hvdtrain.torch.data")
        counts = data is None or not data.at_placeholder()
        out, mean_C, var_C, n = _Normalized.apply(input, self.weight, self.bias, self.eps, counts)
        if self.training and self.running_mean is not None:
            self._follow(mean_C, var_C * n / (n - 1).clamp(min=1))
        return out

    @torch.no_grad()
    def _follow(self, mean_C: torch.Tensor, var_C: torch.Tensor) -> None:
        """Move the running statistics; with ``momentum`` None they are the mean of all batches."""
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var_C.to(self.running_var.dtype), share)


class _Normalized(torch.autograd.Function):
    """Normalize by all ranks' statistics; return these and n, too. ``counts``: this rank's values belong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
                counts: bool) -> Any:
        wide = x if x.dtype == torch.float64 else x.float()
        dims, n = _all_but_channels(x), x.numel() // x.size(1) if counts else 0
        mean_C, var_C = torch.zeros_like(wide[:1].sum(dims)), torch.zeros_like(wide[:1].sum(dims))
        if n:
            var_C, mean_C = torch.var_mean(wide, dims, correction=0)
        own = torch.cat([mean_C.new_tensor([float(n)]), mean_C, var_C]).double()
        rows = ops.allgather(own[None])
        n_P, mean_PC, var_PC = rows[:, :1], *rows[:, 1:].chunk(2, 1)
        total = n_P.sum()
        mean_C = (n_P * mean_PC).sum(0) / total
        var_C = (n_P * (var_PC + (mean_PC - mean_C) ** 2)).sum(0) / total
        scale_C = (var_C + eps).rsqrt().to(wide.dtype)
        hat = (wide - _channels(mean_C.to(wide.dtype), x)) * _channels(scale_C, x)
        ctx.save_for_backward(hat, scale_C, weight)
        ctx.total, ctx.counts = total, counts
        out = hat if weight is None else hat * _channels(weight, x) + _channels(bias, x)
        ctx.mark_non_differentiable(mean_C, var_C, total)
        return out.to(x.dtype), mean_C, var_C, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hat, scale_C, weight = ctx.saved_tensors
        dy = grads[0].to(hat.dtype)
        dims = _all_but_channels(dy)
        bias_C, weight_C = dy.sum(dims), (dy * hat).sum(dims)
        dx = None
        if ctx.needs_input_grad[0]:
            factor_C = scale_C if weight is None else scale_C * weight
            sums_2C = ops.allreduce(torch.stack([bias_C, weight_C]), op=Sum) / ctx.total.to(hat.dtype)
            of_statistics = _channels(sums_2C[0], dy) + hat * _channels(sums_2C[1], dy)
            dx = _channels(factor_C, dy) * (dy - of_statistics if ctx.counts else dy)
            dx = dx.to(grads[0].dtype)
        if weight is None:
            return dx, None, None, None, None
        return dx, weight_C.to(weight.dtype), bias_C.to(weight.dtype), None, None


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _channels(value_C: Any, x: torch.Tensor) -> torch.Tensor:
    """Return one value for each channel in the shape that goes with ``x``."""
    return value_C.reshape(1, -1, *[1] * (x.dim() - 2))
