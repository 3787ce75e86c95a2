"""Length of a run in updates, the arguments of a schedule that follow from it, and settings made for a longer run.

Owns what is known of a schedule by the name that PyTorch, Keras or `hvdtrain.backends.keras.one_cycle` gives it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from hvdtrain.config import Config, ScheduleConfig
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.core.resolve import load_callable


@dataclass(frozen=True)
class ScheduleKind:
    """Facts of a schedule; those of a framework that are not in `KINDS` need none.

    ``torch``: the parameters behind the optimizer, in order. ``ends``: arguments that may give the steps or epochs
    after which it ends or turns. ``fills``: the first of them is the run's length where all are left out. ``covers``:
    it has no rate after its end. ``warms``: with a ``warmup_target`` its ``warmup_steps`` precede the first of
    ``ends``. ``repeats``: the argument that lets it begin again at its end.
    """

    torch: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    fills: bool = False
    covers: bool = False
    warms: bool = False
    repeats: str = ""


KINDS = {
    "StepLR": ScheduleKind(("step_size", "gamma")), "MultiStepLR": ScheduleKind(("milestones", "gamma")),
    "ExponentialLR": ScheduleKind(("gamma",)),
    "CosineAnnealingWarmRestarts": ScheduleKind(("T_0", "T_mult", "eta_min")),
    "ConstantLR": ScheduleKind(("factor", "total_iters")),
    "CosineAnnealingLR": ScheduleKind(("T_max", "eta_min"), ("T_max",), True),
    "OneCycleLR": ScheduleKind(("max_lr", "total_steps", "epochs", "steps_per_epoch"),
                               ("total_steps", "steps_per_epoch"),
                       True, covers=True),
    "LinearLR": ScheduleKind(("start_factor", "end_factor", "total_iters"), ("total_iters",)),
    "PolynomialLR": ScheduleKind(("total_iters", "power"), ("total_iters",)),
    "OneCycle": ScheduleKind((), ("total_steps",), True, covers=True),
    "CosineDecay": ScheduleKind((), ("decay_steps",), True, warms=True),
    "PolynomialDecay": ScheduleKind((), ("decay_steps",), True, repeats="cycle")}
"""Facts of schedules, by the names of their classes. A file with a schedule of one's own adds a line."""


def kind_of(name: str) -> ScheduleKind:
    """Return the facts of the schedule ``name``, in any case; of a ``module:callable`` by its class or a base of it."""
    names = [name]
    if ":" in name:
        made = load_callable(name, "schedule.name")  # whose file adds its facts
        names = [base.__name__ for base in made.__mro__] if isinstance(made, type) else [name.rpartition(":")[2]]
    facts = {known.lower(): kind for known, kind in KINDS.items()}
    return next((facts[each.lower()] for each in names if each.lower() in facts), ScheduleKind())


def members_of(name: str, args: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of the schedules that ``args.schedulers`` of the schedule ``name`` lists."""
    found = args.get("schedulers")
    spelled = "a list such as [{name: LinearLR, args: {total_iters: 5}}, {name: StepLR, args: {step_size: 9}}]"
    if not isinstance(found, (list, tuple)) or not found:
        raise UserError(f"schedule {name} without schedule.args.schedulers", spelled, "set schedule.args.schedulers")
    members = []
    for one in found:
        one = {"name": one} if isinstance(one, str) else one
        if not (isinstance(one, Mapping) and isinstance(one.get("name"), str) and {*one} <= {"name", "args"}
                and isinstance(one.get("args", {}), Mapping)):
            raise UserError(f"schedule.args.schedulers of {name} has the entry {one!r}", spelled, "correct it")
        members.append((one["name"], dict(one.get("args", {}))))
    return members


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
    kind, given = kind_of(schedule.name), dict(schedule.args)
    names = kind.ends if kind.fills else ()
    steps, whole = updates(config, steps_per_epoch, at, left), length(config, steps_per_epoch, at, left)
    if notes is not None and steps:
        notes += too_long(config, steps)
    more: dict[str, Any] = {}
    if names and not any(given.get(each) for each in names):
        if not whole:
            raise UserError(f"schedule {schedule.name} needs the length of the run, which is not known",
                            "max_steps, or data that tells its length", f"set schedule.args.{names[0]}")
        taken = _warm_up(given) if kind.warms else 0
        more[names[0]] = max(1, whole - taken)
    _check_members(schedule, whole)
    if kind.covers:
        end = _end(replace(schedule, args={**more, **given}))
        if 0 < end < whole:
            raise UserError(f"schedule {schedule.name} of {count(end, 'step')} in a run of {whole}",
                            "a cycle as long as the run",
                            f"leave schedule.args.{kind.ends[0]} out, or make it longer")
    elif notes is not None and (end := _end(schedule)) and end < whole:
        notes.append(f"schedule {schedule.name} ends after {end} {schedule.interval}s of a run of {whole}: after "
                     "that the rate stays constant or rises again")
    return replace(config, schedule=replace(schedule, args={**given, **more})) if more else config


def _check_members(schedule: ScheduleConfig, whole: int) -> None:
    """Raise `UserError` for a OneCycle within a sequence or chain that ends before its turn or the run does."""
    chained = schedule.name.lower() == "chainedscheduler"
    if not (chained or schedule.name.lower() == "sequentiallr"):
        return
    members, milestones = members_of(schedule.name, schedule.args), schedule.args.get("milestones", [])
    if chained or not (isinstance(milestones, (list, tuple)) and len(milestones) == len(members) - 1
                       and all(isinstance(step, int) for step in milestones)):
        milestones = []
    for i, (name, args) in enumerate(members):
        begin, stop = milestones[i - 1] if milestones and i else 0, min([whole, *milestones[i:i + 1]])
        end = _end(ScheduleConfig(name, args)) if kind_of(name).covers else 0
        if 0 < end < stop - begin:
            raise UserError(f"schedule {name} of {count(end, 'step')} in {schedule.name}, where it holds for "
                            f"{stop - begin}", "a cycle as long as its turn", "correct schedule.args.schedulers")


def too_long(config: Config, steps: int) -> list[str]:
    """Return a sentence for each setting by which a run of ``steps`` updates never comes to what was meant."""
    found = []
    if config.schedule.warmup_steps > steps:
        found.append(f"the warm-up of {count(config.schedule.warmup_steps, 'step')} is longer "
                     f"than the run of {steps}, so that the "
                     f"rate never reaches its full value: set schedule.warmup_steps to {max(1, steps // 20)} or so")
    first = config.ema ** steps
    if first > 0.5:
        wiser = max(0.5, 1 - 10 / steps)  # (1 - 10 / steps) ** steps < e ** -10
        found.append(f"ema {config.ema:g} over {steps} updates: {100 * first:.0f} % of the evaluated and "
                     f"saved average is still the initial weights: set ema to {wiser:.4g} or so")
    return found


# --- over a resume -------------------------------------------------------------------------------------------------

def kept(schedule: ScheduleConfig, whole: int, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a checkpoint keeps of a filled schedule in a run of the length ``whole``; ``own``: see `own_of`."""
    return {"name": schedule.name, "args": dict(schedule.args), "interval": schedule.interval, "length": whole,
            "own": own, "metric": schedule.followed * schedule.plateau}


def own_of(rate: object, steps: int, epochs: int) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of ``rate``, the schedule that an optimizer was made with; None: it never ends.

    ``steps``, ``epochs``: of the run. Also None for a class that is not in the table above.
    """
    for base in type(rate).__mro__:
        kind = kind_of(base.__name__)
        end = _end(ScheduleConfig(base.__name__, dict(vars(rate)))) if kind.fills else 0
        if end:  # scripts that leave out the last batch of each epoch count one step less for each
            return {"name": type(rate).__name__, "arg": kind.ends[0], "end": end, "steps": steps,
                    "covers": end + min(epochs, steps // 10) >= steps}
    return None


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two schedules (`kept`) give other rates; their base rate aside."""
    names = [one["name"].lower() for one in (before, now)]
    if not any(ScheduleConfig(name).on for name in names):
        return False
    return names[0] != names[1] or any(
        before.get(key, now[key]) != now[key] for key in ("args", "interval", "metric"))


def check_resumed(before: Mapping[str, Any], schedule: ScheduleConfig, now: Mapping[str, Any]) -> None:
    """Raise `UserError` for a schedule whose given length ended the run before, and not the longer one of now.

    ``schedule``: as the user gave it; ``before``, ``now``: see `kept`. A schedule that the optimizer was made with may
    end before the run if it did so in the run before.
    """
    end, whole = _end(schedule), now["length"]
    if end and end < whole and (before["length"] <= end or changed(before, now)):
        name = next(name for name in kind_of(schedule.name).ends if schedule.args.get(name))
        raise UserError(f"the resumed run has {whole} {schedule.interval}s, and schedule {schedule.name} ends after "
                        f"{end}", "a schedule as long as the run",
                        f"leave schedule.args.{name} out, or set it for the whole run")
    own = now["own"]
    if own is None or own["steps"] <= own["end"]:
        return
    old = {"end": own["end"], "steps": before["length"], "covers": before["length"] <= own["end"]}
    then = before.get("own", old)  # an old checkpoint tells the length alone
    if then and then["covers"] and own["end"] * then["steps"] < then["end"] * own["steps"]:
        raise UserError(f"the resumed run has {own['steps']} steps, and the optimizer's own schedule {own['name']} "
                        f"ends after {own['end']}", "a schedule as long as the run",
                        f"make the optimizer with {own['arg']} for all {own['steps']} steps")


def _end(schedule: ScheduleConfig) -> int:
    """Return the updates or epochs after which a schedule ends by its arguments; 0 where they do not tell."""
    args, kind = schedule.args, kind_of(schedule.name)
    names = kind.ends
    end = next((args[name] for name in names if args.get(name)), 0) if names else 0
    if "steps_per_epoch" in names and not args.get("total_steps"):
        end = args.get("epochs", 0) * args.get("steps_per_epoch", 0)
    if kind.warms and end:
        end += _warm_up(args)
    if kind.repeats and args.get(kind.repeats):
        return 0
    return math.ceil(float(end)) if isinstance(end, Real) and math.isfinite(end) else 0


def _warm_up(args: Mapping[str, Any]) -> int:
    """Return the steps of the warm-up before the decay of a schedule, which makes none without a target."""
    return 0 if args.get("warmup_target") is None else int(args.get("warmup_steps", 0))
