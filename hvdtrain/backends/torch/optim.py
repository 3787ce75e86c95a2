"""Optimizers and schedules of PyTorch by name, and parameter groups and optimizers that a model file gives.

Reads both into names, options and a class, so that an optimizer can be made over the tensors a rank holds later.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvdtrain.backends.model_spec import called
from hvdtrain.backends.torch.modules import named_parameters
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError, count, nearest

UNUSABLE = {"lbfgs": "needs a closure that is evaluated several times a step",
            "sparseadam": "needs sparse gradients, which hvdtrain does not exchange"}
"""Those of torch.optim, in lower case, that no step here can use, and why."""
ParamGroups = Sequence[dict[str, Any]]
"""What torch.optim takes: {"params": [tensor], option: value} for each group."""
NOT_OPTIONS = ("params", "param_names", "initial_lr")
"""Entries of an optimizer's group that are no setting of the update."""
NOT_SAID = (("fused", None), ("foreach", None), ("differentiable", False))
"""Settings of kernels that an optimizer has where its user has said nothing."""


def class_of(config: Config) -> Any:
    """Return the class in torch.optim that ``optimizer.name`` names, any case; auto is Adam. `UserError` for none."""
    classes = {n.lower(): c for n, c in vars(torch.optim).items()
               if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer}
    name = "adam" if config.optimizer.name == "auto" else config.optimizer.name.lower()
    if name in UNUSABLE or name not in classes:
        why = UNUSABLE.get(name, "is not in torch.optim")
        usable = [c.__name__ for k, c in classes.items() if k not in UNUSABLE]
        raise UserError(f"optimizer {config.optimizer.name!r} {why}", nearest(name, usable), "correct optimizer.name")
    return classes[name]


def make_optimizer(config: Config, groups: ParamGroups, lr: float) -> torch.optim.Optimizer:
    """Return the configured optimizer over ``groups`` with the base rate ``lr``; a group may be empty."""
    make = class_of(config)
    own = config.optimizer.args
    try:
        refuse_fused(_tensors(groups), asks_fused(own, groups))
        return make(list(groups), lr=lr, **fused_option(make, groups, own), **own)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {make.__name__} refused args {own}: {error}",
                        "keyword arguments it accepts", "correct optimizer.args") from None


def fused_option(make: Any, groups: ParamGroups, own: dict[str, Any]) -> dict[str, bool]:
    """Return ``fused=True`` for SGD on a CPU, unless the user asks otherwise: one pass over memory instead of three.

    An update may differ from the default's by one rounding. Not for channels_last: the kernel walks all tensors in
    memory order, and gradients lie row by row in their bucket. ``own``: the user's arguments.
    """
    usual = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and p.is_contiguous()
                for p in _tensors(groups))
    asked = {"fused", "foreach", "differentiable"} & set(own).union(*groups)
    return {"fused": True} if make is torch.optim.SGD and usual and not asked else {}


@contextlib.contextmanager
def updating_fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have a user's SGD on CPUs update as by `fused_option` inside of this context, where its user chose no kernel."""
    groups = [group for group in optimizer.param_groups if _fusible(group, optimizer.state)]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _fusible(group: dict[str, Any], state: Mapping[torch.Tensor, dict[str, Any]]) -> bool:
    """Return whether the kernel takes the group's gradients: dense ones, all with a momentum or all without."""
    if any(group.get(key, usual) is not usual for key, usual in NOT_SAID) or isinstance(group["lr"], torch.Tensor):
        return False
    params = [p for p in group["params"] if p.grad is not None]
    momenta = [state[p].get("momentum_buffer") if p in state else None for p in params]
    present = [m for m in momenta if m is not None]
    return len(present) in (0, len(params)) and all(
        p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and p.is_contiguous()
        and not p.grad.is_sparse and p.grad.is_contiguous() for p in params) and all(
        m.is_contiguous() for m in present)


def asks_fused(own: dict[str, Any], groups: ParamGroups) -> bool:
    """Return whether the user's arguments, or the options of a group, say ``fused=True``."""
    return any(options.get("fused") for options in (own, *groups))


def refuse_fused(params: Sequence[torch.Tensor], asked: bool) -> None:
    """Raise `UserError` where a ``fused=True`` that was asked for would mix up elements; see `fused_option`."""
    if asked and not all(p.is_contiguous() for p in params):
        raise UserError("optimizer.args.fused with parameters that are not contiguous (channels_last)",
                        "parameters with the memory layout of their gradients", "leave optimizer.args.fused out")


def _tensors(groups: ParamGroups) -> list[torch.Tensor]:
    return [p for group in groups for p in group["params"]]


@dataclass(frozen=True)
class Group:
    """Parameters by name, in the model's order, and the options in which their update differs; a rate is unscaled."""

    names: tuple[str, ...]
    options: dict[str, Any]

    def words(self) -> str:
        options = ", ".join(f"{key} {value}" for key, value in self.options.items()) or "as configured"
        return f"{options}: {count(len(self.names), 'tensor')}"

    def checksum(self) -> int:
        """Return a number for names and options, the same in every process."""
        return zlib.crc32(repr((self.names, sorted(self.options.items()))).encode())


@dataclass(frozen=True)
class OptimizerSpec:
    """Parameter groups and optimizer of a model's file; empty unless the file defines them.

    ``groups``: hold every parameter, if there are any; the last holds those that the file puts into none. ``kind``:
    class of the file's optimizer, made with ``settings``; None: the configured one. ``frozen``: group by parameter.
    """

    groups: tuple[Group, ...] = ()
    kind: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, int] = field(default_factory=dict)

    def group_of(self, name: str) -> int:
        """Return the group that an unfrozen parameter joins; `UserError` where the file gives it to none."""
        if name in self.frozen:
            return self.frozen[name] if self.groups else 0
        if self.kind is None and not (self.groups and self.groups[-1].options):
            return max(0, len(self.groups) - 1)
        whose = "parameter_groups" if self.kind is None else "the optimizer"
        raise UserError(f"a callback unfroze {name}, which the model file assigns to no group of {whose}",
                        "a group for every parameter that is ever trained, even while it is frozen",
                        "assign it to a group in the model file, or leave it frozen")

    def joined(self, names: Sequence[str]) -> OptimizerSpec:
        """Return a copy with ``names``, which were frozen, each in its group."""
        of = [self.group_of(name) for name in names] if self.groups else []
        return replace(self, groups=tuple(
            replace(group, names=(*group.names, *(name for name, own in zip(names, of) if own == number)))
            for number, group in enumerate(self.groups)))

    def rate(self, config: Config) -> float:
        """Return the base rate, before linear scaling."""
        return config.lr if self.kind is None else float(self.settings["lr"])

    def words(self) -> str:
        """Return the settings of the file's optimizer, to compare between ranks; "" without one."""
        plain = ((key, value) for key, value in sorted(self.settings.items())
                 if value is None or isinstance(value, (bool, int, float, str, tuple)))
        return "".join(f" {key} {value}" for key, value in plain)

    def plain(self) -> OptimizerSpec:
        """Return a copy without groups, for tensors without names."""
        return replace(self, groups=())

    def make(self, config: Config, names: Sequence[str], tensors: Sequence[torch.Tensor],
             lr: float) -> torch.optim.Optimizer:
        """Return an optimizer over ``tensors``, parallel to ``names``, with base rate ``lr``; groups may be empty."""
        groups = self._over(names, tensors, lr / self.rate(config) if self.rate(config) else 1.0)
        if self.kind is None:
            return make_optimizer(config, groups, lr)
        refuse_fused(tensors, asks_fused(self.settings, groups))
        fused = fused_option(self.kind, groups, {key: value for key, value in self.settings.items()
                                                  if (key, value) not in NOT_SAID})
        return _made(self.kind, groups, {**self.settings, **fused, "lr": lr})

    def asks_fused(self, config: Config) -> bool:
        own = config.optimizer.args if self.kind is None else self.settings
        return asks_fused(own, [group.options for group in self.groups])

    def _over(self, names: Sequence[str], tensors: Sequence[torch.Tensor], scale: float) -> ParamGroups:
        if not self.groups:
            return [{"params": list(tensors)}]
        assert len(names) == len(tensors), "groups are of parameters by name"
        of = dict(zip(names, tensors))
        rates = [{"lr": group.options["lr"] * scale} if "lr" in group.options else {} for group in self.groups]
        return [{**group.options, **rate, "params": [of[n] for n in group.names if n in of]}
                for group, rate in zip(self.groups, rates)]


def optimizer_spec(spec: Any, config: Config) -> OptimizerSpec:
    """Return the optimizer and groups that the file of ``spec.model`` gives.

    Groups of the optimizer count before `parameter_groups`. Errors: `UserError` for others, and what cannot be rebuilt.
    """
    named = {id(p): name for name, p in named_parameters(spec.model) if p.requires_grad}  # of a shared one the first
    kind, settings, groups, frozen = None, dict[str, Any](), list[Group](), dict[str, int]()
    if spec.optimizer is not None:
        made = called(spec, "optimizer", spec.model, config)
        kind = type(made)
        settings, groups = _read(made, named)
        frozen = _frozen(made.param_groups, spec.model)
    if spec.parameter_groups is not None and not any(group.options for group in groups):
        groups, frozen = _groups(called(spec, "parameter_groups", spec.model), spec.model, named,
                                 _defaults(class_of(config)) if kind is None else made.defaults)
        for group in groups:
            _check_values(group, config, kind, settings)
    return OptimizerSpec(_all(groups, named), kind, settings, frozen)


def _frozen(groups: Sequence[Mapping[str, Any]], model: torch.nn.Module, first: int = 0) -> dict[str, int]:
    """Return the group number of each frozen parameter by name, counted from ``first``."""
    names = {id(p): name for name, p in named_parameters(model) if not p.requires_grad}
    return {names[id(p)]: number for number, group in enumerate(groups, first) for p in group["params"]
            if id(p) in names}


def _all(groups: Sequence[Group], named: Mapping[int, str]) -> tuple[Group, ...]:
    """Return ``groups`` with the parameters that are in none as the last one; () where nothing differs."""
    taken = {name for group in groups for name in group.names}
    rest = tuple(name for name in named.values() if name not in taken)
    found = [*groups, Group(rest, {})] if rest else list(groups)
    return tuple(found) if any(group.options for group in found) else ()


def _groups(given: Any, model: torch.nn.Module, named: Mapping[int, str],
            allowed: Collection[str]) -> tuple[list[Group], dict[str, int]]:
    """Return the groups of `parameter_groups`, and the group of each frozen one; ``allowed``: known options."""
    if isinstance(given, (str, Mapping, torch.Tensor)) or not isinstance(given, Iterable):
        raise _wrong(f"parameter_groups gives {_what(given)}")
    found: list[Group] = []
    owner: dict[str, int] = {}
    frozen: dict[str, int] = {}
    for number, one in enumerate(given):
        if not isinstance(one, Mapping) or "params" not in one:
            raise _wrong(f"group {number} of parameter_groups is {_what(one)}")
        listed = _listed(one["params"], number)
        names = [name for p in listed if (name := _name(p, number, model, named))]
        frozen |= _frozen([{"params": listed}], model, number)
        twice = next((name for name in names if owner.setdefault(name, number) != number), None)
        if twice is not None:
            raise UserError(f"parameter {twice} is in groups {owner[twice]} and {number} of parameter_groups",
                            "each parameter in one group (a shared one is one parameter)",
                            "leave it out of one of them")
        inside = set(names)
        options = {str(key): _plain(value) for key, value in one.items() if key != "params"}
        for key in options:
            if key not in allowed:
                raise UserError(f"group {number} of parameter_groups has the option {key!r}", nearest(key, allowed),
                                "take an option of the run's optimizer")
        found.append(Group(tuple(name for name in named.values() if name in inside), options))
    return found, frozen


def _listed(params: Any, number: int) -> list[Any]:
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise _wrong(f"params of group {number} of parameter_groups is {_what(params)}")
    return [one[1] if isinstance(one, tuple) and len(one) == 2 else one for one in params]  # (name, parameter)


def _name(param: Any, number: int, model: torch.nn.Module, named: Mapping[int, str]) -> str:
    """Return the name of a parameter, "" for one that is not trained; `UserError` for anything else."""
    if id(param) in named:
        return named[id(param)]
    if not isinstance(param, torch.Tensor):
        raise _wrong(f"params of group {number} of parameter_groups holds {_what(param)}")
    if any(p is param for p in model.parameters()):
        return ""
    raise UserError(f"group {number} of parameter_groups has a tensor of shape {tuple(param.shape)} that is "
                    "not a parameter of the model", "parameters of the model that it is given",
                    "take them from model.named_parameters()")


def _wrong(got: str) -> UserError:
    return UserError(got, 'a list of groups as torch.optim takes them: {"params": [parameters], option: value}',
                     "correct parameter_groups in the model file")


def _what(thing: Any) -> str:
    return "None" if thing is None else f"{thing!r}"[:40] if isinstance(thing, str) else f"a {type(thing).__name__}"


def _check_values(group: Group, config: Config, kind: Any, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for values that the optimizer would refuse as its own arguments."""
    rate = group.options.get("lr", 0.0)
    try:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
            raise ValueError(f"lr is {rate!r}")
        stand_in = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}]
        make = kind or class_of(config)
        own = settings if kind is not None else {"lr": config.lr, **config.optimizer.args}
        _made(make, stand_in, {**own, **{key: group.options[key] for key in _taken(make, group.options)}})
    except (TypeError, ValueError, RuntimeError) as error:
        name = (kind or class_of(config)).__name__
        raise UserError(f"optimizer {name} refused the options {group.options} of parameter_groups: {error}",
                        "values that its arguments accept", "correct parameter_groups") from None


def _read(made: Any, named: Mapping[int, str]) -> tuple[dict[str, Any], list[Group]]:
    """Return settings and groups of the optimizer that `optimizer` gave; `UserError` if it cannot be made again."""
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"optimizer gives {_what(made)}", "a torch.optim.Optimizer over the model's parameters",
                        "return one from optimizer(model, config)")
    kind = type(made)
    unusable = next((UNUSABLE[c.__name__.lower()] for c in kind.__mro__
                     if c.__name__.lower() in UNUSABLE), None)
    if unusable:
        raise UserError(f"optimizer gives {kind.__name__}, which {unusable}", "another optimizer", "correct optimizer")
    known = {key: _plain(value) for key, value in made.defaults.items()}
    settings = {key: known[key] for key in _taken(kind, known)}
    if "lr" not in settings:
        raise _not_rebuilt(made, "it has no argument lr")
    groups, over = [], []
    for one in made.param_groups:
        names = {named[id(p)] for p in one["params"] if id(p) in named}
        own = {key: _plain(value) for key, value in one.items() if key not in NOT_OPTIONS}
        options = {key: value for key, value in own.items() if key not in known or value != known[key]}
        groups.append(Group(tuple(name for name in named.values() if name in names), options))
        over.append({**options, "params": list(one["params"])})
    missing = [name for name in named.values() if not any(name in group.names for group in groups)]
    if missing:
        raise UserError(f"the {kind.__name__} of optimizer lacks {len(missing)} of the model's parameters: "
                        f"{', '.join(missing[:3])}", "all that are trained",
                        "give it all of model.parameters(), or set requires_grad to false on frozen ones")
    _refuse_unlike(made, known, over, settings)
    return settings, groups


def _refuse_unlike(made: torch.optim.Optimizer, known: Mapping[str, Any], over: list[dict[str, Any]],
                   settings: Mapping[str, Any]) -> None:
    """Raise `UserError` unless an optimizer of the class with these settings is the one that was given."""
    try:
        again = _made(type(made), over, settings)
    except Exception as error:  # a class of the user's
        raise _not_rebuilt(made, " ".join(str(error).split())[:200]) from None
    if {key: _plain(value) for key, value in again.defaults.items()} != known:
        raise _not_rebuilt(made, "its defaults differ")
    if made.state and not again.state:
        raise _not_rebuilt(made, "it has made updates, whose state would be lost")
    usual = vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    hooked = [key for key in usual if key.endswith("_hooks") and getattr(made, key, None)]
    if hooked:
        raise _not_rebuilt(made, f"its hooks would be lost ({hooked[0].strip('_')})")
    ours, theirs = ({key: value for key, value in vars(one).items() if key not in usual} for one in (made, again))
    for key in {*ours, *theirs}:
        if not (key in ours and key in theirs and _same(ours[key], theirs[key])):
            raise _not_rebuilt(made, f"its attribute {key} differs, or cannot be compared")


def _not_rebuilt(made: torch.optim.Optimizer, why: str) -> UserError:
    return UserError(f"the {type(made).__name__} of optimizer cannot be rebuilt over the tensors of a rank: "
                     f"{why}", "an optimizer that its class can build from groups and defaults",
                     "return such an optimizer, or set optimizer.name and give parameter_groups(model)")


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str, tuple, list, dict)) and a == b)


def _made(kind: Any, groups: ParamGroups, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    return kind([dict(group) for group in groups], **settings)  # type: ignore[no-any-return]


def _defaults(kind: Any) -> dict[str, Any]:
    """Return the defaults of a class of torch.optim, which its groups may have options for."""
    return kind([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1).defaults  # type: ignore[no-any-return]


def _taken(kind: Any, keys: Iterable[str]) -> list[str]:
    """Return which of ``keys`` the constructor of a class takes."""
    taken = inspect.signature(kind).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return [key for key in keys if anything or key in taken]


def _plain(value: Any) -> Any:
    """Return a tensor or array of one element as the number, a list as a tuple."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = value.detach().item()
        return float(f"{number:.7g}") if value.dtype == torch.float32 else number  # 0.01, not 0.009999999776
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
