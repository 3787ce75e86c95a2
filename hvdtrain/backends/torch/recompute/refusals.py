"""Blocks of which it is known without a trial that they cannot be computed once more, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

TRIED = 2
"""Samples that blocks are tried with: BatchNorm needs two."""


def told(model: torch.nn.Module, named: Mapping[str, Any]) -> dict[str, str]:
    """Return why, by name, for those blocks of ``model``."""
    if _compiled(model):
        return dict.fromkeys(named, "the model was given to torch.compile, which computes blocks its own way "
                                    "(hvdtrain compiles with compile: auto)")
    return {name: why for name, block in named.items() if (why := _why(block))}


def _why(block: Any) -> str:
    if not isinstance(block, torch.nn.Module):
        return f"it is a {type(block).__name__} and no module"
    if _compiled(block):
        return "it was given to torch.compile (hvdtrain compiles with compile: auto)"
    for name, module in block.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'it'} is compiled by torch.jit"
        if name and (hook := _hook(module)):
            return f"module {name} in it has a forward hook {hook}, which would be called once more"
    return ""


def _compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _hook(module: torch.nn.Module) -> str:
    """The name of a user's hook; "" without one. Old spectral and weight norms are hooks, and channels_last is."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    for hook in hooks:
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if home.partition(".")[0] not in ("torch", "hvdtrain"):
            return str(getattr(hook, "__qualname__", type(hook).__name__))
    return ""
