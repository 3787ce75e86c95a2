"""Settings of an optimizer and schedule on resume: those that the user changed, else the checkpoint's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hvdtrain.backends.torch import schedules
from hvdtrain.backends.torch.optim import OptimizerSpec
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError, count

KERNELS = ("fused", "foreach", "capturable")
"""Entries of an optimizer's groups that say how an update is computed, not what it is."""

NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr", "differentiable", *KERNELS)
"""Entries of a group that are no setting of an update, or have a rule of their own (the rate)."""

OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Entries that schedules of torch.optim.lr_scheduler put into a group."""

CONSTANT = "constant"
"""What the settings of a compiled optimizer of Keras say of a rate without a schedule."""

SLOTS = (("max_exp_avg_sq", "amsgrad"), ("momentum_buffer", "momentum"), ("grad_avg", "centered"))
"""State that an optimizer of torch.optim has only with a setting, and makes only with the first update."""


class ResumedOptimizer(Protocol):
    """Members of `hvdtrain.backends.torch.optimizer.TorchOptimizer` that this file needs."""

    optimizer: Any
    schedule: Any
    adopted: Any
    config: Config
    optimizer_spec: OptimizerSpec
    settings: list[dict[str, Any]]
    changes: list[str]
    overruled: frozenset[str]
    ratios: list[float]
    interval: str
    updates: int
    base_lr: float

    def kind(self) -> str:
        """Return the optimizer's class."""


def settings_of(optimizer: Any, adopted: bool) -> list[dict[str, Any]]:
    """Return the settings of each group as its user gave them, JSON-able; before a schedule is laid over them.

    ``adopted``: it is a compiled optimizer of Keras, whose settings its own configuration tells.
    """
    if adopted:
        settings = optimizer.settings()
        rate = settings["learning_rate"]  # of a constant one the base rate tells
        words = f"{rate['class_name']} {rate['config']}" if optimizer.scheduled else CONSTANT
        found = [{**settings, "name": None, "learning_rate": words}]
    else:
        found = [dict(group) for group in optimizer.param_groups]
    return [{k: _listed(v) for k, v in group.items() if k not in NOT_SETTINGS and _is_plain(v)} for group in found]


def _listed(value: Any) -> Any:
    return [_listed(one) for one in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    plain = (bool, int, float, str)
    return value is None or isinstance(value, plain) or isinstance(value, (list, tuple)) and all(map(_is_plain, value))


def before_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings in `TorchOptimizer.scalars`; where an old checkpoint lacks them, those of its groups."""
    if "settings" in state:
        return list(state["settings"])
    moved = [("momentum", "betas") if "max_momentum" in group else () for group in state["groups"]]
    return [{k: _listed(v) for k, v in group.items() if k not in (*NOT_SETTINGS, *OF_SCHEDULES, *of)}
            for group, of in zip(state["groups"], moved)]


def check(opt: ResumedOptimizer, state: Mapping[str, Any]) -> None:
    """Raise `UserError` unless ``state``, of `TorchOptimizer.scalars`, is that of the same kind of optimizer."""
    own, then = opt.kind(), state["optimizer"]
    if then != own:
        raise UserError(f"the checkpoint was made with {then}", f"{own}, as configured now",
                        f"{_again(then)}, or start a new run")
    names = [list(group.names) for group in opt.optimizer_spec.groups]
    before = len(state["groups"]), state.get("group_names", [])
    if before[0] != len(opt.optimizer.param_groups):
        raise UserError(f"the checkpoint's optimizer has {_groups(before[0])}",
                        f"{_groups(len(opt.optimizer.param_groups))}, as in this run", _SAME_GROUPS)
    if before[1] and names and before[1] != names:
        odd = next(i for i, (a, b) in enumerate(zip(before[1], names)) if a != b)
        apart = sorted(set(before[1][odd]) ^ set(names[odd]))
        raise UserError(f"parameter group {odd} of the checkpoint's optimizer and of this run's differ in "
                        f"{', '.join(apart[:3])}", "the same parameters in each group", _SAME_GROUPS)


_SAME_GROUPS = "use the model file's parameter_groups and optimizer of that run, or start a new run"


def _groups(n: int) -> str:
    return count(n, "parameter group")


def _again(kind: str) -> str:
    """Return the setting that makes the optimizer that `TorchOptimizer.scalars` called ``kind``."""
    keras = kind.startswith("Keras' ")
    return "compile the model with it and leave optimizer.name auto" if keras else f"set optimizer.name: {kind}"


def load_groups(opt: ResumedOptimizer, state: Mapping[str, Any]) -> None:
    """Give the groups the checkpoint's values, except settings that differ from that run's; note which these are.

    The kernels stay this run's: the checkpoint's may be for another device or memory order. Momentum that the schedule
    changes is the schedule's.
    """
    opt.changes, overruled = [], set()
    for number, (group, saved, now, then) in enumerate(zip(opt.optimizer.param_groups, state["groups"], opt.settings,
                                                           before_of(state))):
        new = {k: v for k, v in now.items() if then.get(k, v) != v}
        words = [f"{k} {then[k]} -> {v}" for k, v in new.items()]
        opt.changes += [f"group {number}: {text}" for text in words] if len(opt.settings) > 1 else words
        if "max_momentum" in group and "momentum" in new:
            overruled |= {"optimizer.args.momentum"} if new.pop("momentum") is not None else set()
        if "max_momentum" in group and "betas" in new:
            overruled |= {"optimizer.args.betas"} if new["betas"][1:] == then["betas"][1:] else set()
            new["betas"] = [saved["betas"][0], *new["betas"][1:]]
        if opt.adopted is not None:
            saved, new = ({**saved, "lr": opt.base_lr} if "learning_rate" in new else saved), {}
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in {**saved, **new}.items()
                      if k not in KERNELS})
    args = {} if opt.schedule is None else opt.config.schedule.args
    by_itself = any(key in args for key in schedules.FIRST_RATES)
    base_lr = state.get("base_lr", opt.base_lr)
    same = opt.optimizer_spec.kind is not None and base_lr == opt.base_lr
    opt.overruled = frozenset(overruled | ({"lr"} if by_itself or same else set()))
    if opt.adopted is None and opt.optimizer_spec.kind is None:
        opt.changes = opt.changes if opt.optimizer_spec.groups else []  # the configuration tells
    elif not _of_schedule(opt, state) and not math.isclose(base_lr, opt.base_lr, rel_tol=1e-9):
        opt.changes.append(f"learning rate {base_lr:g} -> {opt.base_lr:g}")


def _of_schedule(opt: ResumedOptimizer, state: Mapping[str, Any]) -> bool:
    """Return whether the rate is that of a compiled Keras schedule, now or in the checkpoint."""
    rates = [one[0].get("learning_rate", CONSTANT) for one in (opt.settings, before_of(state))]
    return opt.adopted is not None and rates != [CONSTANT, CONSTANT]


def rates_before(opt: ResumedOptimizer, state: Mapping[str, Any], now: Sequence[float]) -> list[float]:
    """Return the configured rates of the checkpoint's groups; those of ``now`` where they tell nothing of the rate."""
    if _of_schedule(opt, state):
        return list(now)
    return list(state.get("group_rates") or [state.get("base_lr", opt.base_lr)] * len(now))


def complete_slots(optimizer: Any) -> None:
    """Make state that a changed setting needs (SGD makes its momentum by itself), and drop other."""
    for group in optimizer.param_groups:
        for slot, setting in SLOTS:
            for param in group["params"] if setting in group else ():
                state = optimizer.state.get(param)
                if not state:
                    continue
                if not group[setting]:
                    state.pop(slot, None)
                elif state.get(slot) is None and not isinstance(optimizer, torch.optim.SGD):
                    state[slot] = torch.zeros_like(param, memory_format=torch.preserve_format)


def rescale(opt: ResumedOptimizer, factors: Sequence[float]) -> None:
    """Multiply each group's rate, and the rate that a schedule starts from, by its factor."""
    for group, factor in zip(opt.optimizer.param_groups, factors):
        for key in {"lr", "initial_lr"} & set(group):
            group[key] *= factor
    for one in schedules.single(opt.schedule):
        one.base_lrs = [rate * factor for rate, factor in zip(one.base_lrs, factors)]


def reschedule(opt: ResumedOptimizer, rates: Sequence[float], epochs: int) -> Any:
    """Return the configured schedule after the updates or ``epochs`` so far, or None; ``rates``: as configured."""
    groups = opt.optimizer.param_groups
    for group, rate, settings in zip(groups, rates, opt.settings):
        cycled = "max_momentum" in group
        for key in OF_SCHEDULES:
            group.pop(key, None)
        group["lr"] = rate
        for key in ("momentum", "betas") if cycled else ():
            if key in settings:
                group[key] = tuple(settings[key]) if key == "betas" else settings[key]
    made = schedules.make_schedule(opt.config, opt.optimizer, opt.ratios)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no update is made between the steps
        for _ in range(0 if made is None else opt.updates if opt.interval == "step" else epochs):
            schedules.move(made)
    return made
