"""Reports of a run's steps: a line that moves on a terminal, plain lines elsewhere; rank 0 only.

`hvdtrain.reports.progress.line` draws, `hvdtrain.reports.progress.silence` announces long phases.
"""

from __future__ import annotations

import datetime
import math
import time
from collections import deque
from typing import Any

from hvdtrain.config import Config
from hvdtrain.core.protocols import Record, Report
from hvdtrain.core.terminal import say
from hvdtrain.reports.progress import silence
from hvdtrain.reports.progress.line import Line, Standing, line_terminal

OVER_S = 60.0
"""The time that is left is estimated from the speed of so many seconds, evaluations and saves with it."""


def make(config: Config, launched: bool) -> list[Report]:
    """Return the progress reports for config ``progress``.

    ``auto`` draws a line on this process' terminal; under a launcher (``launched``) and elsewhere it prints lines.
    """
    if config.progress == "off":
        return []
    watch = silence.current()
    if watch is not None:
        return [PlainProgress()] if watch.line is None else [ProgressBar(watch.line)]
    terminal = line_terminal(config.progress, launched)
    return [PlainProgress()] if terminal is None else [ProgressBar(Line(terminal))]


def _rate(samples_per_s: float) -> str:
    return "" if math.isnan(samples_per_s) else f"{samples_per_s:,.0f} samples/s"


def _loss(loss: float) -> str:
    return "" if math.isnan(loss) else f"loss {loss:.4f}"


def _used(percent: float | None) -> str:
    return "" if percent is None else f"{percent:.0f} % efficiency"


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def say_parts(*parts: str) -> None:
    """Print one line of those parts that are not empty."""
    say("  ".join(part for part in parts if part))


class Remaining:
    """Estimate of the time left, from the last `OVER_S` seconds, without the first step, which traces and compiles."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._marks: deque[tuple[float, int]] = deque()

    def after(self, step: int) -> float | None:
        """Return the seconds that are left after ``step``, which has just ended; None where that is not known yet."""
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] >= OVER_S / 60:
            self._marks.append((now, step))
        while len(self._marks) > 2 and now - self._marks[1][0] >= OVER_S:
            self._marks.popleft()
        begin, first = self._marks[0]
        if not self._total or step <= first:
            return None
        return (now - begin) / (step - first) * max(0, self._total - step)


class _Shown:
    """Base of both: shows records by a method for each event."""

    at_once = True
    every = ""

    def write(self, record: Record) -> None:
        watch = silence.current()
        if watch is not None:
            watch.shown()
            first = watch.first_step() if record.event == "step" else ""
            if first:
                say(first)
        method = getattr(self, f"_{record.event}", None)
        if method is not None:
            method(record, record.values)

    def close(self) -> None:
        """Hold nothing."""

    def _start(self, record: Record, values: dict[str, Any]) -> None:
        self._total, self._epochs = values["steps"], values["epochs"]
        self._remaining = Remaining(self._total)


class PlainProgress(_Shown):
    """A line at most every ``seconds`` and one per evaluation."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.every = f"{seconds} s"

    def _step(self, record: Record, v: dict[str, Any]) -> None:
        where = f"step {record.step}" + (f"/{self._total}" if self._total else "")
        left_s = self._remaining.after(record.step)
        eta = "" if left_s is None else f"eta {datetime.timedelta(seconds=round(left_s))}"
        say_parts(where, f"epoch {v['epoch'] + 1}/{self._epochs}", _loss(v["loss"]), f"lr {v['lr']:.3g}",
                  _rate(v["samples_per_s"]), _used(v["percent_of_solo"]), eta)

    def _eval(self, record: Record, v: dict[str, Any]) -> None:
        say_parts(f"epoch {v['epoch']}/{self._epochs}", f"step {record.step}", f"test {_metrics(v['metrics'])}",
                  _rate(v["samples_per_s"]))


class ProgressBar(_Shown):
    """Draws the line of progress on ``line``'s terminal; evaluations are printed above it."""

    every = "0.2 s"

    def __init__(self, line: Line) -> None:
        self._line = line

    def _step(self, record: Record, v: dict[str, Any]) -> None:
        self._line.show(Standing(record.step, self._total, v["epoch"], self._epochs, v["loss"], v["samples_per_s"],
                                 v["percent_of_solo"], self._remaining.after(record.step)))

    def _eval(self, record: Record, v: dict[str, Any]) -> None:
        say_parts(f"epoch {v['epoch']}/{self._epochs}", f"step {record.step}", f"test {_metrics(v['metrics'])}")

    def close(self) -> None:
        """Remove the line."""
        self._line.show(None)
