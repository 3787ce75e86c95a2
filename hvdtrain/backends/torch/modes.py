"""Which modules of a PyTorch model train and which evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """After it, every module is in the mode it was in."""
    modes = {m: m.training for m in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def set_modes(model: torch.nn.Module, modes: dict[torch.nn.Module, bool]) -> None:
    """Put the model into training mode, by its own method, but for the modules whose mode is given."""
    model.train()
    for module, training in modes.items():
        module.training = training
