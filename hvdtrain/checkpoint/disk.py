"""What the checkpoints of a run will take of the disk, said before the first step."""

from __future__ import annotations

import os
from pathlib import Path

from hvdtrain.checkpoint.interval import FIRST_S, PART
from hvdtrain.config import Checkpoint

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


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
    room = "" if free is None else f"; {sized(free)} free"
    most = sized(most_bytes(one_bytes, settings.keep))
    return (f"checkpoints: {often(settings)}; about {sized(one_bytes)} each{who}, the newest {settings.keep} kept, so "
            f"at most {most}{room}")


def warning(settings: Checkpoint, one_bytes: int, free: int | None) -> str:
    """Return the warning about a disk that is too small, "" where it is not. Pure."""
    needed = most_bytes(one_bytes, settings.keep)
    if free is None or free >= needed:
        return ""
    return (f"checkpoints may not fit: {sized(needed)} for {settings.keep} and one more while it is written, "
            f"{sized(free)} free; free some space, set checkpoint.keep lower, or choose another --out")


def sized(n_bytes: int) -> str:
    """Return bytes in words.

    >>> sized(3 * 2**20 + 2**19), sized(12)
    ('3.5 MiB', '12 bytes')
    """
    for unit, name in UNITS:
        if n_bytes >= unit:
            return f"{n_bytes / unit:.1f} {name}"
    return f"{n_bytes} bytes"
