"""Estimate how fast the run would be without one of its ranks.

Arithmetic is left to `hvdtrain.planning.batch.whatif`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from hvdtrain.cluster.machine.usage import cpu_quota
from hvdtrain.engine.callbacks.base import Callback, several_replicas
from hvdtrain.engine.run import Run
from hvdtrain.planning.batch.whatif import BatchDivision, ExchangeSetup, RankCores, Steps, WhatIfForecast, forecast
from hvdtrain.planning.linear import LinearTime, fit
from hvdtrain.planning.simulator.scene import FLAT, HIERARCHICAL

MOST_STEPS, MOST_NUMBERS, LEAST_KEPT = 256, 16384, 32
"""Steps that are looked at, fewer where ranks are many: so many of all ranks' together, but some at least."""

FIRST = 64
"""The first look is after so many steps, the next ones after twice as many each."""

COSTS = 0.005
"""Measuring how a rank's seconds depend on its samples may take this part of the run's time, else it is left out."""

TRIES = 5


class WhatIf(Callback):
    """Runs on all ranks, of which there are several."""

    where = "all"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return several_replicas(run) and run.parts.layout is None

    def __init__(self) -> None:
        self._rows: deque[tuple[float, ...]] = deque(maxlen=MOST_STEPS + 1)
        self._look_at, self._begin = 0, 0.0
        self._micro: Any = None

    def fit_start(self, run: Run) -> None:
        kept = max(LEAST_KEPT, min(MOST_STEPS, MOST_NUMBERS // run.control.size))
        self._rows = deque(maxlen=kept + 1)
        self._look_at, self._begin = run.state.cursor.step + FIRST, time.perf_counter()

    def step_end(self, run: Run) -> None:
        seconds = run.timeline.totals.seconds
        self._rows.append((time.perf_counter(), seconds["data"] + seconds["compute"], seconds["wait"],
                           run.timeline.totals.own_samples))
        if 0 < self._look_at <= run.state.cursor.step:  # 0: no fit has begun
            self._look_at += self._look_at
            self._tell(run, self.look(run))
        if run.batch is not None and run.batch.micros:
            self._micro = run.batch.micros[0]

    def fit_end(self, run: Run) -> None:
        totals = run.timeline.totals
        costs_s = 2.5 * (TRIES + 1) * (totals.step_s / max(1, totals.steps)) + totals.first_s
        self._tell(run, self.look(run, costs_s < COSTS * (time.perf_counter() - self._begin)))
        self._micro = None

    def look(self, run: Run, measures: bool = False) -> WhatIfForecast | None:
        """Estimate from the steps that are kept; ``measures``: with this rank's line measured now. Collective."""
        own = self._measured(run) if measures and not run.state.findings.solo_lines else None
        threads = run.config.threads or run.topology.cores_of(run.control.rank)
        rows_P = run.control.gather((list(self._rows), own and (own.a_s, own.c_s), threads, cpu_quota()))
        config = run.config
        if run.dp.divides_state or min(len(rows) for rows, *_ in rows_P) < 2:  # ranks wait in ZeRO's update too
            return None
        table = np.diff(np.array([rows for rows, *_ in rows_P], np.float64), axis=1).transpose(2, 1, 0)  # 4 of [N, P]
        wall, work_s, wait, samples = table
        lines: list[LinearTime | None] = [LinearTime(*line) if line else None for _, line, *_ in rows_P]
        planned = config.balance != "off" and bool(run.state.findings.solo_lines)
        shares = None if planned else list(cast(Sequence[float], run.spelled.shares)) or [1.0] * run.control.size
        ceilings = [config.micro_batch_limit] * run.control.size if config.micro_batch_limit else None
        work = BatchDivision(config.global_batch, shares, ceilings, config.accumulate, config.sync_batchnorm)
        steps = Steps(wall, work_s, wait, samples.astype(np.int64))
        transport = _transport(run, [row[2] for row in rows_P], [row[3] for row in rows_P])
        return forecast(steps, work, run.state.findings.solo_lines or lines, transport)

    def _measured(self, run: Run) -> LinearTime | None:
        """Return this rank's line, from its micro-batch and one as large as it would be, or half; None without one."""
        config, micro = run.config, self._micro
        n = len(micro[0]) if micro is not None else 0
        if n < 4 or config.compile != "off" or config.sync_batchnorm:
            return None
        # A line beyond what was measured is a guess; but a device may not hold more than it does.
        on_host = run.devices[run.control.rank].kind == "cpu"
        sizes = (n, n + -(-n // (run.control.size - 1))) if on_host else (n // 2, n)
        with run.parts.draws_kept():
            try:
                batches = [tuple(part[np.arange(size) % n] for part in micro) for size in sizes]
                for batch in batches:  # which traces and allocates
                    run.parts.stage.trial(batch)
                seconds = [[_timed(run.parts.stage.trial, batch) for batch in batches] for _ in range(TRIES)]
            except Exception:  # what cannot be tried is not; the run is over but for its end
                return None
        return fit(sizes, [statistics.median(times) for times in zip(*seconds)])

    @staticmethod
    def _tell(run: Run, found: WhatIfForecast | None) -> None:
        if found is not None:
            run.record("whatif", ranks=list(found.percent_P), step_s=found.step_s, without_s=list(found.without_s_P))


def _transport(run: Run, threads_P: Sequence[int], quotas_P: Sequence[float]) -> ExchangeSetup:
    """Return what the simulator needs of the exchange. ``quotas_P``: cores that control groups leave each rank."""
    topology, emulated = run.topology, bool(run.config.emulate_speed)
    numbers = {rank: number for number, host in enumerate(topology.hosts) for rank in host.ranks}
    places = tuple(RankCores(numbers[r], min(t, q)) for r, (t, q) in enumerate(zip(threads_P, quotas_P)))
    # A rank that waits for its quota, or by emulate_speed, leaves its core to others already.
    cores = tuple(0.0 if emulated or any(quotas_P[r] < threads_P[r] for r in host.ranks) else float(host.cores)
                  for host in topology.hosts)
    name = run.collectives.name
    on_cores = not emulated and name in (FLAT, HIERARCHICAL) and len(topology.hosts) == 1 and all(
        device.kind == "cpu" for device in run.devices)
    return ExchangeSetup(name, places, cores, on_cores)


def _timed(work: Callable[[Any], None], batch: Any) -> float:
    """Seconds of ``work(batch)``."""
    begin = time.perf_counter()
    work(batch)
    return time.perf_counter() - begin
