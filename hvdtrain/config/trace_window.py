"""Which steps of a run a trace is taken of. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from hvdtrain.core.errors import UserError


class Window(NamedTuple):
    """From the end of step ``first`` (0: from the start) to the end of step ``last``: ``last - first`` steps."""

    first: int
    last: int


def window_of(text: str) -> Window | None:
    """Return the window that ``20:30`` spells: when 20 steps have ended until 30 have. None for "".

    Errors: `UserError` for anything else, also for a window without a step.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"trace.steps is {text!r}", "FIRST:LAST, two numbers of steps, the first below the last",
                        "for example trace.steps: 20:30, for the ten steps after the first twenty")
    return Window(int(match[1]), int(match[2]))
