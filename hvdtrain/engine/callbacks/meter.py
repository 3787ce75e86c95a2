"""The meter: which part of the devices' speed a run uses, and where the rest goes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hvdtrain.cluster.topology import HostRanks
from hvdtrain.core.terminal import say
from hvdtrain.data.workers.pool import Pool
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run
from hvdtrain.parallel.pipeline.over_ranks import OverRanks
from hvdtrain.planning.batch.meter import AverageStep, Reading, faster_data, read, slow_rank
from hvdtrain.planning.linear import LinearTime

SKIPPED_STEPS = 2
"""Steps at the start that tell nothing: tracing, allocation, connections."""

LEAST_WINDOW_S = 0.1
"""A window lasts about so long at least: comparing the ranks costs a few tenths of a millisecond."""

CLOSER = 3
"""Of the ``every_steps`` equal parts of a window, those that a window has in which a drastic change is looked at."""

EARLY_S = 60.0
"""A rank that is far slower is named so early in a fit; later the run report names it."""

PHASES = ("data", "compute", "wait", "update", "idle", "channel")
"""``idle``: the part of wait in which a stage of a partitioned model waits for others of its copy;
``channel``: the part of idle in which a message between them is on its way."""


@dataclass(frozen=True)
class MeterWindow:
    """Some successive steps with one cut, as all ranks know them.

    ``ends``: the step after the last. ``own_s_P``: each rank's own seconds in forward, backward and update (the next
    backward waits for it too), the median of its full steps; ``latest_s_P``: of those in the last of the window's
    ``every_steps`` parts; ``samples_P``, ``micros_P``: what it had in such a step. Empty without a full step. Of a
    model that is cut over ranks all are by copy: its slowest rank's seconds, with those it waits for other stages.
    """

    ends: int
    own_s_P: tuple[float, ...]
    latest_s_P: tuple[float, ...]
    samples_P: tuple[int, ...]
    micros_P: tuple[int, ...]
    reading: Reading


@dataclass(frozen=True)
class _Step:
    """Step times of this rank; ``full``: of a whole global batch, and not the first of its cut, which may trace."""

    step_s: float
    seconds: dict[str, float]
    samples: int
    micros: int
    full: bool

    @property
    def busy_s(self) -> float:
        """Seconds without waiting for other copies."""
        return self.step_s - self.seconds["wait"] + self.seconds["idle"]

    @property
    def own_s(self) -> float:
        """Seconds of forward, backward and update, and between them those in which other stages compute."""
        return self.seconds["compute"] + self.seconds["update"] + self.seconds["idle"]


class Meter(Callback):
    """Compares the ranks' times every ``every_steps`` steps, seldomer where these are very short.

    ``window``: the one that ended with the latest step, else None. ``reading``: over the run so far, once there is one.
    """

    where = "all"
    before = ("Balance", "Recorder")  # they read the window that ends with the step

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.control.size > 1)

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(run.config.rebalance.every_steps)

    def __init__(self, every_steps: int) -> None:
        self.window: MeterWindow | None = None
        self.reading: Reading | None = None
        self._every = every_steps
        self._parts, self._part_steps = every_steps, 1  # of the window at hand, and steps in each of them
        self._restart_at, self._restart_parts = 0, every_steps
        self._skip = SKIPPED_STEPS
        self._steps: list[_Step] = []
        self._sums_P: list[list[float]] = []
        self._counted = 0
        self._advises, self._begin_s = False, 0.0
        self._before: tuple[Any, ...] = (0.0, dict.fromkeys(PHASES, 0.0), 0, 0, 0)

    def fit_start(self, run: Run) -> None:
        config = run.config
        self._advises = (config.balance == "off" and not config.shares and config.progress != "off"
                         and not config.exchange.adasum)  # which takes equal shares
        self._begin_s = time.perf_counter()
        self._mark(run)

    def step_end(self, run: Run) -> None:
        step = self._since_mark(run)
        self._mark(run)
        self.window = None
        if self._skip > 0:
            self._skip -= 1
            return
        if run.state.cursor.step == self._restart_at + 1:
            self._steps.clear()
            self._parts, step = self._restart_parts, replace(step, full=step.full and self._every == 1)
        self._steps.append(step)
        if len(self._steps) >= self._parts * self._part_steps:
            self._close(run)

    def fit_end(self, run: Run) -> None:
        self._advises = False
        if self._steps:
            self._close(run)

    def restart(self, step: int, closer: bool = False) -> None:
        """Begin a window, a short one where ``closer``, at step ``step``, from which on the ranks have other parts."""
        self._restart_at, self._restart_parts = step, min(CLOSER, self._every) if closer else self._every

    def look_closer(self) -> None:
        """Let the next window end early; every rank calls it alike, at the end of a window."""
        self._parts = min(CLOSER, self._every)

    def _mark(self, run: Run) -> None:
        p = run.timeline.totals
        self._before = (p.step_s, _seconds(run), p.samples, p.own_samples, p.own_micros)

    def _since_mark(self, run: Run) -> _Step:
        p, (step_s, seconds, samples, own, micros) = run.timeline.totals, self._before
        spent = {name: so_far - seconds[name] for name, so_far in _seconds(run).items()}
        return _Step(p.step_s - step_s + spent["data"], spent, p.own_samples - own, p.own_micros - micros,
                     p.samples - samples == min(run.config.global_batch, run.feed.samples or math.inf))

    def _close(self, run: Run) -> None:
        """Exchange the window's numbers and read them; collective."""
        steps, full = self._steps, [s for s in self._steps if s.full]
        self._steps, self._parts = [], self._every
        sums = [math.fsum(s.step_s for s in steps), math.fsum(s.busy_s for s in steps if s.samples),
                float(sum(s.samples for s in steps)), *(math.fsum(s.seconds[name] for s in steps) for name in PHASES)]
        own_s, latest_s = (statistics.median(s.own_s for s in some) if full else 0.0
                           for some in (full, full[-self._part_steps:]))
        last = full[-1] if full else steps[-1]
        rows = run.control.gather((sums, own_s, latest_s, last.samples, last.micros))
        window_P = [sums for sums, *_ in rows]
        own_s_P, latest_s_P, samples_P, micros_P = zip(*(
            (max(rows[r][1] for r in ranks), max(rows[r][2] for r in ranks), *rows[ranks[0]][3:])
            for ranks in run.mesh.copies)) if full else ((),) * 4
        self._sums_P = [[a + b for a, b in zip(old, new)] for old, new in zip(self._sums_P, window_P)] or [*window_P]
        self._counted += len(steps)
        self.reading = _reading(run, self._sums_P, self._counted)
        self.window = MeterWindow(run.state.cursor.step, own_s_P, latest_s_P, samples_P, micros_P,
                             _reading(run, window_P, len(steps)))
        if self._advises and run.control.rank == 0 and self._counted >= 2 * self._every:
            self._advise(run, self.reading)
        longest_s = max(row[0] for row in window_P) / len(steps)
        if longest_s > 0:
            self._part_steps = max(1, math.ceil(LEAST_WINDOW_S / (self._every * longest_s)))

    def _advise(self, run: Run, reading: Reading) -> None:
        """Print once, in the first minute or by the first reading, which rank is far slower than the others."""
        line = slow_rank(reading, _labels(run))
        if line:
            say(line)
        self._advises = not line and time.perf_counter() - self._begin_s < EARLY_S


def _seconds(run: Run) -> dict[str, float]:
    cut, schedule = run.mesh.deepest > 1, cast(OverRanks, run.schedule)
    return {**run.timeline.totals.seconds, "idle": schedule.idle_s if cut else 0.0,
            "channel": schedule.channel_s if cut else 0.0}


def _row(ranks: Sequence[AverageStep], idle_s: Sequence[float]) -> AverageStep:
    """Return what a copy does in a step, from what its ranks do: it computes until its last rank has done so.

    What a rank's input takes longer than another's the other spends waiting for it, which is input of the copy and no
    computing. The copy waits for other copies and the exchange as long as the rank that waits least for anyone.
    """
    data_s = max(row.data_s for row in ranks)
    ends_s = max(row.data_s + row.compute_s + idle for row, idle in zip(ranks, idle_s))
    return AverageStep(ranks[0].samples, data_s, ends_s - data_s,
               max(0.0, min(row.wait_s - idle for row, idle in zip(ranks, idle_s))),
               max(row.update_s for row in ranks))


def _reading(run: Run, sums_P: Sequence[Sequence[float]], steps: int) -> Reading:
    """Read what came of ``steps`` steps; each rank's sums: step, busy with samples, samples, seconds by phase."""
    by_rank = [AverageStep(samples / steps, *(seconds / steps for seconds in phases[:4])) for _, _, samples,
               *phases in sums_P]
    idle_s_P = [sums[-2] / steps for sums in sums_P]
    copies = run.mesh.copies
    cut = len(copies) < len(by_rank)
    rows = [_row([by_rank[r] for r in ranks], [idle_s_P[r] for r in ranks]) for ranks in copies] if cut else by_rank
    labels = _labels(run)
    share = -(-run.config.global_batch // len(rows))
    lines: Sequence[LinearTime | None] = run.state.findings.solo_lines or [None] * len(rows)
    busy_s = [max(sums_P[r][1] for r in ranks) for ranks in copies]
    solo = [sums_P[ranks[0]][2] / own_s if own_s > 0 else share / line.seconds(share, 1) if line else 0.0
            for ranks, own_s, line in zip(copies, busy_s, lines)]
    step_s = max(sums[0] for sums in sums_P) / steps
    lost_s = math.fsum(row.compute_s for copy, row in zip(copies, rows) for _ in copy)
    lost_s -= math.fsum(row.compute_s for row in by_rank)
    channel_s = min(lost_s, math.fsum(sums[-1] for sums in sums_P) / steps)
    return read(rows, step_s, labels, run.config.balance, run.dp.compression, solo, len(run.topology.hosts),
                _crowded(run.topology.hosts), (lost_s - channel_s, channel_s) if cut else None, len(by_rank),
                _faster(run))


def _faster(run: Run) -> str:
    """Return what would make this run's data faster."""
    pool = getattr(run.feed.data, "pool", None)
    workers, cores = pool.n if isinstance(pool, Pool) else 0, run.topology.cores_of(run.control.rank)
    return faster_data(run.feed.samples is None, workers, cores)


def _labels(run: Run) -> list[str]:
    """Return the name of each row of a reading: a rank, or a replica over several ranks."""
    copies = run.mesh.copies
    if any(len(ranks) > 1 for ranks in copies):
        return [f"replica {c} (ranks {', '.join(map(str, sorted(ranks)))})" for c, ranks in enumerate(copies)]
    return [f"rank {r} on {run.topology.host_of(r).node}" for r in range(len(copies))]


def _crowded(hosts: Sequence[HostRanks]) -> str:
    full = [host for host in hosts if len(host.ranks) > host.cores]
    return f"{len(full[0].ranks)} ranks share {full[0].cores} cores on {full[0].node}" if full else ""


def meter_of(run: Run, earlier: Mapping[str, Callback]) -> Meter:
    """Return the meter among ``earlier``; for a single rank, which has nothing to compare, one that stays empty."""
    found = earlier.get("Meter")
    return found if isinstance(found, Meter) else Meter(run.config.rebalance.every_steps)
