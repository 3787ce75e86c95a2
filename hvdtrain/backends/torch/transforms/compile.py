"""Computing a PyTorch model through torch.compile, block by block, and its convolutions in channels_last.

Owns which blocks that are, and which are left and why; how a block is compiled is `hvdtrain.backends.torch.compiler`'s.
Weights keep their memory: channels_last is the layout of what convolutions are given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.backends.torch.compiler import Forward, Switch, missing

CHANNELS_LAST, COMPILED = "channels_last", "compiled"

_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_FORMATS = {torch.nn.Conv2d: torch.channels_last, torch.nn.Conv3d: torch.channels_last_3d,
            torch.nn.ConvTranspose2d: torch.channels_last, torch.nn.ConvTranspose3d: torch.channels_last_3d}

Named = Sequence[tuple[str, torch.nn.Module]]


class TorchCompile:
    """Implements `hvdtrain.core.protocols.Compile`.

    ``named``: the model's blocks as its file names them, or none. ``kind``: type of the devices. ``waits``: BatchNorm
    layers wait for other ranks in their forward pass. ``why``: why this model is not compiled at all, in words.
    """

    collective = False

    def __init__(self, model: torch.nn.Module, named: Named, kind: str, waits: bool = False, why: str = "") -> None:
        self._kind, self._why = kind, why
        self._switch = Switch()
        self._left: dict[str, str] = {}
        self._units: dict[str, Forward] = {}
        self._convolutions = [(m, f) for m in model.modules() for kind, f in _FORMATS.items() if isinstance(m, kind)]
        self._hooks: list[Any] = []
        self._sort(model, named, waits)
        self.chosen: tuple[str, ...] = ()
        self.options: Sequence[str] = (*([CHANNELS_LAST] if self._convolutions and not why else []), COMPILED)

    def _sort(self, model: torch.nn.Module, named: Named, waits: bool) -> None:
        """Find the blocks to compile, and why others are left."""
        for name, block in units(model, named):
            self._left[name] = refusal(block, waits)
            if not self._left[name]:
                self._units[name] = Forward(block, self._switch)

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        """Stand in for the blocks' forward passes, which compute as they did until `use` says otherwise."""
        for unit in self._units.values():
            unit.put()
        self._hook(CHANNELS_LAST in self.chosen)

    def remove(self, model: torch.nn.Module) -> None:
        """Give every block its own forward pass back, and convolutions their inputs as they come."""
        self._hook(False)
        for unit in self._units.values():
            unit.take_back()

    def refusal(self, option: str) -> str:
        """Return why ``option`` is not tried."""
        if self._why or option != COMPILED:
            return self._why
        if not self._units:
            return grouped(self._left) or "the model has no block to compile"
        return missing(self._kind)

    def use(self, options: Collection[str]) -> None:
        """Compute so from now on."""
        self.chosen = tuple(option for option in self.options if option in options)
        self._switch.on = COMPILED in self.chosen
        self._hook(CHANNELS_LAST in self.chosen)

    def prepare(self, work: Callable[[], None], until: float) -> str:
        """Compile what is in use by ``work``; `RuntimeError` where not one block could be."""
        if not self._switch.on:
            work()
            return ""
        with self._switch.compiling(until):
            work()
        left = self._left | {name: unit.left for name, unit in self._units.items()}
        if all(left.values()):
            raise RuntimeError(f"no block was compiled: {grouped(left)}")
        return grouped(left)

    def describe(self) -> dict[str, str]:
        """Return what is in use in words, for the summary."""
        return {"compile": " and ".join(self.chosen) or "nothing"}

    def caveats(self) -> list[str]:
        """Return nothing: sums round as on any other device; masks are others in channels_last, but that does not
        depend on how a batch is cut.
        """
        return []

    def _hook(self, on: bool) -> None:
        """Have the convolutions take their inputs in channels_last, or as they come."""
        if on == bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = [module.register_forward_pre_hook(_channels_last if layout == torch.channels_last
                                                        else _channels_last_3d)
                       for module, layout in self._convolutions] if on else []


def units(model: torch.nn.Module, named: Named) -> list[tuple[str, torch.nn.Module]]:
    """Return the blocks to compile: the named ones; without any the modules of modules in the model; else the model.

    Not the model as a whole where it has parts: gradients come out of a compiled block all at once, and could not be
    exchanged while backward goes on.
    """
    found = [(name, block) for name, block in named if not _single(block)]
    found = found or [(name, block) for name, block in _walk("", model) if any(block.children())]
    return found or [("the model", model)]


def _single(block: torch.nn.Module) -> bool:
    """Whether it is one of PyTorch's own layers, alone: a kernel that there is nothing to fuse with."""
    return type(block).__module__.startswith("torch.nn.modules") and not any(block.children())


def _walk(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules right below ``module``; of mere lists what is in them."""
    for name, child in module.named_children():
        name = f"{prefix}{name}"
        if isinstance(child, _LISTS) and type(child) in _LISTS and any(any(c.children()) for c in child.children()):
            yield from _walk(f"{name}.", child)
        else:
            yield name, child


def refusal(block: torch.nn.Module, waits: bool) -> str:
    """Return why ``block`` is not compiled, in words; "" where it may be."""
    if isinstance(block, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return "a list, which computes nothing itself"
    for module in block.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "a script of TorchScript"
        if _users_own(module):
            return "compiled by its user already"
        if waits and isinstance(module, _BatchNorm):
            return "its BatchNorm waits for other ranks (sync_batchnorm)"
    return ""


def _users_own(module: torch.nn.Module) -> bool:
    """Whether somebody has compiled ``module`` with torch.compile, or by its own method."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported for the question's sake
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def grouped(left: dict[str, str]) -> str:
    """Say which blocks are left and why, those of one reason together; "" where none is."""
    reasons = dict.fromkeys(filter(None, left.values()))
    return "; ".join(f"{_names([n for n, why in left.items() if why == reason])} ({reason})" for reason in reasons)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _channels_last(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_laid_out(x, 4, torch.channels_last) for x in inputs)


def _channels_last_3d(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_laid_out(x, 5, torch.channels_last_3d) for x in inputs)


def _laid_out(x: Any, dims: int, layout: torch.memory_format) -> Any:
    fits = isinstance(x, torch.Tensor) and x.dim() == dims and x.is_floating_point()
    return x.contiguous(memory_format=layout) if fits else x
