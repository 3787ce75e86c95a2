"""How many updates a run is going to make, the arguments of a schedule that follow, and what is set for a longer run.

Owns the table of such arguments, by the names that PyTorch, Keras and `hvdtrain.keras.one_cycle` give them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.config import Config, Schedule
from hvdtrain.data.cursor import Cursor
from hvdtrain.errors import UserError, count

_LENGTHS = {"onecyclelr": ("total_steps", "steps_per_epoch"), "cosineannealinglr": ("T_max",),
            "onecycle": ("total_steps",), "cosinedecay": ("decay_steps",), "polynomialdecay": ("decay_steps",)}
"""By a schedule's name the argument that is the run's length, and others that say it too."""

_ENDS = {**_LENGTHS, "polynomiallr": ("total_iters",), "linearlr": ("total_iters",)}
"""Schedules that end, or turn, after a number of steps or epochs: the arguments that may give it."""


def updates(config: Config, steps_per_epoch: int | None, at: Cursor = Cursor(), left: int | None = None) -> int:
    """Return the updates of a whole run from its start; 0 where nobody knows (a stream without ``max_steps``).

    ``at``: where the run is resumed, maybe with another length of an epoch than before; ``left``: the steps that are
    left of its epoch there (None: by their number).
    """
    whole = 0
    if steps_per_epoch:
        left = max(0, steps_per_epoch - at.epoch_step) if left is None else left
        epochs = config.epochs - at.epoch
        whole = at.step + (left + (epochs - 1) * steps_per_epoch if epochs > 0 else 0)
    known = min(filter(None, (whole, config.max_steps)), default=0)
    return max(at.step, known) if known else 0


def length(config: Config, steps_per_epoch: int | None, at: Cursor = Cursor(), left: int | None = None) -> int:
    """Return the length of a whole run in what its schedule counts, updates or epochs; 0 where nobody knows."""
    steps = updates(config, steps_per_epoch, at, left)
    if config.schedule.interval == "step":
        return steps
    if not steps_per_epoch:
        return 0
    to_come = at.epoch + -(-(steps - at.step + at.epoch_step) // steps_per_epoch)
    return max(at.epoch, min(config.epochs, to_come))


def filled(config: Config, steps_per_epoch: int | None, notes: list[str] | None = None, at: Cursor = Cursor(),
           left: int | None = None) -> Config:
    """Return ``config`` with the arguments of its schedule that it leaves out and that follow from the run.

    ``notes`` gets what is set for a longer run. ``at``, ``left``: see `updates`.
    Lengths are in what the schedule counts, steps or epochs. Errors: `UserError` where the length is needed and nobody
    knows it, and for a OneCycle that is shorter than the run, whose end has no rate.
    """
    schedule = config.schedule
    name, given = schedule.name.lower(), dict(schedule.args)
    names = _LENGTHS.get(name, ())
    steps, whole = updates(config, steps_per_epoch, at, left), length(config, steps_per_epoch, at, left)
    if notes is not None and steps:
        notes += too_long(config, steps)
    more: dict[str, Any] = {}
    if names and not any(given.get(each) for each in names):
        if not whole:
            raise UserError(f"schedule {schedule.name} needs the length of the run, which is not known",
                            "max_steps, or data that tells its length", f"set schedule.args.{names[0]}")
        taken = int(given.get("warmup_steps", 0)) if name == "cosinedecay" else 0  # Keras' own warm-up comes before
        more[names[0]] = max(1, whole - taken)
    if "onecycle" in name:
        _check_one_cycle(schedule.name, {**more, **given}, whole)
    elif notes is not None and (end := _end(schedule)) and end < whole:
        notes.append(f"schedule {schedule.name} ends after {end} {schedule.interval}s of a run of {whole}: from there "
                     "on the rate stays as it is, or climbs again")
    return replace(config, schedule=replace(schedule, args={**given, **more})) if more else config


def too_long(config: Config, steps: int) -> list[str]:
    """Return a sentence for each setting by which a run of ``steps`` updates never comes to what was meant."""
    found = []
    if config.schedule.warmup_steps > steps:
        found.append(f"the warm-up of {count(config.schedule.warmup_steps, 'step')} is longer than "
                     f"the run of {steps}, in which "
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
        raise UserError(f"schedule {name} of {count(total, 'step')} in a run of {length}", "a cycle as long as the run",
                        "leave schedule.args.total_steps out, or make it longer")


# --- over a resume -------------------------------------------------------------------------------------------------

def kept(schedule: Schedule, whole: int) -> dict[str, Any]:
    """Return what a checkpoint keeps of a filled schedule in a run of the length ``whole``."""
    return {"name": schedule.name, "args": dict(schedule.args), "interval": schedule.interval, "length": whole}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two schedules (`kept`) give other rates; their base rate aside."""
    off = ("none", "")
    names = [one["name"].lower() for one in (before, now)]
    if names[0] in off and names[1] in off:
        return False
    return names[0] != names[1] or any(before[key] != now[key] for key in ("args", "interval"))


def check_resumed(before: Mapping[str, Any], schedule: Schedule, now: Mapping[str, Any]) -> None:
    """Raise `UserError` for a schedule whose given length ended the run before, and not the longer one of now.

    ``schedule``: as the user gave it; ``before``, ``now``: see `kept`.
    """
    end, whole = _end(schedule), now["length"]
    if end and end < whole and (before["length"] <= end or changed(before, now)):
        name = next(name for name in _ENDS[schedule.name.lower()] if schedule.args.get(name))
        raise UserError(f"the resumed run has {whole} {schedule.interval}s, and schedule {schedule.name} ends after "
                        f"{end}", "a schedule as long as the run",
                        f"leave schedule.args.{name} out, or set it for the whole run")


def _end(schedule: Schedule) -> int:
    """Return the updates or epochs after which a schedule ends by its arguments; 0 where they do not tell."""
    args, names = schedule.args, _ENDS.get(schedule.name.lower(), ())
    end = next((args[name] for name in names if args.get(name)), 0) if names else 0
    if "steps_per_epoch" in names and not args.get("total_steps"):
        end = args.get("epochs", 0) * args.get("steps_per_epoch", 0)
    if schedule.name.lower() == "cosinedecay" and end:
        end += args.get("warmup_steps", 0)
    return end if isinstance(end, int) else 0
