"""Gives every second of a rank to one cause: what is not named goes to "other", and nothing is found by subtraction.

Stretches that end in waiting for other ranks are told with the name of what was waited in, so that all ranks' stretches
of that name show who came last (`hvdtrain.timeline.whom`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

CAUSES = ("start", "input", "compute", "wait", "wire", "update", "checkpoint", "evaluation", "other")
"""``wait``: for ranks that come later to an exchange; ``wire``: for the exchange itself, when all have come."""


class Blocked(NamedTuple):
    """This rank stood in the exchange ``name`` of ``step`` from ``begin_s`` to ``end_s`` (`time.perf_counter`)."""

    step: int
    name: str
    begin_s: float
    end_s: float


class Clock:
    """A stack of causes: seconds go to the one on top. One thread uses it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._stack = ["other"]
        self._since = now()

    def push(self, cause: str) -> None:
        """Give what comes to ``cause``, one of `CAUSES`, until `pop`."""
        self._lap()
        self._stack.append(cause)

    def pop(self) -> None:
        """Give what comes to the cause before."""
        self._lap()
        self._stack.pop()

    def add(self, cause: str, seconds: float) -> None:
        """Give seconds from before this clock began, such as those of the process' start."""
        self._seconds[cause] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far by cause."""
        self._lap()
        return dict(self._seconds)

    def _lap(self) -> None:
        now = self._now()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now
