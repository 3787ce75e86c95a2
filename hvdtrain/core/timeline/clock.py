"""Gives every second of a rank to one cause: what is not named goes to "other", and nothing is found by subtraction."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

CAUSES = ("start", "input", "compute", "idle", "channel", "wait", "wire", "update", "checkpoint", "evaluation", "other")
"""``idle``: for another stage of a pipeline; ``channel``: for what stages send each other to be copied and to arrive.
``wait``: for ranks that come later to an exchange; ``wire``: for the exchange itself, when all have come."""


class Clock:
    """A stack of causes: seconds go to the one on top. One thread uses it.

    While a rank stands in an exchange its seconds go to "wait": which of them are "wire" is known when the ranks have
    compared when each came (`hvdtrain.core.timeline.whom`).
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._stack = ["other"]
        self._since = now()

    def base(self, cause: str) -> None:
        """Give what comes to ``cause`` wherever nothing is on the stack."""
        self._lap()
        self._stack[0] = cause

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

    def carve(self, cause: str, seconds: float) -> None:
        """Give ``seconds`` that somebody else has measured to ``cause``, in place of the cause on top just now.

        A graph stamps how long it has waited within a call that is one piece of computing for this clock.
        """
        self._lap()
        own = self._stack[-1]
        seconds = min(max(0.0, seconds), self._seconds[own])
        self._seconds[own] -= seconds
        self._seconds[cause] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far by cause."""
        self._lap()
        return dict(self._seconds)

    def _lap(self) -> None:
        now = self._now()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now


class StepTotals:
    """Sums over this rank's steps: seconds by phase, steps, samples. `hvdtrain.engine.phases` adds to them.

    "wait": for gradients and agreements, and steps that are repeated. Finer causes are `Clock`'s.
    """

    NAMES = ("data", "compute", "wait", "update")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(self.NAMES, 0.0)
        self.steps = 0
        self.samples = 0
        self.own_samples = 0
        self.own_micros = 0
        self.step_s = 0.0
        self.first_s = 0.0
        self.first_samples = 0

    def add(self, name: str, seconds: float) -> None:
        """Add to one phase."""
        self.seconds[name] += max(0.0, seconds)

    def lose(self, seconds: float) -> None:
        """Count a discarded step's time as waiting, so that speed estimates ignore it."""
        self.add("wait", seconds)
        self.step_s += seconds

    def step(self, seconds: float, samples: int, own: int = 0, micros: int = 0) -> None:
        """Count one step of all ranks' ``samples``, of which this rank had ``own`` in ``micros`` micro-batches."""
        if not self.steps:
            self.first_s, self.first_samples = seconds, samples
        self.steps += 1
        self.samples += samples
        self.own_samples += own
        self.own_micros += micros
        self.step_s += seconds

    def samples_per_s(self) -> float:
        """Global samples per second of step time and data time, without the first step (warm-up, tracing)."""
        seconds = self.step_s - self.first_s + self.seconds["data"]
        return (self.samples - self.first_samples) / seconds if self.steps > 1 and seconds > 0 else math.nan
