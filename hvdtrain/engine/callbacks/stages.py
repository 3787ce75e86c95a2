"""Record the plan of a partitioned model with each rank's measurements, at start and end.

The rank that waited least for others after its last backward waited for the exchange alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import cast

import numpy as np

from hvdtrain.core.terminal import say
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.meter import SKIPPED_STEPS
from hvdtrain.engine.run import Run
from hvdtrain.parallel.pipeline.over_ranks import OverRanks
from hvdtrain.parallel.pipeline.plan import Planned, measured_text, record, rows


@dataclass(frozen=True)
class StageSeconds:
    """Mean seconds of a full step on a rank. ``idle_s``: it waited for stages of its copy between its forwards and
    backwards; ``after_s``: for others and for the exchange, after them; ``step_s``: all of it, with input and update.
    """

    step_s: float
    compute_s: float
    idle_s: float
    after_s: float


@dataclass(frozen=True)
class StageTimes:
    """Times of all ranks. ``wire_s``: mean seconds of the exchange between copies in a step."""

    ranks: tuple[StageSeconds, ...]
    steps: int

    @property
    def wire_s(self) -> float:
        """Seconds of a step in which the rank that came last waited for the exchange."""
        return min(spent.after_s for spent in self.ranks)

    @property
    def passes_s(self) -> float:
        """Seconds of a step's forwards and backwards, on the rank that ended last."""
        return max(spent.compute_s + spent.idle_s for spent in self.ranks)

    @property
    def idle_share(self) -> float:
        """Part of all ranks' time, without input, update and exchange, of waiting for other stages or copies."""
        idle_s = math.fsum(spent.idle_s + spent.after_s - self.wire_s for spent in self.ranks)
        busy_s = math.fsum(spent.compute_s for spent in self.ranks)
        return idle_s / (idle_s + busy_s) if idle_s + busy_s > 0 else 0.0


class StageMeter(Callback):
    """Runs on all ranks of a partitioned model. ``seen``: what was measured, when a fit has ended."""

    where = "all"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return run.parts.layout is not None

    def __init__(self) -> None:
        self.seen: StageTimes | None = None
        self._sums = dict.fromkeys((f.name for f in fields(StageSeconds)), 0.0)
        self._steps, self._skip = 0, SKIPPED_STEPS
        self._before: tuple[float, ...] = ()

    def fit_start(self, run: Run) -> None:
        layout = run.parts.layout
        if isinstance(layout, Planned):
            run.record("pipeline", stage="planned", steps=None, **record(layout))
        self._before = _so_far(run)

    def step_end(self, run: Run) -> None:
        before, self._before = self._before, _so_far(run)
        spent = [now - then for now, then in zip(self._before, before)]
        if self._skip:
            self._skip -= 1
            return
        samples, data_s, step_s, compute_s, wait_s, idle_s = spent
        if samples != min(run.config.global_batch, run.feed.samples or math.inf):
            return
        self._steps += 1
        for name, seconds in zip(self._sums, (data_s + step_s, compute_s, idle_s, wait_s - idle_s)):
            self._sums[name] += seconds

    def fit_end(self, run: Run) -> None:
        """Bring the ranks' seconds together, record and print; collective."""
        if not self._steps:
            return
        own = StageSeconds(**{name: seconds / self._steps for name, seconds in self._sums.items()})
        self.seen = seen = StageTimes(tuple(run.control.gather(own)), self._steps)
        layout = run.parts.layout
        if run.control.rank or not isinstance(layout, Planned):
            return
        layout = _in_force(run, layout)
        table = [{**row, "busy_s": seen.ranks[row["rank"]].compute_s} for row in rows(layout)]
        run.record("pipeline", stage="measured", stages=table, step_s=seen.passes_s, idle_share=seen.idle_share,
                   wire_s=seen.wire_s, steps=seen.steps)
        if run.config.progress != "off":
            say(measured_text(layout, [spent.compute_s for spent in seen.ranks], seen.passes_s, seen.idle_share))


def _in_force(run: Run, layout: Planned) -> Planned:
    """Return the prediction for the shares that the replicas took last, which `balance` may have changed."""
    parts, n = run.feed.cut_at(max(0, run.state.cursor.step - 1)), run.config.global_batch
    micros = [len(parts.bounds(n, copy)) for copy in range(len(layout.plans))]
    return layout.foreseen(np.diff(parts.offsets(n)).tolist(), micros)


def _so_far(run: Run) -> tuple[float, ...]:
    """Return samples, and seconds of input, steps, computing, waiting, and waiting for stages of the copy."""
    p, schedule = run.timeline.totals, cast(OverRanks, run.schedule)
    return (p.samples, p.seconds["data"], p.step_s, p.seconds["compute"], p.seconds["wait"], schedule.idle_s)
