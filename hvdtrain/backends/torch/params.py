"""Trainable tensors of a PyTorch model, singly and as buckets, and the changes of the model that a run follows.

Exchanges nothing; the update is `hvdtrain.backends.torch.optimizer`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hvdtrain.backends.torch import modules
from hvdtrain.backends.torch.freezing import TorchFreezing
from hvdtrain.backends.torch.modules import PlainNames, named_parameters
from hvdtrain.backends.torch.optimizer import ELEMENTWISE, Slices, TorchOptimizer
from hvdtrain.backends.torch.resuming import KERNELS
from hvdtrain.backends.torch.state import TorchState
from hvdtrain.checkpoint.adapters import fitting
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.planning.shards import in_bucket


class Make(Protocol):
    """Makes an optimizer of the run's kind over tensors, or over ``slices`` whose ``tensors`` they are.

    ``names``: of the parameters that they are, or are slices of; a model with parameter groups needs them.
    """

    def __call__(self, tensors: Sequence[torch.Tensor], *, names: Sequence[str] = (),
                 slices: Slices | None = None) -> TorchOptimizer:
        """Return it, with state of its own."""


class TorchParams:
    """Implements `hvdtrain.core.protocols.Params`, in the model's own order, a shared tensor once.

    ``places``: the device of each, as an index. ``make``: returns an optimizer of the run's kind over tensors.
    ``whole``: False for one rank's stages of a model, which may have no parameters.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module], places: Mapping[int, int],
                 make: Make, whole: bool = True) -> None:
        self._model, self._make = model, make
        self._run_optimizer: TorchOptimizer | None = None
        named = trainable(model) if whole else [(n, p) for n, p in named_parameters(model) if p.requires_grad]
        self.names, self.tensors = [n for n, _ in named], [p for _, p in named]
        self._places, self._blocks = places, blocks
        self.specs = self._specs(named)

    def _specs(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> list[ParamSpec]:
        block_of = _block_of(self._blocks)
        return [ParamSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch."), self._places.get(id(p), 0),
                          block_of.get(id(p), len(self._blocks))) for n, p in named]

    def extend(self, names: Sequence[str]) -> None:
        """Add parameters of the model, by name, behind all others."""
        live = dict(named_parameters(self._model))
        self.names += names
        self.tensors += [live[name] for name in names]
        self.specs += self._specs([(name, live[name]) for name in names])

    def made_of(self) -> list[str]:
        return [*modules.made_of(self._model), *([self._run_optimizer.made_of()] if self._run_optimizer else [])]

    def views(self, bucket: Bucket, flat_N: torch.Tensor) -> list[torch.Tensor]:
        """Return ``flat_N`` (n,) as views of the shapes of the bucket's tensors."""
        return [flat_N[offset:offset + self.specs[i].n].view(shape)
                for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes)]

    def frozen(self) -> frozenset[int]:
        return frozenset(i for i, tensor in enumerate(self.tensors) if not tensor.requires_grad)

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> torch.Tensor:
        inside = in_bucket(bucket, begin, bucket.n if end is None else end)
        if not inside:
            return self.tensors[bucket.params[0]].new_empty(0)
        if end is not None and len(inside) == 1:
            i, (a, b) = inside[0]
            return self.tensors[i].detach().reshape(-1)[a:b]
        return torch.cat([self.tensors[i].detach().reshape(-1)[a:b] for i, (a, b) in inside])

    @torch.no_grad()
    def write(self, bucket: Bucket, flat_N: torch.Tensor, known: tuple[int, int] = (0, 0)) -> None:
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for i, offset, view in zip(bucket.params, bucket.offsets, self.views(bucket, flat_N)):
            tensor, n = self.tensors[i].detach(), self.specs[i].n
            begin, end = (min(max(edge - offset, 0), n) for edge in known)
            if begin == end or not tensor.is_contiguous():
                into.append(tensor)
                values.append(view)
                continue
            for part in (slice(0, begin), slice(end, n)):
                if part.start < part.stop:
                    into.append(tensor.view(-1)[part])
                    values.append(view.view(-1)[part])
        if into:
            torch._foreach_copy_(into, values)

    def optimizer(self, vectors: Sequence[torch.Tensor] | None = None) -> TorchOptimizer:
        """Return an optimizer of the run's kind with new state, over the tensors or over ``vectors``."""
        if vectors is None:
            self._run_optimizer = self._make(self.tensors, names=self.names)
            return self._run_optimizer
        return self._make([torch.nn.Parameter(vector.detach()) for vector in vectors])

    def sliced(self, spans: Sequence[tuple[int, int]]) -> TorchOptimizer:
        whole = self._run_optimizer
        assert whole is not None, "there is an optimizer to take over from"
        _refuse_slices(whole)
        slices = Slices(self.tensors, spans)
        made = self._run_optimizer = self._make(slices.tensors, names=self.names, slices=slices)
        for group, before in zip(made.optimizer.param_groups, whole.optimizer.param_groups):
            group.update({key: before[key] for key in KERNELS if key in before})  # other kernels round otherwise
        if whole.updates:
            made.load_scalars(whole.scalars())
        slices.take_over(made.optimizer.state, whole.optimizer.state)
        return made


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of ``model`` that are trained, by name; `UserError` where there is none."""
    named = [(n, p) for n, p in named_parameters(model) if p.requires_grad]
    if not named:
        raise UserError("the model has no trainable parameter", "at least one with requires_grad", "unfreeze one")
    if any(p.is_inference() for _, p in named):
        raise UserError("a model that was built inside torch.inference_mode(), whose parameters have no gradient",
                        "parameters that can be trained", "build the model outside of `with torch.inference_mode():`")
    return named


def _refuse_slices(whole: TorchOptimizer) -> None:
    """Raise `UserError` unless updating slices of tensors is updating the tensors."""
    if whole.adopted is not None:
        raise UserError(f"data_parallel zero with the {whole.adopted.name} that a Keras model on PyTorch was compiled "
                        "with", "an optimizer of torch.optim, whose state can be sharded",
                        "set optimizer.name (for example adam), data_parallel: replicate, or KERAS_BACKEND=tensorflow")
    if not whole.elementwise:
        usual = ", ".join(sorted(c.__name__ for c in ELEMENTWISE))
        whose = "needs whole tensors" if whole.optimizer_spec.kind is None else "may need whole tensors"
        raise UserError(f"data_parallel zero with optimizer {whole.kind()}, which {whose}",
                        f"an optimizer that updates each element separately: {usual}",
                        "use such an optimizer, or data_parallel: replicate")


def _block_of(blocks: Sequence[Any]) -> dict[int, int]:
    """Return the index of the first block that holds a tensor, by the tensor's id."""
    found: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for tensor in block.parameters():
            found.setdefault(id(tensor), number)
    return found


TRAINED, FROZEN, MODE = "is now trained", "is frozen", "mode"
FOLLOWED = (TRAINED, FROZEN, MODE)
"""Ends of the changes that a run follows; it refuses all others."""
SHOWN = 3
"""Changes that an error names."""


class _ModelSnapshot(NamedTuple):
    """The model at one moment. The objects are kept, so that ids stay unique."""

    params: list[torch.nn.Parameter]
    trained: list[bool]
    kinds: list[tuple[torch.dtype, torch.Size]]
    modules: list[torch.nn.Module]
    modes: list[bool]
    grouped: int

    def equals(self, other: _ModelSnapshot) -> bool:
        return (self.trained == other.trained and self.kinds == other.kinds and self.modes == other.modes
                and self.grouped == other.grouped
                and all(a is b for a, b in zip(self.params, other.params))
                and all(a is b for a, b in zip(self.modules, other.modules)))


class TorchFacts:
    """Implements `hvdtrain.core.protocols.ModelFacts` of ``model``, whose ``params`` and ``state`` a run has.

    ``plain``: no transform has read the model's modules, so that a module without parameters may be replaced.
    ``freezing``: what the key ``freeze`` names.
    """

    def __init__(self, model: torch.nn.Module, params: TorchParams, state: TorchState, plain: bool,
                 freezing: TorchFreezing | None = None) -> None:
        self._model, self._params, self._state, self._plain = model, params, state, plain
        self._freezing = freezing
        self._built_modes = {name: module.training for name, module in model.named_modules()}
        self._unfrozen: list[list[str]] = []
        state.facts = self.saved
        self.renew()

    def _look(self) -> _ModelSnapshot:
        params, modules = list(self._model.parameters()), list(self._model.modules())
        grouped = sum(len(group["params"]) for group in self._state.optimizer.optimizer.param_groups)
        return _ModelSnapshot(params, [p.requires_grad for p in params], [(p.dtype, p.shape) for p in params], modules,
                     [m.training for m in modules], grouped)

    def renew(self) -> None:
        self._last = self._look()
        self._params_by = {name: id(p) for name, p in named_parameters(self._model)}
        self._modules_by = {name: id(module) for name, module in self._model.named_modules()}
        known = set(self._params.names)
        self._frozen = [(name, p) for name, p in named_parameters(self._model) if name not in known]
        self._with_buffers = {path for path, module in self._model.named_modules()
                              if next(module.buffers(recurse=False), None) is not None}

    def changes(self) -> list[str]:
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
            found.append(f"the optimizer was given {now.grouped} parameters instead of {before.grouped}")
        names = {i: name for name, i in self._params_by.items()}
        kinds = dict(zip(map(id, before.params), before.kinds))
        found += [f"parameter {names[id(p)]} was changed from {_kind(*kinds[id(p)])} to {_kind(*kind)}"
                  for p, kind in zip(now.params, now.kinds) if kinds.get(id(p), kind) != kind]
        paths = {i: path or "(the model)" for path, i in self._modules_by.items()}
        trained, modes = dict(zip(map(id, before.params), before.trained)), dict(
            zip(map(id, before.modules), before.modes))
        found += [f"parameter {names[id(p)]} {TRAINED if flag else FROZEN}" for p, flag in zip(now.params, now.trained)
                  if trained.get(id(p), flag) != flag]
        found += [f"module {paths[id(m)]} is in {'training' if mode else 'evaluation'} {MODE}"
                  for m, mode in zip(now.modules, now.modes) if modes.get(id(m), mode) != mode]
        return found

    def follow(self, changes: Sequence[str], note: Callable[[str], None]) -> int | None:
        refused = [change for change in changes if not change.endswith(FOLLOWED) and not (
            self._plain and change.startswith("module"))]
        if refused:
            raise UserError(f"a callback changed the model while it trains: {'; '.join(refused[:SHOWN])}",
                            "the parameters, buffers and layers as they were at the start of the run (requires_grad "
                            "and modes may change at any step)",
                            _way(refused))
        return self.take_in([name for name, p in named_parameters(self._model) if p.requires_grad])

    def set_frozen(self, epoch: int) -> list[str]:
        """Freeze and unfreeze in the model; what changed is found and followed at the next step."""
        if self._freezing is not None:
            self._freezing.set_epoch(epoch)
        return []

    def late(self) -> str:
        return next((name for name, p in self._frozen if p.requires_grad), "")

    def take_in(self, names: Sequence[str]) -> int | None:
        first = len(self._params.names)
        new = [name for name in names if name not in set(self._params.names)]
        if not new:
            return None
        _check(self._state.optimizer, new)
        self._params.extend(new)
        self._unfrozen.append(new)
        return first

    def extend(self, first: int, spans: Sequence[tuple[int, int]] | None) -> None:
        names, tensors = self._params.names[first:], self._params.tensors[first:]
        _join(self._state.optimizer, names, tensors, spans)
        self._state.extend(names, spans)
        self.renew()

    def saved(self) -> dict[str, Any]:
        """Return how the model differs from what its user built, JSON-able; {} where it does not."""
        live, known = dict(named_parameters(self._model)), set(self._params.names)
        coming = [name for name, p in live.items() if p.requires_grad and name not in known]
        plain = PlainNames(self._model)
        found = {"unfrozen": [*self._unfrozen, *([coming] if coming else [])],
                 "frozen": [name for name in self._params.names if name in live and not live[name].requires_grad],
                 "modes": {plain(name): module.training for name, module in self._model.named_modules()
                           if self._built_modes.get(name, module.training) != module.training}}
        return {"model_facts": found} if any(found.values()) else {}

    def resume(self, rest: Mapping[str, Any]) -> list[list[str]]:
        found = rest.get("model_facts", {})
        live, plain = dict(named_parameters(self._model)), PlainNames(self._model)
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


def _way(refused: Sequence[str]) -> str:
    """Return what to do instead of the changes that are ``refused``."""
    if all(change.startswith("the optimizer was given") for change in refused):
        return ("declare the parameters at the start, frozen: list their group with its lr in parameter_groups(model) "
                "of the model file, and set requires_grad in the callback in place of add_param_group, or set the key "
                "freeze")
    return "build the model with all layers and set requires_grad, or start another run"


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _check(optimizer: TorchOptimizer, names: Sequence[str]) -> None:
    """Raise `UserError` unless parameters that were frozen can join ``optimizer``."""
    if optimizer.adopted is not None:
        raise UserError(f"a callback unfroze {names[0]} under the {optimizer.adopted.name} that a Keras model on "
                        "PyTorch was compiled with", "the variables that it was built for",
                        "compile the model with all layers trainable and freeze them, or start another run")
    for name in names:
        optimizer.optimizer_spec.group_of(name)


def _join(optimizer: TorchOptimizer, names: Sequence[str], tensors: Sequence[torch.Tensor],
          spans: Sequence[tuple[int, int]] | None) -> None:
    """Have ``optimizer`` update ``tensors`` too, each in its group; their state comes with the first gradient."""
    if spans is not None:
        assert optimizer.slices is not None, "spans are of an optimizer over slices"
        tensors = optimizer.slices.extend(tensors, spans)
    optimizer.tensors += tensors
    for name, tensor in zip(names, tensors):
        if spans is None or tensor.numel():
            group = optimizer.optimizer.param_groups[optimizer.optimizer_spec.group_of(name)]
            group["params"].append(tensor)
    optimizer.optimizer_spec = optimizer.optimizer_spec.joined(names)


def _other(kind: str, before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, str]:
    """Return the objects that were added, removed or replaced, a sentence by name."""
    return {name: f"{kind} {name} was {'added' if name not in before else 'removed' if name not in now else 'replaced'}"
            for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)}
