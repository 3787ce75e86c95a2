"""`compression: auto`: measure links and compressors, choose one where it saves time, and check the choice.

Measuring is left to `hvdtrain.comm.sweep`, arithmetic and text to `hvdtrain.planning.compressor_choice`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from hvdtrain.cluster.deadline import deadline
from hvdtrain.comm import sweep
from hvdtrain.comm.compressors import create
from hvdtrain.core.terminal import say
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run
from hvdtrain.parallel.data_parallel.attach import unlike_threads
from hvdtrain.parallel.data_parallel.replicate import Replicate
from hvdtrain.planning import compressor_choice
from hvdtrain.planning.compressor_choice import Baseline, CompressorChoice
from hvdtrain.planning.linear import Link

OtherWire = tuple[Mapping[str, Link], bool]
"""(links by kind of call, whether it overlaps with backward) of a transport that is not in use."""

WARM_STEPS = 2
"""Steps that are not counted at first: allocation, tracing, connections."""

WINDOW_STEPS = 5
"""Steps that a step time is taken from."""


class AutoCompression(Callback):
    """Runs on all ranks; decisions are rank 0's, made between two steps, and every one is a note of the run.

    ``choice``: the compressor in use. ``settled``: nothing more is measured or changed. ``others``: measures the other
    transports of the run for kinds of calls; where the transport is chosen too, both are chosen from one table.
    """

    where = "all"
    doing = "measuring compressors"
    state_key = "AutoCompression"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.config.compression == "auto")

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Any]) -> AutoCompression:
        made = cls()
        if "AutoWire" in earlier:
            earlier["AutoWire"].join(made)
        return made

    def __init__(self) -> None:
        self.choice, self.settled = "none", False
        self.others: Callable[[Any, Sequence[str]], dict[str, OtherWire]] = lambda run, kinds: {}
        self._world = ""
        self._sweep: sweep.Sweep | None = None
        self._base: Baseline | None = None
        self._decision: CompressorChoice | None = None
        self._watch = StepWatch(WARM_STEPS)

    def fit_start(self, run: Run) -> None:
        """Measure links and compressors; a run that continues in the world it was decided for keeps its choice."""
        if self.settled and self._world == _world(run):
            return
        self.anew(run)

    def anew(self, run: Run) -> None:
        """Measure and decide, whatever was decided before; between two steps."""
        self.choice, self.settled, self._world = "none", False, _world(run)
        self._base = self._decision = None
        self._others: dict[str, OtherWire] = {}
        self._before = run.collectives.name
        if run.collectives.size == 1:
            self._settle(run, "none: one rank sends nothing")
            return
        run.use_compressor("none")
        # Each call is bounded by the collectives' own limit where they have one; this bounds the sweep as a whole.
        with deadline(run.config.control_timeout_s, "the sweep of compression auto"):
            dp = cast(Replicate, run.dp)
            found = sweep.measure(run.collectives, dp.reducer.ops, run.control, dp.buckets, run.config)
        unlike = unlike_threads(run.config, run.control, run.topology)
        refused = {cost.name: unlike for cost in found.costs if unlike and create(cost.name, run.config).same_threads}
        found = replace(found, costs=tuple(cost for cost in found.costs if cost.name not in refused),
                        refused={**found.refused, **refused})
        self._sweep = found
        self._others = self.others(run, sorted(found.links))
        self._watch = StepWatch(WARM_STEPS)
        self._watch.begin(run)

    def restored(self, run: Run) -> None:
        if self.settled and self._world == _world(run) and run.dp.compression != self.choice:
            run.use_compressor(self.choice)
            run.note(f"compression auto: {self.choice}, as decided before")

    def step_end(self, run: Run) -> None:
        if self.settled or not self._watch.full(run):
            return
        measured = self._watch.measured(run)
        if self._base is None:
            self._decide(run, measured)
        else:
            self._check(run, measured.step_s)

    def fit_end(self, run: Run) -> None:
        if self.settled:
            return
        what = "decide" if self._base is None else f"check the choice of {self.choice}"
        run.note(f"compression auto: the run was too short to {what}")

    def _decide(self, run: Run, base: Baseline) -> None:
        assert self._sweep is not None
        config, wire, found = run.config, run.collectives, self._sweep
        self._base = base
        rows = compressor_choice.predict(found.costs, found.links, base, wire.overlaps, wire.in_graph)
        for name, (links, overlaps) in self._others.items():
            rows += compressor_choice.predict(found.costs, links, base, overlaps, wire.in_graph, name, found.links)
        decision = run.control.bcast(compressor_choice.decide(rows, config.exchange.auto_margin))
        if run.control.rank == 0 and config.progress != "off":
            say(compressor_choice.table(rows, found.refused, decision.name, wire.size, decision.wire))
        run.record("compression", stage="decided", choice=decision.name, reason=decision.reason, base=asdict(base),
                   rows=[asdict(row) for row in rows], refused=found.refused, sweep_s=found.seconds,
                   links={kind: asdict(link) for kind, link in found.links.items()}, wire=decision.wire or wire.name)
        self._before = wire.name
        if decision.wire and run.wires.use(run, decision.wire):
            decision = replace(decision, name="none", reason=f"none: {decision.wire} is no longer available")
        if decision.name == "none":
            self._settle(run, decision.reason)
            return
        run.note(f"compression auto: {decision.reason}")
        self._decision, self.choice = decision, decision.name
        run.use_compressor(decision.name)
        # A warm-up sends more than what was predicted: the check comes after it.
        self._watch = StepWatch(WARM_STEPS + run.dp.compressor.warmup_steps)
        self._watch.begin(run)

    def _check(self, run: Run, measured_s: float) -> None:
        """Keep the choice if its steps are shorter than those without, else go back to none."""
        assert self._decision is not None and self._base is not None
        keep, reason = run.control.bcast(compressor_choice.verdict(self._decision, self._base, measured_s))
        if not keep:
            self.choice = "none"
            run.use_compressor("none")
            if run.collectives.name != self._before:
                run.wires.use(run, self._before)
        run.record("compression", stage="checked", choice=self.choice, reason=reason, measured_s=measured_s)
        self._settle(run, reason)

    def _settle(self, run: Run, reason: str) -> None:
        self.settled = True
        run.note(f"compression auto: {reason}")

    def state_dict(self) -> dict[str, Any]:
        return {"choice": self.choice, "settled": self.settled, "world": self._world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.choice, self.settled, self._world = state["choice"], state["settled"], state["world"]


class StepWatch:
    """Times of a window of steps, after ``skip`` that do not count; from the run's phases, so without evaluations."""

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self._rows: list[tuple[float, float]] = []
        self._before = (0.0, 0.0)

    def begin(self, run: Run) -> None:
        """Count from here."""
        self._before = _clock(run)

    def full(self, run: Run) -> bool:
        """Count the step that has ended; True once the window is full, at the same step on every rank."""
        self.count(run)
        return len(self._rows) >= self._skip + WINDOW_STEPS

    def count(self, run: Run) -> None:
        """Count the step that has ended."""
        now = _clock(run)
        self._rows.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before = now

    def measured(self, run: Run) -> Baseline:
        """Step and wait of the window; collective, the same on every rank.

        Of each step the slowest rank's time, and the wait of the rank that waited least: the others' wait is also for
        that rank. Then the median over the steps; the mean where the device runs behind and only a window is exact.
        """
        ranks = run.control.gather(self._rows[self._skip:])
        middle = statistics.fmean if run.parts.stage.asynchronous else statistics.median
        return run.control.bcast(Baseline(middle(max(step_s for step_s, _ in rows) for rows in zip(*ranks)),
                                          middle(min(wait_s for _, wait_s in rows) for rows in zip(*ranks))))


def _clock(run: Run) -> tuple[float, float]:
    """(seconds of steps and their data, seconds of waiting) of this rank so far."""
    return run.timeline.totals.step_s + run.timeline.totals.seconds["data"], run.timeline.totals.seconds["wait"]


def _world(run: Run) -> str:
    names = run.wires.names
    return f"{run.control.size} ranks, {run.topology.describe()}, {'/'.join(names) or run.collectives.name}"
