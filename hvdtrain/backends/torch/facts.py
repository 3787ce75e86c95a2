"""What a run has read of a PyTorch model, compared with the model as callbacks leave it.

Owns which changes a run follows (parameters frozen or trained from now on, modules in evaluation mode, other modules
without parameters) and what of them a checkpoint keeps. Exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hvdtrain.backends.torch.names import Plain, named_parameters
from hvdtrain.backends.torch.optimizer import TorchOptimizer
from hvdtrain.backends.torch.params import TorchParams
from hvdtrain.backends.torch.state import TorchState
from hvdtrain.checkpoint.adapters import fitting
from hvdtrain.core.errors import UserError

TRAINED, FROZEN = "is trained from now on", "is frozen"
SHOWN = 3
"""Changes that an error names."""


class _Look(NamedTuple):
    """The model at one moment. The objects are kept, so that no other one gets the id of one that has gone."""

    params: list[torch.nn.Parameter]
    trained: list[bool]
    kinds: list[tuple[torch.dtype, torch.Size]]
    modules: list[torch.nn.Module]
    modes: list[bool]
    grouped: int

    def equals(self, other: _Look) -> bool:
        """Return whether nothing differs."""
        return (self.trained == other.trained and self.kinds == other.kinds and self.modes == other.modes
                and self.grouped == other.grouped
                and all(a is b for a, b in zip(self.params, other.params))
                and all(a is b for a, b in zip(self.modules, other.modules)))


class TorchFacts:
    """Implements `hvdtrain.core.protocols.ModelFacts` of ``model``, whose ``params`` and ``state`` a run has.

    ``plain``: no transform has read the model's modules, so that a module without parameters may be replaced.
    """

    def __init__(self, model: torch.nn.Module, params: TorchParams, state: TorchState, plain: bool) -> None:
        self._model, self._params, self._state, self._plain = model, params, state, plain
        self._built_modes = {name: module.training for name, module in model.named_modules()}
        self._unfrozen: list[list[str]] = []
        state.facts = self.saved
        self.renew()

    def _look(self) -> _Look:
        params, modules = list(self._model.parameters()), list(self._model.modules())
        grouped = sum(len(group["params"]) for group in self._state.optimizer.optimizer.param_groups)
        return _Look(params, [p.requires_grad for p in params], [(p.dtype, p.shape) for p in params], modules,
                     [m.training for m in modules], grouped)

    def renew(self) -> None:
        """Take the model as it is now for unchanged."""
        self._last = self._look()
        self._params_by = {name: id(p) for name, p in named_parameters(self._model)}
        self._modules_by = {name: id(module) for name, module in self._model.named_modules()}
        known = set(self._params.names)
        self._frozen = [(name, p) for name, p in named_parameters(self._model) if name not in known]
        self._with_buffers = {path for path, module in self._model.named_modules()
                              if next(module.buffers(recurse=False), None) is not None}

    def changes(self) -> list[str]:
        """Return what differs from the last call, or from `renew`."""
        before, now = self._last, self._look()
        if now.equals(before):
            return []
        params, modules, holders = self._params_by, self._modules_by, self._with_buffers
        self.renew()
        other = _other("module", modules, self._modules_by)  # a module may register a buffer in its forward pass
        found = [*_other("parameter", params, self._params_by).values(),
                 *(f"a buffer of {change}" if path in holders | self._with_buffers else change
                   for path, change in other.items())]
        if now.grouped != before.grouped:
            found.append(f"the optimizer was given {now.grouped} parameters in place of {before.grouped}")
        names = {i: name for name, i in self._params_by.items()}
        kinds = dict(zip(map(id, before.params), before.kinds))
        found += [f"parameter {names[id(p)]} was changed from {_kind(*kinds[id(p)])} to {_kind(*kind)}"
                  for p, kind in zip(now.params, now.kinds) if kinds.get(id(p), kind) != kind]
        paths = {i: path or "(the model)" for path, i in self._modules_by.items()}
        trained, modes = dict(zip(map(id, before.params), before.trained)), dict(
            zip(map(id, before.modules), before.modes))
        found += [f"parameter {names[id(p)]} {TRAINED if flag else FROZEN}" for p, flag in zip(now.params, now.trained)
                  if trained.get(id(p), flag) != flag]
        found += [f"module {paths[id(m)]} is in {'training' if mode else 'evaluation'} mode"
                  for m, mode in zip(now.modules, now.modes) if modes.get(id(m), mode) != mode]
        return found

    def follow(self, changes: Sequence[str], note: Callable[[str], None]) -> int | None:
        """Go along with ``changes``; return the index of the first parameter that joins the run's, or None."""
        refused = [change for change in changes if " was " in change and not (
            self._plain and change.startswith("module"))]
        if refused:
            raise UserError(f"a callback changed the model while it trains: {'; '.join(refused[:SHOWN])}",
                            "the parameters, buffers and layers that the run began with (requires_grad and modes may "
                            "change at any step)",
                            "build the model with all layers and set requires_grad, or begin another run")
        return self.take_in([name for name, p in named_parameters(self._model) if p.requires_grad])

    def late(self) -> str:
        """Return the name of a parameter that the run does not train and that has a gradient now, or ""."""
        return next((name for name, p in self._frozen if p.requires_grad), "")

    def take_in(self, names: Sequence[str]) -> int | None:
        """Add those of ``names`` that the run does not train yet; return the first one's index, or None."""
        first = len(self._params.names)
        new = [name for name in names if name not in set(self._params.names)]
        if not new:
            return None
        _check(self._state.optimizer, new)
        self._params.extend(new)
        self._unfrozen.append(new)
        return first

    def extend(self, first: int, spans: Sequence[tuple[int, int]] | None) -> None:
        """Update the parameters from index ``first`` on too; ``spans``: this rank's elements of each, None: all."""
        names, tensors = self._params.names[first:], self._params.tensors[first:]
        _join(self._state.optimizer, names, tensors, spans)
        self._state.extend(names, spans)
        self.renew()

    # --- through a checkpoint ----------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return how the model differs from what its user built, JSON-able; {} where it does not."""
        live, known = dict(named_parameters(self._model)), set(self._params.names)
        coming = [name for name, p in live.items() if p.requires_grad and name not in known]
        plain = Plain(self._model)
        found = {"unfrozen": [*self._unfrozen, *([coming] if coming else [])],
                 "frozen": [name for name in self._params.names if name in live and not live[name].requires_grad],
                 "modes": {plain(name): module.training for name, module in self._model.named_modules()
                           if self._built_modes.get(name, module.training) != module.training}}
        return {"model_facts": found} if any(found.values()) else {}

    def resume(self, rest: Mapping[str, Any]) -> list[list[str]]:
        """Bring the model to what `saved` gave; return lists of names to `take_in` one after another, as that run did.
        """
        found = rest.get("model_facts", {})
        live, plain = dict(named_parameters(self._model)), Plain(self._model)
        named, modes = list(self._model.named_modules()), found.get("modes", {})
        known = fitting([plain(name) for name, _ in named], modes)
        modes = {known.get(name, name): mode for name, mode in modes.items()}
        lists = [*found.get("unfrozen", []), found.get("frozen", [])]
        now = fitting(live, {name for names in lists for name in names})
        *batches, frozen = [[now.get(name, name) for name in names if now.get(name, name) in live] for names in lists]
        for names, flag in [*((names, True) for names in batches), (frozen, False)]:
            for name in names:
                live[name].requires_grad_(flag)
        for name, module in named:
            if (mode := modes.get(plain(name))) is not None:
                module.training = bool(mode)
        self.renew()
        return batches


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _check(optimizer: TorchOptimizer, names: Sequence[str]) -> None:
    """Raise `UserError` unless parameters that were frozen can join ``optimizer``."""
    if optimizer.adopted is not None:
        raise UserError(f"a callback unfroze {names[0]} under the {optimizer.adopted.name} that a Keras model on "
                        "PyTorch was compiled with", "the variables that it was built for",
                        "compile the model with all layers trainable and freeze them, or begin another run")
    for name in names:
        optimizer.given.group_of(name)


def _join(optimizer: TorchOptimizer, names: Sequence[str], tensors: Sequence[torch.Tensor],
          spans: Sequence[tuple[int, int]] | None) -> None:
    """Have ``optimizer`` update ``tensors`` too, each in its group; their state comes with the first gradient."""
    if spans is not None:
        assert optimizer.slices is not None, "spans are of an optimizer over slices"
        tensors = optimizer.slices.extend(tensors, spans)
    optimizer.tensors += tensors
    for name, tensor in zip(names, tensors):
        if spans is None or tensor.numel():
            group = optimizer.optimizer.param_groups[optimizer.given.group_of(name)]
            group["params"].append(tensor)
    optimizer.given = optimizer.given.joined(names)


def _other(kind: str, before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, str]:
    """Return which objects are not those of before, a sentence by name."""
    return {name: f"{kind} {name} was {'added' if name not in before else 'removed' if name not in now else 'replaced'}"
            for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)}
