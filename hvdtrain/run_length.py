"""How many updates a run is going to make, the arguments of a schedule that follow, and what is set for a longer run.

Owns the table of such arguments, by the names that PyTorch, Keras and `hvdtrain.keras.one_cycle` give them. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvdtrain.config import Config
from hvdtrain.errors import UserError

_LENGTHS = {"onecyclelr": ("total_steps", "steps_per_epoch"), "cosineannealinglr": ("T_max",),
            "onecycle": ("total_steps",), "cosinedecay": ("decay_steps",), "polynomialdecay": ("decay_steps",)}
"""By a schedule's name the argument that is the run's length, and others that say it too."""


def updates(config: Config, steps_per_epoch: int | None) -> int:
    """Return the updates of a whole run from its start; 0 where nobody knows (a stream without ``max_steps``)."""
    whole = config.epochs * (steps_per_epoch or 0)
    return min(filter(None, (whole, config.max_steps)), default=0)


def filled(config: Config, steps_per_epoch: int | None, notes: list[str] | None = None) -> Config:
    """Return ``config`` with the arguments of its schedule that it leaves out and that follow from the run.

    ``notes`` gets what is set for a longer run.
    Lengths are in what the schedule counts, steps or epochs. Errors: `UserError` where the length is needed and nobody
    knows it, and for a OneCycle that is shorter than the run, whose end has no rate.
    """
    schedule = config.schedule
    name, given = schedule.name.lower(), dict(schedule.args)
    names = _LENGTHS.get(name, ())
    steps = updates(config, steps_per_epoch)
    if notes is not None and steps:
        notes += too_long(config, steps)
    length = steps if schedule.interval == "step" else -(-steps // steps_per_epoch) if steps_per_epoch else 0
    more: dict[str, Any] = {}
    if names and not any(given.get(each) for each in names):
        if not length:
            raise UserError(f"schedule {schedule.name} needs the length of the run, which is not known",
                            "max_steps, or data that tells its length", f"set schedule.args.{names[0]}")
        taken = int(given.get("warmup_steps", 0)) if name == "cosinedecay" else 0  # Keras' own warm-up comes before
        more[names[0]] = max(1, length - taken)
    if "onecycle" in name:
        _check_one_cycle(schedule.name, {**more, **given}, length)
    return replace(config, schedule=replace(schedule, args={**given, **more})) if more else config


def too_long(config: Config, steps: int) -> list[str]:
    """Return a sentence for each setting by which a run of ``steps`` updates never comes to what was meant."""
    found = []
    if config.schedule.warmup_steps > steps:
        found.append(f"the warm-up of {config.schedule.warmup_steps} steps is longer than the run of {steps}, in which "
                     f"the rate stays below its own: set schedule.warmup_steps to {max(1, steps // 20)} or so")
    first = config.ema ** steps
    if first > 0.5:
        wiser = max(0.5, 1 - 10 / steps)  # (1 - 10 / steps) ** steps < e ** -10
        found.append(f"ema {config.ema:g} over {steps} updates: {100 * first:.0f} % of the average that is evaluated "
                     f"and written at the end is the first weights: set ema to {wiser:.4g} or so")
    return found


def _check_one_cycle(name: str, args: dict[str, Any], length: int) -> None:
    total = args.get("total_steps") or args.get("epochs", 0) * args.get("steps_per_epoch", 0)
    if isinstance(total, int) and 0 < total < length:
        raise UserError(f"schedule {name} of {total} steps in a run of {length}", "a cycle as long as the run",
                        "leave schedule.args.total_steps out, or make it longer")
