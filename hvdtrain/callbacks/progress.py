"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere; rank 0 only."""

from __future__ import annotations

import datetime
import math
import time
from typing import IO, Any, cast

from hvdtrain.callbacks.base import Callback
from hvdtrain.run import Stdout, say


def make(kind: str, launched: bool) -> list[Callback]:
    """The progress callbacks for config ``progress``.

    ``auto`` draws a bar on a terminal where there is one process; ranks under a launcher print lines, because mpirun
    gives them pseudo-terminals even where its own output goes to a file.
    """
    if kind == "off":
        return []
    if kind == "rich" or (kind == "auto" and Stdout().isatty() and not launched):
        return [Bar()]
    return [Lines()]


def _total(run: Any) -> int | None:
    """Steps of the whole run, where the data has a length."""
    per_epoch = run.feed.steps_per_epoch
    total = None if per_epoch is None else per_epoch * run.config.epochs
    limit = run.config.max_steps or None
    return min(x for x in (total, limit) if x) if total or limit else None


def _rate(samples_per_s: float) -> str:
    return "" if math.isnan(samples_per_s) else f"{samples_per_s:,.0f} samples/s"


def _used(run: Any) -> str:
    """What part of the ranks' solo speeds the run reaches, where there are several."""
    return "" if run.reading is None else f"{run.reading.percent:.0f} % of solo"


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def say_parts(*parts: str) -> None:
    """One line of those parts that are not empty."""
    say("  ".join(part for part in parts if part))


class Lines(Callback):
    """A line at most every ``seconds`` and one per evaluation."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.every = f"{seconds} s"

    def fit_start(self, run: Any) -> None:
        """Remember where and when this process began."""
        self._begin, self._from = time.monotonic(), run.state.cursor.step

    def step_end(self, run: Any) -> None:
        """Where the run is and when it should end."""
        s, total = run.state, _total(run)
        where = f"step {s.cursor.step}" + (f"/{total}" if total else "")
        say_parts(where, f"epoch {s.cursor.epoch + 1}/{run.config.epochs}", f"loss {s.loss:.4f}",
                  f"lr {run.parts.optimizer.learning_rate():.3g}", _rate(s.samples_per_s), _used(run),
                  self._eta(s.cursor.step, total))

    def _eta(self, step: int, total: int | None) -> str:
        done = step - self._from
        if not total or done < 2:
            return ""
        left_s = (time.monotonic() - self._begin) / done * max(0, total - step)
        return f"eta {datetime.timedelta(seconds=round(left_s))}"

    def eval_end(self, run: Any) -> None:
        """Metrics of the evaluation data."""
        s = run.state
        say_parts(f"epoch {s.cursor.epoch}/{run.config.epochs}", f"step {s.cursor.step}", f"test {_metrics(s.metrics)}",
                  _rate(s.samples_per_s))


class Bar(Callback):
    """A rich progress bar; evaluations are printed above it."""

    def fit_start(self, run: Any) -> None:
        """Draw."""
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[info]}"), progress.TimeRemainingColumn(), transient=True,
            console=Console(file=cast(IO[str], Stdout())))
        self._task = self._bar.add_task("train", total=_total(run), completed=run.state.cursor.step, info="")
        self._bar.start()

    def step_end(self, run: Any) -> None:
        """Move."""
        s = run.state
        info = f"loss {s.loss:.4f}  {_rate(s.samples_per_s)}  {_used(run)}".rstrip()
        self._bar.update(self._task, completed=s.cursor.step, info=info,
                         description=f"epoch {s.cursor.epoch + 1}/{run.config.epochs}")

    def eval_end(self, run: Any) -> None:
        """Print the metrics above the bar."""
        self._bar.console.print(f"epoch {run.state.cursor.epoch}  test {_metrics(run.state.metrics)}",
                                highlight=False, markup=False)

    def fit_end(self, run: Any) -> None:
        """Remove the bar."""
        self._bar.stop()
