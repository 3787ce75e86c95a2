"""Keys that are texts: a wall limit and the reserve before it, the steps of a trace, the blocks to recompute. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.core.errors import UserError, nearest

_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]?\d):([0-5]?\d)", re.ASCII)
_SECONDS = re.compile(r"\d{1,9}(?:\.\d{1,6})?", re.ASCII)

LEAST_RESERVE_S, MOST_RESERVE_S = 3.0, 120.0
"""Bounds of what is kept free for the last save as long as none has been measured."""

ENDS_S, ENDS_PART, MOST_ENDS_S = 1.8, 0.55, 3.5
"""Seconds from the end of the last save to that of the process (summary, report, Python's end): least, fraction of the
start-up, and most, but for a twentieth of the limit. Measured by ``python -m benchmarks limits`` on 2 cores."""

LAUNCHER_ENDS_S = 2.3
"""What several ranks need beside: Open MPI waits a second in MPI_Finalize, and its mpirun another one after a status
that is not 0."""


def ends_s(start_s: float, limit_s: float, ranks: int = 1) -> float:
    """Return the seconds to keep free for the end of a job of so many ``ranks``, whose start took ``start_s``."""
    own_s = max(ENDS_S, min(ENDS_PART * start_s, max(MOST_ENDS_S, limit_s / 20.0)))
    return own_s + LAUNCHER_ENDS_S * (ranks > 1)


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


def reserve_s(limit_s: float, longest_save_s: float, rest_s: float) -> float:
    """Return how long before the end the ranks must hear that they are to save and end.

    The longest save so far and a margin, and ``rest_s`` for steps up to the agreement and the end of the process. The
    margin is two saves, but no more than a twentieth of the limit where half a save is less. Before any save was
    measured, a twentieth of the limit, from `LEAST_RESERVE_S` to `MOST_RESERVE_S`. At most half of the limit.
    """
    margin_s = min(2.0 * longest_save_s, max(0.5 * longest_save_s, limit_s / 20.0))
    save_s = longest_save_s + margin_s if longest_save_s else \
        min(MOST_RESERVE_S, max(LEAST_RESERVE_S, limit_s / 20.0))
    return min(save_s + rest_s, limit_s / 2.0)


class StepWindow(NamedTuple):
    """From the end of step ``first`` (0: from the start) to the end of step ``last``: ``last - first`` steps."""

    first: int
    last: int


def window_of(text: str) -> StepWindow | None:
    """Return the window of ``20:30``, from the end of step 20 to that of 30; None for "". Errors: `UserError`."""
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"trace.steps is {text!r}", "FIRST:LAST, two numbers of steps, the first below the last",
                        "for example trace.steps: 20:30, for the ten steps after the first twenty")
    return StepWindow(int(match[1]), int(match[2]))


WORDS = ("off", "auto")


def wanted(text: str | Sequence[str], names: Sequence[str]) -> list[str]:
    """Return which of the blocks ``names`` the key asks for, in their order; none for off and for auto.

    ``text``: off, auto, every:K (the K-th, 2K-th, ... block; with K = 1 all), names with commas between, or a list of
    names. Errors: `UserError` for blocks that the model does not have, or no blocks at all.
    """
    if text in WORDS:
        return []
    given = [part.strip() for part in text.split(",")] if isinstance(text, str) else list(text)
    every = re.fullmatch(r"every:(\d+)", given[0]) if len(given) == 1 else None
    if not names:
        raise UserError(f"remat is {text!r} and the model has no named blocks",
                        "a Sequential model, or blocks(model) -> [(name, block)] in the model file",
                        "define blocks, or set remat: off")
    if every:
        step = int(every[1])
        if step < 1:
            raise UserError(f"remat is {text!r}", "every:K with K of 1 or more", "set remat: every:1 for all blocks")
        return list(names[step - 1::step])
    for name in given:
        if name not in names:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise UserError(f"remat names {name!r}, which is none of the model's blocks ({shown})",
                            f"{nearest(name, [*names, *WORDS, 'every:2'])}", "correct remat")
    return [name for name in names if name in given]


def check_text(text: str | Sequence[str]) -> None:
    """Raise `UserError` for what no model's blocks can be meant by."""
    empty = not text or str(text).lower() == "true" or not isinstance(text, str) and not all(text)
    if empty or isinstance(text, str) and (text.startswith("every") and not re.fullmatch(r"every:[1-9]\d*", text)):
        raise UserError(f"remat is {text!r}", "off, auto, every:K with K of 1 or more, or names of blocks",
                        "for example remat: every:2")
