"""What the checkpoints of a run will take of the disk, said before the first step."""

from __future__ import annotations

import math
import os
from pathlib import Path

from hvdtrain.config import Checkpoint
from hvdtrain.core.units import format_bytes


def often(settings: Checkpoint) -> str:
    """Return in words when a run is saved, "" for never. Pure.

    >>> often(Checkpoint(every_steps=100, at_end=False))
    'every 100 steps'
    """
    words = []
    if settings.every_steps:
        words.append("every step" if settings.every_steps == 1 else f"every {settings.every_steps} steps")
    if settings.every_s:
        words.append(f"every {settings.every_s:g} s")
    if not words and settings.every == "auto":
        words.append(f"after {FIRST_S:g} s, then as often as costs less than {100 * PART:g} % of the time")
    return ", ".join(words + ["at the end"] * settings.at_end)


def most_bytes(one_bytes: int, keep: int) -> int:
    """Return what checkpoints take at most: those that are kept, and the next one while it is written. Pure."""
    return one_bytes * (keep + 1)


def free_bytes(out: Path) -> int | None:
    """Return what is free where a run is saved; None where that cannot be told."""
    try:
        status = os.statvfs(out)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def line(settings: Checkpoint, one_bytes: int, free: int | None) -> str:
    """Return the line about checkpoints at a run's start. Pure."""
    who = ", each rank its part" if settings.layout == "sharded" else ""
    room = "" if free is None else f"; {format_bytes(free)} free"
    most = format_bytes(most_bytes(one_bytes, settings.keep))
    return (f"checkpoints: {often(settings)}; about {format_bytes(one_bytes)} each{who}, the newest {settings.keep} "
            f"kept, so at most {most}{room}")


def warning(settings: Checkpoint, one_bytes: int, free: int | None) -> str:
    """Return the warning about a disk that is too small, "" where it is not. Pure."""
    needed = most_bytes(one_bytes, settings.keep)
    if free is None or free >= needed:
        return ""
    return (f"checkpoints may not fit: {format_bytes(needed)} for {settings.keep} and one more while it is written, "
            f"{format_bytes(free)} free; free some space, set checkpoint.keep lower, or choose another --out")


FIRST_S = 60.0
"""When the first save of a run is made whose cost nobody knows yet; runs of seconds save at their end only."""

PART = 0.03
"""Part of the time that saves may cost."""

LEAST_S = 60.0
"""Shortest interval where no time between failures is given: more often would save too little."""

DISTANCE = 1.5
"""A save begins this many times as long after the last one as that took, so that it need not wait for it."""


def interval_s(cost_s: float, took_s: float, mtbf_s: float = 0.0) -> float:
    """Return the seconds from the begin of a save to the next one.

    ``cost_s``: what a save costs the run, its training blocked and its threads' processor time. ``took_s``: how long it
    took to be on the disk. ``mtbf_s``: mean time between failures, 0 if unknown; with it the interval that loses least,
    sqrt(2 * cost * MTBF) (Young 1974, Daly 2006). Never so short that saves cost more than `PART` of the time.
    """
    wanted_s = math.sqrt(2 * cost_s * mtbf_s) if mtbf_s else LEAST_S
    return max(wanted_s, cost_s / PART, DISTANCE * took_s)
