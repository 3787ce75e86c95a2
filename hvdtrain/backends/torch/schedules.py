"""Schedules of the learning rate for PyTorch's optimizers: made by name, moved, their states; and the call of a step.

When a schedule moves, and what a resumed run takes over, is left to `hvdtrain.backends.torch.optimizer` and `resuming`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from hvdtrain.backends.pairs import metric_of
from hvdtrain.config import Config
from hvdtrain.config.run_length import members_of
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import load_callable

FIRST_RATES = ("max_lr", "base_lr")
"""Arguments of schedules (OneCycleLR, CyclicLR) that say a rate themselves, one for all groups or one for each."""
SEQUENCES = ("sequentiallr", "chainedscheduler")
"""Schedules that are made of others, which ``args.schedulers`` names."""


def make_schedule(config: Config, optimizer: torch.optim.Optimizer, ratios: Sequence[float]) -> Any:
    """Return a scheduler by name, or None; ``ratios`` of groups to the base rate multiply those in `FIRST_RATES`."""
    named = config.schedule
    if not named.on:
        return None
    args = dict(named.args)
    if named.plateau:
        args.setdefault("mode", metric_of(named.followed).better)
    return _scheduler(named.name, args, optimizer, ratios)


def _scheduler(name: str, given: dict[str, Any], optimizer: torch.optim.Optimizer, ratios: Sequence[float],
               within: str = "") -> Any:
    """Return a scheduler by name; ``within``: the name of the one that it is part of."""
    space = torch.optim.lr_scheduler
    left_out = (space.LRScheduler, *((space.ReduceLROnPlateau,) if within else ()))
    classes = {n.lower(): c for n, c in vars(space).items()
               if isinstance(c, type) and issubclass(c, space.LRScheduler) and not n.startswith("_")
               and c not in left_out}
    if ":" not in name and name.lower() not in classes:
        raise UserError(f"schedule {name!r}{within and f' of {within}'} is not one of torch.optim.lr_scheduler's",
                        nearest(name, [c.__name__ for c in classes.values()]) + ", or module:callable",
                        "correct schedule.args.schedulers" if within else "correct schedule.name")
    make = load_callable(name, "schedule.name") if ":" in name else classes[name.lower()]
    args = dict(given)
    if name.lower() == "onecyclelr":
        args.setdefault("max_lr", [group["lr"] for group in optimizer.param_groups])
    if any(ratio != 1.0 for ratio in ratios):
        args |= {key: [args[key] * ratio for ratio in ratios] for key in FIRST_RATES
                 if isinstance(args.get(key), (int, float))}
    if name.lower() in SEQUENCES:
        args["schedulers"] = [_scheduler(one, more, optimizer, ratios, name) for one, more in members_of(name, args)]
    if isinstance(make, type) and issubclass(make, space.ReduceLROnPlateau) and (within or ":" in name):
        raise UserError(f"schedule {name}{within and f' of {within}'} follows evaluations", "a schedule of steps, or "
                        "the plain name ReduceLROnPlateau", "correct schedule.name or schedule.args.schedulers")
    try:
        return make(**args) if name.lower() == "chainedscheduler" else make(optimizer, **args)
    except (TypeError, ValueError) as error:
        raise UserError(f"schedule {name} refused args {given}: {error}", "keyword arguments it accepts",
                        "correct schedule.args") from None


def single(schedule: Any) -> list[Any]:
    """Return the schedules with base rates that a schedule is made of, or itself."""
    if hasattr(schedule, "_schedulers"):
        return [one for each in schedule._schedulers for one in single(each)]
    return [schedule] if hasattr(schedule, "base_lrs") else []


def merged(own: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule's state from a checkpoint, with its ``own`` where that has none; also of those within it."""
    found = {**own, **saved}
    if "best" in own and "best" not in saved:  # nothing had been evaluated: infinite, which JSON lacks
        found["best"] = own["mode_worse"]
    if "_schedulers" in own:
        inner = saved.get("_schedulers", [])
        found["_schedulers"] = [merged(mine, theirs) for mine, theirs in zip(own["_schedulers"], inner)] \
            if len(inner) == len(own["_schedulers"]) else own["_schedulers"]
    return found


def is_plateau(schedule: Any) -> bool:
    """Return whether a schedule follows evaluations, not steps."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)


def move(schedule: Any) -> None:
    """Advance a schedule by one step, not one of evaluations; a OneCycleLR keeps its last rate beyond its end."""
    if is_plateau(schedule):
        return
    total = getattr(schedule, "total_steps", None)
    if not total or schedule.last_epoch < total - 1:
        schedule.step()


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a schedule's state that are plain numbers, strings or lists of them, or of schedules."""
    def ok(v: Any) -> bool:
        if isinstance(v, (list, tuple)):
            return all(ok(x) for x in v)
        return v is None or isinstance(v, (bool, int, str)) or (isinstance(v, float) and math.isfinite(v))

    inner = {k: [plain(one) for one in v] for k, v in value.items() if k == "_schedulers"}
    return {k: v for k, v in value.items() if ok(v)} | inner


_PROFILED = torch.optim.Optimizer.profile_hook_step(print).__code__
"""Of the range that PyTorch opens around each ``step`` for profilers, with the calls of hooks."""


def update(optimizer: Any) -> None:
    """Call ``optimizer.step()``, without the profiler's range around it where no profiler records and no hook waits.

    PyTorch opens that range in any case, which takes longer than a fused update of a small model.
    """
    step: Any = getattr(type(optimizer), "step", None)  # an instance has its own under a scheduler
    if getattr(step, "__code__", None) is _PROFILED and "step" not in vars(optimizer) and not (
            torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
            or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
            or torch.autograd._profiler_enabled()):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()
