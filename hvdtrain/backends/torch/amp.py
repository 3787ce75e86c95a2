"""Computing in 16 bits with PyTorch: autocast around what the model does, float32 for the loss.

Owns where autocast begins and ends. Parameters stay float32, and autograd gives them float32 gradients.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from hvdtrain.errors import UserError
from hvdtrain.precision.policy import LONG


def check(dtype: torch.dtype | None, own: str) -> None:
    """Raise `UserError` unless parameters of ``dtype`` (None: of several) can be computed with in ``own``."""
    if own != "fp32" and dtype != torch.float32:
        found = "several types" if dtype is None else str(dtype).removeprefix("torch.")
        raise UserError(f"precision {own} with parameters of {found}", "float32 parameters, which are kept as they are",
                        "build the model in float32, or set precision: fp32 for the model's own types")


def computing(device: torch.device, own: str) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass on a rank that computes in ``own``."""
    return contextlib.nullcontext() if own == "fp32" else torch.autocast(device.type, getattr(torch, LONG[own]))


def full(outputs: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The context of a loss of ``outputs``: without autocast, some of which refuses losses of probabilities."""
    kind = outputs.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def widened(outputs: Any) -> Any:
    """What autocast made 16 bits wide, in float32; anything else, and all outside autocast, as it is."""
    narrow = isinstance(outputs, torch.Tensor) and outputs.dtype in (torch.float16, torch.bfloat16)
    return outputs.float() if narrow and torch.is_autocast_enabled(outputs.device.type) else outputs
