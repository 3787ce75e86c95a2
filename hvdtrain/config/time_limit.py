"""A known end of the time that a job has: its text, and how long before it a run must begin to save. Pure."""

from __future__ import annotations

import re

from hvdtrain.core.errors import UserError

_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]?\d):([0-5]?\d)", re.ASCII)
_SECONDS = re.compile(r"\d{1,9}(?:\.\d{1,6})?", re.ASCII)

LEAST_RESERVE_S, MOST_RESERVE_S = 5.0, 120.0
"""Bounds of what is kept free for the last save as long as none has been measured."""


def seconds_of(text: str) -> float:
    """Return the seconds in a limit such as "3600", "04:00:00" or Slurm's "1-12:00:00"; 0 for "", no limit."""
    text = text.strip()
    if not text:
        return 0.0
    if _SECONDS.fullmatch(text):
        return float(text)
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise UserError(f"time_limit is {text!r}", "seconds, or hours, minutes and seconds as in 04:00:00",
                        "correct time_limit")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def reserve_s(limit_s: float, longest_save_s: float, longest_step_s: float) -> float:
    """Return how long before the end the last save must begin: thrice the longest so far, two steps, and a bit.

    Before any was measured, a twentieth of the limit, from `LEAST_RESERVE_S` to `MOST_RESERVE_S`, at most half of it.
    """
    save_s = 3.0 * longest_save_s + 2.0 if longest_save_s else \
        min(MOST_RESERVE_S, max(LEAST_RESERVE_S, limit_s / 20.0))
    return min(save_s + 2.0 * longest_step_s, limit_s / 2.0)
