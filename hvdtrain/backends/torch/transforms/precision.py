"""Computing in 16 bits with PyTorch: autocast around the model, float32 for the loss, the loss scale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdtrain.core.errors import UserError
from hvdtrain.parallel.precision import LONG, LossScale, Precision


class MixedPrecision:
    """Implements `hvdtrain.core.protocols.Transform`: forward passes within `computing` are in this rank's own type.

    ``devices``: those that the model computes on. ``scale``: the factor of float16 losses (`factor`).
    """

    collective = False

    def __init__(self, precision: Precision, scale: LossScale, devices: Iterable[torch.device]) -> None:
        self._precision, self._scale = precision, scale
        self._kinds = sorted({d.type for d in devices})

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        check(floating_dtype(model), self._precision.own)

    def remove(self, model: torch.nn.Module) -> None:
        """Do nothing: outside `computing` a model computes in its own types."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self._precision.own == "fp32":
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind in self._kinds:
            stack.enter_context(torch.autocast(kind, getattr(torch, LONG[self._precision.own])))
        return stack

    @property
    def factor(self) -> float:
        """Factor of this rank's loss, by which its gradients are divided before they are handed over."""
        return self._scale.of(self._precision.rank)

    def describe(self) -> dict[str, str]:
        return {**self._precision.describe(), **self._scale.describe()}

    def caveats(self) -> list[str]:
        return self._precision.caveats()


def floating_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """Return the floating type of the parameters; None where there are several."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def check(dtype: torch.dtype | None, own: str) -> None:
    """Raise `UserError` unless parameters of ``dtype`` (None: of several) can be computed with in ``own``."""
    if own != "fp32" and dtype != torch.float32:
        found = "several types" if dtype is None else str(dtype).removeprefix("torch.")
        raise UserError(f"precision {own} with parameters of {found}", "float32 parameters, which keep their type",
                        "build the model in float32, or set precision: fp32 for the model's own types")


def full(outputs: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a loss of ``outputs``: without autocast, which refuses some losses of probabilities."""
    kind = outputs.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def widened(outputs: Any) -> Any:
    """Return in float32 what autocast made 16 bits wide; anything else unchanged."""
    narrow = isinstance(outputs, torch.Tensor) and outputs.dtype in (torch.float16, torch.bfloat16)
    return outputs.float() if narrow and torch.is_autocast_enabled(outputs.device.type) else outputs
