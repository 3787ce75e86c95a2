"""BatchNorm over the samples of all ranks (the key ``sync_batchnorm``): the model's own layers, with joint statistics.

With n_r, m_r, s_r the number, mean and sum of squared deviations of rank r's values of a channel, and N = sum n_r
(Chan, Golub, LeVeque 1979)::

    mean = sum n_r m_r / N        var = sum (s_r + n_r (m_r - mean)^2) / N

With x^ = (x - mean) / sqrt(var + eps), and both sums over the values of all ranks::

    dx = weight / sqrt(var + eps) * (dy - sum(dy) / N - x^ sum(dy x^) / N)

Gradients of weight and bias stay this rank's: the exchange of gradients sums them (law 1). Every rank runs every layer
equally often in the same order (`hvdtrain.data.feed`, ``even_micros``), so each can wait in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.backends.torch.recompute import Tape
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core.errors import UserError

Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Mean and variance by channel, number of values."""

_PLAIN = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


class SyncBatchNorm:
    """Implements `hvdtrain.core.protocols.Transform`; shared by the layers of one model.

    ``waited_s``: seconds that they waited for other ranks since `begin`. ``local``: statistics over own samples only,
    without a transport. ``factor``: of this rank's loss (a loss scale): ranks sum the gradient of the loss as it is.
    ``present``: this rank has samples; else its values count for nothing (`hvdtrain.data.weighting`). ``in_parts``: a
    rank may divide its samples of a step into several micro-batches. ``tapes``: records of statistics for blocks that
    are computed again (`hvdtrain.backends.torch.recompute`).
    """

    collective = True

    def __init__(self, model: torch.nn.Module, transport: Transport, in_parts: bool) -> None:
        self.waited_s = 0.0
        self.local = False
        self.factor = 1.0
        self.present = True
        self.tapes: list[Tape] = []
        self._model, self._transport, self._in_parts = model, transport, in_parts
        release(model)
        if transport.size > 1:
            layers(model)  # refused before anything is trained

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        release(model)
        if self._transport.size == 1:
            return
        for name, module in layers(model):
            own = {"plain": type(module), "wire_name": f"bn.{name}", "across": self}
            module.__class__ = type(type(module).__name__, (Synchronised, type(module)), own)

    def remove(self, model: torch.nn.Module) -> None:
        release(model)

    def describe(self) -> dict[str, str]:
        """Return {}: the key says it."""
        return {}

    def caveats(self) -> list[str]:
        cut = self._in_parts and any(isinstance(m, _BatchNorm) and m.training for m in self._model.modules())
        return ["BatchNorm computes its statistics over each micro-batch of all ranks"] if cut else []

    def begin(self, factor: float, present: bool) -> None:
        """Open a micro-batch."""
        self.waited_s, self.factor, self.present = 0.0, factor, present

    @contextlib.contextmanager
    def local_statistics(self) -> Iterator[None]:
        """Use torch's own statistics within the body, for what one rank does without the others (`Stage.trial`)."""
        before, self.local = self.local, True
        try:
            yield
        finally:
            self.local = before

    def moments(self, take: Callable[[], Moments]) -> Moments:
        """Return ``take()``, or, in a block that is computed again, the moments of the first pass."""
        again = next((i for i in reversed(range(len(self.tapes))) if self.tapes[i].replays), -1)
        found: Moments = take() if again < 0 else self.tapes[again].next()
        for tape in self.tapes[again + 1:]:
            tape.items.append(found)
        return found

    def gather(self, x_K: torch.Tensor, name: str) -> torch.Tensor:
        """Return every rank's vector: (K,) -> (P, K)."""
        _settle(x_K)
        begin = time.perf_counter()
        found = self._transport.allgather(x_K, name)
        self.waited_s += time.perf_counter() - begin
        return found

    def sum(self, x_K: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum over ranks, the same bits on each: (K,) -> (K,)."""
        part_K = x_K / self.factor
        _settle(part_K)
        begin = time.perf_counter()
        found = self._transport.allreduce(part_K, name)
        self.waited_s += time.perf_counter() - begin
        return found * self.factor


def release(model: torch.nn.Module) -> None:
    """Make every layer torch's own again: a model may come from a run with other ranks."""
    for module in model.modules():
        plain = vars(type(module)).get("plain")  # none of `hvdtrain.torch.SyncBatchNorm`
        if plain is not None:
            module.__class__ = plain


def layers(model: torch.nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return the BatchNorm layers by name; `UserError` for one that cannot be synchronised."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in str(getattr(module, "original_name", "")):
            raise UserError(f"sync_batchnorm with a scripted {module.original_name} {name!r}, which cannot be "
                            "changed", "a model that is not compiled by torch.jit", "train it unscripted, or set "
                            "sync_batchnorm: false")
        if not isinstance(module, _BatchNorm):
            continue
        if type(module).forward not in _PLAIN:
            raise UserError(f"sync_batchnorm with {type(module).__name__} {name!r}, which overrides forward",
                            "torch.nn.BatchNorm1d, 2d or 3d", "use one of them, or set sync_batchnorm: false")
        found.append((name, module))
    return found


class Synchronised(_BatchNorm):
    """Base that `SyncBatchNorm.install` puts before a BatchNorm's own class; a copy or pickle is a plain one."""

    plain: type
    wire_name: str
    across: Any  # `SyncBatchNorm`, or what has its members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (B, C) or (B, C, ...), B = 0 included; outside training as torch does."""
        if not self.training or self.across.local:
            return _BatchNorm.forward(self, x)
        return self.jointly(x)

    def jointly(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise by the statistics of all ranks, and track them."""
        self._check_input_dim(x)
        with torch.autocast(x.device.type, enabled=False):
            mean_C, var_C, n = self.across.moments(lambda: self._statistics(x.detach()))
            self._track(mean_C, var_C, n)
            wide = torch.promote_types(x.dtype, torch.float32)
            invstd_C = torch.rsqrt(var_C + self.eps).to(wide)
            return _Normalise.apply(x, self.weight, self.bias, mean_C.to(wide), invstd_C, n, self)

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean and biased variance, float64 (C,), and values per channel, float64 (), over all ranks."""
        own = x.numel() // max(1, x.shape[1]) if self.across.present else 0
        own_K = torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
        if own:
            var_C, mean_C = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), _dims(x), correction=0)
            own_K[:] = torch.cat([mean_C.double(), var_C.double() * own, own_K.new_full((1,), own)])
        rows_PK = self.across.gather(own_K, f"{self.wire_name}.forward")
        mean_PC, squares_PC, n_P1 = rows_PK.tensor_split((x.shape[1], 2 * x.shape[1]), dim=1)
        n = _sum_rows(n_P1)
        if own <= 1 and float(n) <= 1:  # seldom looked at: reading a number waits for the device
            raise UserError(f"BatchNorm {self.wire_name[3:]!r} with {int(n)} value per channel over all ranks",
                            "more than one, for its statistics",
                            "change global_batch, accumulate or micro_batch, or use GroupNorm")
        mean_C = _sum_rows(n_P1 * mean_PC) / n
        apart_PC = mean_PC - mean_C
        return mean_C, _sum_rows(squares_PC + n_P1 * (apart_PC * apart_PC)) / n, n[0]

    def _track(self, mean_C: torch.Tensor, var_C: torch.Tensor, n: torch.Tensor) -> None:
        """Update the running statistics as torch does: by the mean and the unbiased variance."""
        if not self.track_running_stats or self.running_mean is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        assert self.running_var is not None
        with torch.no_grad():
            for running, new_C in ((self.running_mean, mean_C), (self.running_var, var_C * (n / (n - 1)))):
                running.mul_(1 - (factor or 0.0)).add_(new_C.to(running.dtype), alpha=factor or 0.0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_copy, (self.plain,), self.__dict__


class _Normalise(torch.autograd.Function):
    """(x - mean) / std * weight + bias, and the gradient through statistics that all ranks share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                mean_C: torch.Tensor, invstd_C: torch.Tensor, n: torch.Tensor, layer: Synchronised) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean_C, invstd_C, n)
        ctx.layer, ctx.present, ctx.bias_dtype = layer, layer.across.present, None if bias is None else bias.dtype
        scale_C = invstd_C if weight is None else invstd_C * weight
        shift_C = -mean_C * scale_C if bias is None else bias - mean_C * scale_C
        return torch.addcmul(_along(shift_C, x), x.to(scale_C.dtype), _along(scale_C, x)).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, mean_C, invstd_C, n = ctx.saved_tensors
        wide = dy.to(mean_C.dtype)
        apart = x - _along(mean_C, x)
        sum_C, moment_C = wide.sum(_dims(x)), (wide * apart).sum(_dims(x))
        dx = None
        if ctx.needs_input_grad[0]:
            layer = ctx.layer
            both_K = torch.cat([sum_C, moment_C]).double()
            both_K = both_K if ctx.present else torch.zeros_like(both_K)  # not 0 * NaN
            summed_K = layer.across.sum(both_K, f"{layer.wire_name}.backward")
            mean_dy_C, mean_moment_C = (summed_K / n).to(mean_C.dtype).chunk(2)
            scale_C = invstd_C if weight is None else invstd_C * weight
            slope_C = -scale_C * invstd_C * invstd_C * mean_moment_C
            dx = apart.mul_(_along(slope_C, x)).sub_(_along(scale_C * mean_dy_C, x))
            dx = dx.addcmul_(wide, _along(scale_C, x)).to(x.dtype) if ctx.present else torch.zeros_like(x)
        dweight = (moment_C * invstd_C).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = sum_C.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None, None


def _plain_copy(plain: Any) -> torch.nn.Module:
    """Return an empty layer of torch's own class, whose state follows."""
    return plain.__new__(plain)


def _settle(x: torch.Tensor) -> None:
    """Wait for the device, so that this rank's own computing does not count as waiting for others."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


def _dims(x: torch.Tensor) -> list[int]:
    """Return all dimensions but the channels'."""
    return [0, *range(2, x.dim())]


def _along(x_C: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape (C,) -> (1, C, 1, ...), which broadcasts over ``like``."""
    return x_C.view(1, -1, *[1] * (like.dim() - 2))


def _sum_rows(x_PC: torch.Tensor) -> torch.Tensor:
    """Sum (P, C) -> (C,), halves of the rows onto each other: the same bits on different devices."""
    while len(x_PC) > 1:
        half = (len(x_PC) + 1) // 2
        x_PC = torch.cat([x_PC[:len(x_PC) - half] + x_PC[half:], x_PC[len(x_PC) - half:half]])
    return x_PC[0]
