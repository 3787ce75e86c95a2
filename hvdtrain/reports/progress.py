"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere; rank 0 only."""

from __future__ import annotations

import datetime
import math
import time
from typing import IO, Any, cast

from hvdtrain.protocols import Record, Report
from hvdtrain.run import Stdout, say


def make(config: Any, launched: bool) -> list[Report]:
    """The progress reports for config ``progress``.

    ``auto`` draws a bar on a terminal where there is one process; ranks under a launcher print lines, because mpirun
    gives them pseudo-terminals even where its own output goes to a file.
    """
    if config.progress == "off":
        return []
    if config.progress == "rich" or (config.progress == "auto" and Stdout().isatty() and not launched):
        return [Bar()]
    return [Lines()]


def _rate(samples_per_s: float) -> str:
    return "" if math.isnan(samples_per_s) else f"{samples_per_s:,.0f} samples/s"


def _used(percent: float | None) -> str:
    """What part of the ranks' solo speeds the run reaches, where there are several."""
    return "" if percent is None else f"{percent:.0f} % of solo"


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def say_parts(*parts: str) -> None:
    """One line of those parts that are not empty."""
    say("  ".join(part for part in parts if part))


class _Shown:
    """What both ways of showing progress share: they take records by their event."""

    at_once = True
    every = ""

    def write(self, record: Record) -> None:
        """Show it, where there is a way to."""
        method = getattr(self, f"_{record.event}", None)
        if method is not None:
            method(record, record.values)

    def close(self) -> None:
        """Hold nothing."""

    def _start(self, record: Record, values: dict[str, Any]) -> None:
        """Remember where and when this process began."""
        self._begin, self._from = time.monotonic(), record.step
        self._total, self._epochs = values["steps"], values["epochs"]


class Lines(_Shown):
    """A line at most every ``seconds`` and one per evaluation."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.every = f"{seconds} s"

    def _step(self, record: Record, v: dict[str, Any]) -> None:
        """Where the run is and when it should end."""
        where = f"step {record.step}" + (f"/{self._total}" if self._total else "")
        say_parts(where, f"epoch {v['epoch'] + 1}/{self._epochs}", f"loss {v['loss']:.4f}", f"lr {v['lr']:.3g}",
                  _rate(v["samples_per_s"]), _used(v["percent_of_solo"]), self._eta(record.step))

    def _eta(self, step: int) -> str:
        done = step - self._from
        if not self._total or done < 2:
            return ""
        left_s = (time.monotonic() - self._begin) / done * max(0, self._total - step)
        return f"eta {datetime.timedelta(seconds=round(left_s))}"

    def _eval(self, record: Record, v: dict[str, Any]) -> None:
        """Metrics of the evaluation data."""
        say_parts(f"epoch {v['epoch']}/{self._epochs}", f"step {record.step}", f"test {_metrics(v['metrics'])}",
                  _rate(v["samples_per_s"]))


class Bar(_Shown):
    """A rich progress bar; evaluations are printed above it."""

    every = "0.1 s"

    def __init__(self) -> None:
        self._bar: Any = None

    def _start(self, record: Record, values: dict[str, Any]) -> None:
        """Draw."""
        from rich import progress
        from rich.console import Console

        super()._start(record, values)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[info]}"), progress.TimeRemainingColumn(), transient=True,
            console=Console(file=cast(IO[str], Stdout())))
        self._task = self._bar.add_task("train", total=self._total, completed=record.step, info="")
        self._bar.start()

    def _step(self, record: Record, v: dict[str, Any]) -> None:
        """Move."""
        info = f"loss {v['loss']:.4f}  {_rate(v['samples_per_s'])}  {_used(v['percent_of_solo'])}".rstrip()
        self._bar.update(self._task, completed=record.step, info=info,
                         description=f"epoch {v['epoch'] + 1}/{self._epochs}")

    def _eval(self, record: Record, v: dict[str, Any]) -> None:
        """Print the metrics above the bar."""
        self._bar.console.print(f"epoch {v['epoch']}  test {_metrics(v['metrics'])}", highlight=False, markup=False)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
