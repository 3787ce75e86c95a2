"""The model of one rank of a pipeline: the user's own, with placeholders for the blocks that other ranks have.

Owns which modules go, and the forward pass that stands in for the model's own: within `Cut.giving` a task's call of the
model gets what this rank's blocks make of what came, else it is an error in words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch.blocks import called_with
from hvdtrain.core.errors import UserError

Named = Sequence[tuple[str, torch.nn.Module]]

UNDO = "leave pipeline out"
"""How to do without a model that is cut over ranks."""


class NotHere(UserError, AttributeError):
    """What a task looks for is on another rank; to `hasattr` it is not there."""


class Elsewhere(torch.nn.Module):
    """Stands for a block that another rank has; without parameters and buffers."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **named: Any) -> Any:
        """Say whose it is."""
        raise self._told("it was called")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            raise self._told(f"its {name} was asked for") from None

    def _told(self, what: str) -> NotHere:
        return NotHere(f"block {self.__dict__['block']} of the model is on another rank of the pipeline, and {what} "
                       "here", "a task that uses nothing of the model but model(x)",
                       "return what task needs from the block as an output of the model, or leave pipeline out")


def take_out(model: torch.nn.Module, blocks: Named, own: Collection[int]) -> None:
    """Put a placeholder where each block is that is not among ``own`` (numbers), and free its memory."""
    kept = {id(m) for i in own for m in blocks[i][1].modules()}
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            places.setdefault(id(child), []).append((module, name))

    def out(name: str, module: torch.nn.Module) -> None:
        if id(module) in kept:
            return
        found = places.get(id(module))
        if found is None:  # put together by blocks(model) of modules that the model has
            for child in list(module.children()):
                out(name, child)
            return
        for parent, attribute in found:
            parent._modules[attribute] = Elsewhere(name)
        module.to("meta")  # whoever still holds it (a list beside the modules) holds no memory

    for i, (name, block) in enumerate(blocks):
        if i not in own:
            out(name, block)


def is_cut(model: torch.nn.Module) -> bool:
    """Whether blocks of ``model`` have been taken out."""
    return any(isinstance(module, Elsewhere) for module in model.modules())


def refuse_cut(model: torch.nn.Module) -> None:
    """Raise `UserError` for a model that an earlier run has partitioned over ranks."""
    if is_cut(model):
        raise UserError("a model of which an earlier run with a pipeline has left some blocks only on this rank",
                        "the whole model", "build the model again and load the weights of that run's folder")


class Cut:
    """The forward pass of ``model``, of which this rank has some blocks; all, where ``whole``: then it is its own."""

    def __init__(self, model: torch.nn.Module, whole: bool = False) -> None:
        self._model, self._own = model, model.forward if whole else None
        self._give: Callable[[Any], Any] | None = None
        vars(model)["forward"] = self.forward

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the model gives here and now."""
        if self._give is None and self._own is not None:
            return self._own(*args, **named)
        if self._give is None:
            raise UserError(f"a call of {type(self._model).__name__}, of which this rank of a pipeline has some blocks "
                            "only", "the whole model", "build the model again and load the weights of the run's folder")
        if len(args) != 1 or named:
            raise called_with(args, named, UNDO)
        return self._give(args[0])

    @contextlib.contextmanager
    def giving(self, outputs: Callable[[Any], Any]) -> Iterator[None]:
        """Within it a call ``model(x)`` gives ``outputs(x)``."""
        before, self._give = self._give, outputs
        try:
            yield
        finally:
            self._give = before
