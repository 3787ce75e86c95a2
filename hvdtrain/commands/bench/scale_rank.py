"""Train as one rank of a job of ``bench scale``: wait for the other jobs, and count steps while all train.

Started by `hvdtrain.commands.bench.scale`, which owns the jobs and the comparison. Files of a folder connect both.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvdtrain.comm import transport_sweep
from hvdtrain.commands.train import parse
from hvdtrain.config import Config
from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ChangesTransport
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run

WARM_STEPS = 10
"""Steps before a job is ready: graphs are traced, memory is allocated."""

GATE_S = 300.0
"""Longest wait for the other jobs to be ready, or to have counted."""

TRIES, SWEEP_S = 9, 1.0
"""Timings of each micro-batch, and seconds of the measurement of links."""

AGREEMENTS = 50

READY, GO, COUNTED, DONE = "ready", "go", "counted", "done"
"""Files: of each job with its number, and of the bench for all."""


class Gate(Callback):
    """Runs on all ranks; rank 0 opens it and counts. ``sizes``: micro-batches to time on the only rank of a job."""

    where = "all"

    def __init__(self, folder: Path, job: int, seconds: float, sizes: Sequence[int]) -> None:
        self._folder, self._job, self._seconds, self._sizes = folder, job, seconds, sizes
        self._began = 0.0
        self._before: tuple[int, int, dict[str, float]] = (0, 0, {})
        self._counted = False

    def step_end(self, run: Run) -> None:
        if run.control.rank != 0 or run.state.cursor.step < WARM_STEPS:
            return
        now = time.perf_counter()
        if not self._began:
            (self._folder / f"{READY}-{self._job}").touch()
            _await(self._folder / GO)
            self._before = _totals(run)
            self._began = time.perf_counter()
        elif not self._counted and now - self._began >= self._seconds:
            self._counted = True
            steps, samples, spent = _totals(run)
            steps, samples = steps - self._before[0], samples - self._before[1]
            parts = {name: (s - self._before[2][name]) / steps for name, s in spent.items()}
            self._tell({"seconds": now - self._began, "steps": steps, "samples": samples, "parts_s": parts})
        elif self._counted and (self._folder / DONE).exists():  # until then it keeps its cores busy
            run.want_stop("counted")

    def fit_end(self, run: Run) -> None:
        """Measure what predictions start from: micro-batches of a rank alone, the transport of several."""
        found: dict[str, Any] = {}
        if run.control.size == 1 and self._sizes:
            found["lines"] = [(size, _trial_s(run, size)) for size in self._sizes]
        elif run.control.size > 1 and run.dp.can_change_transport:
            found["agreement_s"] = _agreement_s(run)
            nbytes = float(sum(bucket.nbytes for bucket in run.dp.buckets))
            wire = run.collectives
            measured, = transport_sweep.measure({wire.name: wire}, cast(ChangesTransport, run.dp).ops, run.control,
                                                nbytes, SWEEP_S)
            found["transport"] = asdict(measured)
        if run.control.rank == 0 and self._counted:
            cores = [host.cores for host in run.topology.hosts]
            self._tell({**found, "buckets": [bucket.nbytes for bucket in run.dp.buckets], "cores": cores,
                        "overlaps": bool(run.dp.overlaps), "wire": run.collectives.name,
                        "framework": run.spec.framework, "model": run.spec.name}, "facts")

    def _tell(self, found: dict[str, Any], what: str = COUNTED) -> None:
        with whole_file(self._folder / f"{what}-{self._job}") as draft:
            draft.write_text(json.dumps(found), encoding="utf-8")


def main(folder: Path, job: int, seconds: float, sizes: Sequence[int], options: Sequence[str]) -> int:
    """Train as ``options`` of ``train`` say, until the bench has what it wants."""
    from hvdtrain.engine import loop
    from hvdtrain.engine.assemble import assemble

    config = parse(list(options))
    assert config is not None, "the bench has parsed these options before"
    run = assemble(quiet(config, folder / f"run-{job}"), more=lambda run: [Gate(folder, job, seconds, sizes)])
    loop.fit(run)
    return 0


def quiet(config: Config, out: Path) -> Config:
    """Return ``config`` for steps alone: no end of its own, no evaluation, saves or reports."""
    return replace(config.quiet(), epochs=10**9, max_steps=0, time_limit="", budget=0.0, resume="", out=str(out),
                   metrics=[], eval_max_samples=1)


def _totals(run: Run) -> tuple[int, int, dict[str, float]]:
    totals = run.timeline.totals
    return totals.steps, totals.samples, dict(totals.seconds)


def _trial_s(run: Run, size: int) -> float:
    """Return the median seconds of forward and backward of ``size`` samples."""
    batch = run.feed.sample(size, run.state.cursor)
    seconds = []
    for _ in range(TRIES + 1):
        began = time.perf_counter()
        run.parts.stage.trial(batch)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _agreement_s(run: Run) -> float:
    """Return the median seconds of a step's sum over ranks of loss and wishes; collective."""
    run.control.barrier("the bench's agreements")
    seconds = []
    for _ in range(AGREEMENTS):
        began = time.perf_counter()
        run.control.sum(np.zeros(9))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _await(path: Path) -> None:
    """Wait until ``path`` exists; `UserError` after `GATE_S`."""
    ends_at = time.monotonic() + GATE_S
    while not path.exists():
        if time.monotonic() > ends_at:
            raise UserError(f"the bench did not write {path.name} within {GATE_S:g} s", "a bench that is alive",
                            "start it again")
        time.sleep(0.002)
