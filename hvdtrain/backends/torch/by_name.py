"""Optimizers of torch.optim and schedules of torch.optim.lr_scheduler by the names that a configuration gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.config import Config
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import load_callable

UNUSABLE = {"lbfgs": "needs a closure that is evaluated several times a step",
            "sparseadam": "takes sparse gradients, which are not exchanged here"}
"""Those of torch.optim, in lower case, that no step here can use, and why."""

FIRST_RATES = ("max_lr", "base_lr")
"""Arguments of schedules (OneCycleLR, CyclicLR) that say a rate themselves, one for all groups or one for each."""

ParamGroups = Sequence[dict[str, Any]]
"""What torch.optim takes: {"params": [tensor], option: value} for each group."""


def class_of(config: Config) -> Any:
    """Return the class in torch.optim that ``optimizer.name`` names, any case; auto is Adam. `UserError` for none."""
    classes = {n.lower(): c for n, c in vars(torch.optim).items()
               if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer}
    name = "adam" if config.optimizer.name == "auto" else config.optimizer.name.lower()
    if name in UNUSABLE or name not in classes:
        why = UNUSABLE.get(name, "is not in torch.optim")
        raise UserError(
            f"optimizer {config.optimizer.name!r} {why}",
            nearest(name, [c.__name__ for k, c in classes.items() if k not in UNUSABLE]),
            "correct optimizer.name",
        )
    return classes[name]


def optimizer(config: Config, groups: ParamGroups, lr: float) -> torch.optim.Optimizer:
    """Return the configured optimizer over ``groups`` with the base rate ``lr``; a group may be empty."""
    make = class_of(config)
    own = config.optimizer.args
    try:
        refuse_fused(_tensors(groups), asks_fused(own, groups))
        return make(list(groups), lr=lr, **fused(make, groups, own), **own)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {make.__name__} refused args {own}: {error}",
                        "keyword arguments it knows", "correct optimizer.args") from None


def fused(make: Any, groups: ParamGroups, own: dict[str, Any]) -> dict[str, bool]:
    """``fused=True`` for SGD on a CPU, unless the user asks for another way: one pass over memory instead of three.

    PyTorch takes it on its own nowhere. Same arithmetic; an update may differ from the default's by one rounding.
    Not for parameters in another memory order (channels_last): the kernel walks parameter, gradient and momentum as
    they lie in memory, and gradients lie row by row in their bucket. ``own``: the arguments that the user gave.
    """
    usual = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and p.is_contiguous()
                for p in _tensors(groups))
    asked = {"fused", "foreach", "differentiable"} & set(own).union(*groups)
    return {"fused": True} if make is torch.optim.SGD and usual and not asked else {}


def asks_fused(own: dict[str, Any], groups: ParamGroups) -> bool:
    """Return whether the user's arguments, or the options of a group, say ``fused=True``."""
    return any(options.get("fused") for options in (own, *groups))


def refuse_fused(params: Sequence[torch.Tensor], asked: bool) -> None:
    """Raise `UserError` where a ``fused=True`` that was asked for would mix up elements; see `fused`."""
    if asked and not all(p.is_contiguous() for p in params):
        raise UserError("optimizer.args.fused with parameters that are not contiguous (channels_last)",
                        "parameters whose gradients lie in memory as they do", "leave optimizer.args.fused out")


def _tensors(groups: ParamGroups) -> list[torch.Tensor]:
    return [p for group in groups for p in group["params"]]


def schedule(config: Config, optimizer: torch.optim.Optimizer, ratios: Sequence[float]) -> Any:
    """Return a scheduler of torch.optim.lr_scheduler by name, or None.

    ``ratios``: each group's rate divided by the base rate, which the rates in `FIRST_RATES` are multiplied by. The
    largest rate of a OneCycleLR that names none is the group's.
    """
    named = config.schedule
    if not named.on:
        return None
    space = torch.optim.lr_scheduler
    classes = {n.lower(): c for n, c in vars(space).items()
               if isinstance(c, type) and issubclass(c, space.LRScheduler) and not n.startswith("_")
               and c not in (space.LRScheduler, space.ReduceLROnPlateau, space.ChainedScheduler, space.SequentialLR)}
    if ":" not in named.name and named.name.lower() not in classes:
        raise UserError(f"schedule {named.name!r} is not one of torch.optim.lr_scheduler's",
                        nearest(named.name, [c.__name__ for c in classes.values()]) + ", or module:callable",
                        "correct schedule.name")
    make = load_callable(named.name, "schedule.name") if ":" in named.name else classes[named.name.lower()]
    args = dict(named.args)
    if named.name.lower() == "onecyclelr":
        args.setdefault("max_lr", [group["lr"] for group in optimizer.param_groups])
    if any(ratio != 1.0 for ratio in ratios):
        args |= {key: [args[key] * ratio for ratio in ratios] for key in FIRST_RATES
                 if isinstance(args.get(key), (int, float))}
    try:
        return make(optimizer, **args)
    except (TypeError, ValueError) as error:
        raise UserError(f"schedule {named.name} refused args {named.args}: {error}", "keyword arguments it knows",
                        "correct schedule.args") from None
