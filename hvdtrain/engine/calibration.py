"""Calibration of a device kind: a short run of a model, kept in a cache file for plans.

Owns the measurement and its file. What plans make of it is `hvdtrain.planning.hardware`'s.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import re
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvdtrain import backends
from hvdtrain.checkpoint import files
from hvdtrain.cluster.control import agreed
from hvdtrain.comm import sweep, transport_sweep
from hvdtrain.comm.sweep import slowest
from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Bucket, StepBatch
from hvdtrain.core.units import MIB
from hvdtrain.engine import balance_probe, loop, memory_survey, step_history
from hvdtrain.engine.machine import SAMPLES
from hvdtrain.engine.memory_survey import MemoryProbeContext
from hvdtrain.engine.run import Run
from hvdtrain.engine.step_history import StepRow
from hvdtrain.parallel.data_parallel.replicate import Replicate
from hvdtrain.planning.hardware.rates import Calibration
from hvdtrain.planning.hardware.workload import Workload
from hvdtrain.planning.linear import LinearTime, Link
from hvdtrain.planning.memory.forecast import MemoryFacts, Sharding
from hvdtrain.planning.simulator import Exchange, Rank, host_links, step
from hvdtrain.planning.simulator import Scene as Played
from hvdtrain.planning.simulator.scene import BACKWARD

VERSION = 2
"""Of the file's format; others are not read."""

LARGEST, MOST_ENTRIES = 1 << 20, 64
"""Bytes of a file that is read, and calibrations that it keeps, the latest ones."""

LEAST_STEPS, MOST_STEPS, STEPS_PART = 8, 100, 1.5
"""Steps that are trained, as many as fit into so many times `rebalance.probe_s`."""

LONGEST = 5.0
"""A step that took so many times the median was another kind of step: one that traces a graph."""

WARM = 3
"""First steps, which trace and allocate."""

LEAST_ERROR, MOST_ERROR, WINDOWS = 0.05, 0.9, 4
"""Error that a calibration has at least: runs minutes apart differ by as much on shared hosts. At most. Means of so
many windows of steps tell how far a mean step may be off."""

MOST_FACTOR = 4.0
"""Runs correct a calibration by so much at most: what differs more was another setting."""

SWEEP_S = 1.0

SAVED_BYTES = 64 * MIB
"""Bytes that are copied and written at most to time a save; more take as many times as long."""


def workload_of(run: Run, scene: MemoryProbeContext, buckets: Sequence[Bucket]) -> Workload:
    """Measure memory and operations of a run's model on a few samples; on this rank alone.

    Operations that are counted in a traced graph are there after `trained`.
    """
    model = memory_survey.model_of(scene)
    measured = memory_survey.measure(scene, model, memory_survey.way_of(scene, run.dp), True)
    rank = memory_survey.rank_of(scene)
    sample_bytes = float(sum(np.asarray(array).nbytes for array in scene.sample(1)))
    flops, why = scene.backend.flops_of_pass(run.parts, scene.sample(SAMPLES))
    if flops is None:
        found, more = scene.backend.flops_of_graphs(run.parts, run.dp)
        flops, why = found, more or why
    return Workload(run.spec.name, MemoryFacts(model, rank, Sharding(), measured), tuple(buckets), flops or 0.0, why,
                    sample_bytes)


def key(run: Run, sample: Any) -> str:
    """Return a checksum of the work that a calibration is of: model, samples and framework, not device or ranks."""
    config = run.config
    facts = [run.spec.framework, run.spec.name, config.model_args,
             [(spec.name, spec.shape, spec.dtype) for spec in run.parts.params.specs],
             [(str(np.asarray(array).dtype), np.asarray(array).shape[1:]) for array in sample],
             config.optimizer.name, config.sync_batchnorm, config.deterministic, config.compile, str(config.remat),
             config.threads, config.clip_norm > 0, config.ema > 0, config.transforms]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def calibrated(run: Run, scene: MemoryProbeContext, device: str) -> Calibration:
    """Measure this job: line, update, exchange, compressors; collective. ``device``: its name in plans.

    The line is the probe's, scaled to what forward and backward took in training steps.
    """
    control = run.control
    speeds = balance_probe.probe(run, scene.backend)
    own = speeds[control.rank]
    trained_steps = trained(run)
    share, micros = trained_steps.samples, trained_steps.micros
    line = own.line.scaled(max(1e-3, trained_steps.compute_s / max(1e-9, own.line.seconds(share, micros))))
    host = run.topology.host_of(control.rank)
    hosts = len(run.topology.hosts)
    found = Calibration(device, run.parts.precision.own, len(host.ranks), hosts, line, own.sizes,
                        trained_steps.update_s, 0.0, run.collectives.name, run.collectives.overlaps,
                        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    if control.size > 1:
        found = _exchanging(run, found, hosts)
    blocks_s, write_s = agreed(control, lambda: _saving(run), "checkpoint")
    found = replace(found, save_s=_numbers(slowest(control, [blocks_s, write_s])))
    found = replace(found, late=slowest(control, [trained_steps.late])[0])
    short_s = trained_steps.step_s - _predicted(run, found, trained_steps)
    worst, fixed_s = slowest(control, [max(trained_steps.spread, LEAST_ERROR, -short_s / trained_steps.step_s),
                                       max(0.0, short_s)])
    history = agreed(control, lambda: step_history.key_of(run), "calibration")
    return replace(found, error=min(MOST_ERROR, worst), fixed_s=fixed_s, history=history)


@dataclass(frozen=True)
class TrainedSteps:
    """Seconds of a mean step, and of this rank's ``compute``, ``update``; ``spread``: relative, of a mean step.

    ``late``: as in `hvdtrain.planning.simulator.Exchange`.
    """

    step_s: float
    compute_s: float
    update_s: float
    spread: float
    samples: int
    micros: int
    late: float = 0.0


def trained(run: Run) -> TrainedSteps:
    """Train a few steps of an assembled run, whose model is changed by them; collective."""
    seconds = run.timeline.totals.seconds
    run.callbacks.clear()  # they count on a fit's begin and end, and this is none
    run.join()
    rows: list[tuple[float, ...]] = []
    lates: list[float] = []
    limit_s, begin = STEPS_PART * run.config.rebalance.probe_s, time.perf_counter()
    with contextlib.closing(_batches(run)) as batches, _handed_over(run) as put_s:
        for batch in batches:
            put_s.clear()
            before, at = dict(seconds), time.perf_counter()
            loop.train_step(run, batch)
            rows.append((time.perf_counter() - at, seconds["compute"] - before["compute"],
                         seconds["update"] - before["update"], batch.n_global,
                         sum(len(micro[0]) for micro in batch.micros), len(batch.micros)))
            lates.append(_late(run.dp.buckets, {i: s - at for i, s in put_s.items()}, rows[-1][1], rows[-1][5]))
            enough = len(rows) >= LEAST_STEPS and time.perf_counter() - begin > limit_s
            if run.control.agree(enough or len(rows) >= MOST_STEPS + WARM):
                break
    kept = np.array(rows[min(WARM, len(rows) - 1):])
    kept = kept[kept[:, 3] == kept[:, 3].max()]  # the last batch of an epoch is smaller
    usual = kept[kept[:, 0] <= LONGEST * np.median(kept[:, 0])]
    means = [float(window[:, 0].mean()) for window in np.array_split(usual, WINDOWS) if len(window)]
    step_s, compute_s, update_s = (float(mean) for mean in usual[:, :3].mean(axis=0))
    return TrainedSteps(step_s, compute_s, update_s, (max(means) - min(means)) / 2 / step_s, int(usual[-1, 4]),
                        max(1, int(usual[-1, 5])), float(np.median(lates[min(WARM, len(lates) - 1):])))


@contextlib.contextmanager
def _handed_over(run: Run) -> Iterator[dict[int, float]]:
    """Note when each bucket of a step is handed to the transport; of one inside a graph nothing is noted."""
    put_s: dict[int, float] = {}
    put = run.dp.put

    def noted(index: int, x: Any) -> None:
        put_s[index] = time.perf_counter()
        put(index, x)

    run.dp.put = noted  # type: ignore[method-assign]
    try:
        yield put_s
    finally:
        run.dp.put = put  # type: ignore[method-assign]


def _late(buckets: Sequence[Bucket], put_s: dict[int, float], compute_s: float, micros: float) -> float:
    """Return the fraction of the last micro-batch's backward before buckets are handed over in proportion to bytes.

    ``put_s``: by bucket, from the begin of the step. A bucket leaves after those before it.
    """
    total, arrived, sent_s, found = sum(bucket.nbytes for bucket in buckets), 0, 0.0, []
    for bucket in buckets[:-1]:
        arrived += bucket.nbytes
        if bucket.index in put_s and compute_s > 0:
            sent_s = max(sent_s, put_s[bucket.index])
            portion = 1 - (compute_s - sent_s) * max(1.0, micros) / (BACKWARD * compute_s)
            found.append((portion - arrived / total) / (1 - arrived / total))
    return min(1.0, max(0.0, float(np.median(found)))) if found else 0.0


def _batches(run: Run) -> Generator[StepBatch, None, None]:
    """Yield the batches of epoch after epoch."""
    while True:
        with contextlib.closing(run.feed.epoch(run.state.cursor)) as batches:
            yield from batches
        run.state.cursor = run.state.cursor.next_epoch()


def _saving(run: Run) -> tuple[float, float]:
    """Return (seconds that a save blocks training: the copy of the state; seconds to write it), by a part of it."""
    model = backends.load(run.spec.framework).model_bytes(run.parts)
    nbytes = sum(model.param_bytes) + model.other_bytes + model.state_bytes()
    some = np.zeros(max(1, min(nbytes, SAVED_BYTES)), np.uint8)
    into, copies = np.empty_like(some), []
    for _ in range(3):  # the first one maps memory
        begin = time.perf_counter()
        np.copyto(into, some)
        copies.append(time.perf_counter() - begin)
    out = Path(run.config.out)
    near = next((folder for folder in (out, *out.parents) if folder.is_dir()), Path())
    try:
        with tempfile.TemporaryDirectory(dir=near) as folder:
            begin = time.perf_counter()
            files.write_durably(Path(folder, "part"), [some.data])
            write_s = time.perf_counter() - begin
    except OSError as error:
        raise UserError(f"nothing can be written near {out}: {error}", "a writable folder for runs", "correct --out"
                        ) from None
    return min(copies) * nbytes / some.size, write_s * nbytes / some.size


def _exchanging(run: Run, found: Calibration, hosts: int) -> Calibration:
    """Return the calibration with the links of this job's transport, and the compressors; collective."""
    control, wire = run.control, run.collectives
    ops = run.dp.reducer.ops  # type: ignore[attr-defined]
    nbytes = sum(bucket.nbytes for bucket in run.dp.buckets)
    measured, = transport_sweep.measure({wire.name: wire}, ops, control, nbytes, SWEEP_S)
    codecs: dict[str, tuple[float, float]] = {}
    if run.config.compression == "none" and not run.dp.divides_state:
        costs = sweep.measure(wire, ops, control, run.dp.buckets, run.config,
                              cast(Replicate, run.dp).buckets_with).costs
        whole = next((cost.wire_bytes for cost in costs if cost.name == "none"), 0)
        codecs = {cost.name: (cost.codec_s, cost.wire_bytes / whole) for cost in costs if cost.name != "none" and whole}
    hosts_P = [number for number, host in enumerate(run.topology.hosts) for _ in host.ranks]
    within, between = host_links(wire.name, hosts_P, measured.link)
    return replace(found, within=within, between=between if hosts > 1 else None, codecs=codecs)


def _predicted(run: Run, found: Calibration, steps: TrainedSteps) -> float:
    """Return the step that the calibration predicts for this very job; collective."""
    rows = run.control.gather((found.line, steps.samples, steps.micros, found.update_s))
    ranks = tuple(Rank(run.topology.hosts.index(run.topology.host_of(r)), line, samples, micros, update_s)
                  for r, (line, samples, micros, update_s) in enumerate(rows))
    none = Link(0.0, 0.0)
    exchange = Exchange(found.transport if run.control.size > 1 else "null", tuple(b.nbytes for b in run.dp.buckets),
                        found.within or none, found.between or none, found.overlaps, late=found.late)
    return step(Played(ranks, exchange)).mid_s


def keep(found: Calibration, workload: str) -> None:
    """Keep a calibration of the workload with the checksum ``workload``; the file appears whole or not at all."""
    with contextlib.suppress(OSError):
        folder = balance_probe.cache_folder("calibration")
        folder.mkdir(parents=True, exist_ok=True)
        rows = [row for row in _rows(found.device) if _identity(row) != _identity(_row(found, workload))]
        record = {"version": VERSION, "device": found.device,
                  "calibrations": [*rows, _row(found, workload)][-MOST_ENTRIES:]}
        with whole_file(folder / f"{_slug(found.device)}.json") as draft:
            draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def known(device: str, workload: str) -> list[Calibration]:
    """Return the calibrations of ``device`` that are kept of a workload, the oldest first, corrected by later runs."""
    found = []
    for row in _rows(device):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            if row["workload"] == workload:
                found.append(corrected(made := _read(device, row), runs_of(made)))
    return found


def runs_of(found: Calibration) -> list[StepRow]:
    """Return what runs took since in the setting of a calibration, on this host; the oldest first."""
    return step_history.steps(found.history) if found.history else []


def corrected(found: Calibration, rows: Sequence[StepRow]) -> Calibration:
    """Return the calibration by what whole runs of the model on this device took since; ``rows``: oldest first. Pure.

    The line is scaled to the latest run whose micro-batches it covers, and its error is the largest of the forecasts
    of these runs.
    """
    covered = [row for row in rows if row.micros > 0 and row.compute_s > 0 and found.covers(
        round(row.samples / row.micros))]
    if not covered:
        return found
    row = covered[-1]
    factor = row.compute_s / (row.micros * found.line.a_s + row.samples * found.line.c_s)
    factor = min(MOST_FACTOR, max(1 / MOST_FACTOR, factor))
    errors = [abs(one.error) for one in covered if math.isfinite(one.error)]
    return replace(found, line=found.line.scaled(factor), update_s=row.update_s,
                   error=min(MOST_ERROR, max([found.error, *errors])))


def _row(found: Calibration, workload: str) -> dict[str, Any]:
    def link(one: Link | None) -> list[float] | None:
        return None if one is None else [one.alpha_s, one.beta_s_per_byte]

    return {"workload": workload, "precision": found.precision, "local": found.local, "hosts": found.hosts,
            "line": [found.line.a_s, found.line.c_s], "sizes": list(found.sizes), "update_s": found.update_s,
            "fixed_s": found.fixed_s, "error": found.error, "transport": found.transport, "overlaps": found.overlaps,
            "within": link(found.within), "between": link(found.between),
            "codecs": {name: list(codec) for name, codec in found.codecs.items()}, "save_s": list(found.save_s),
            "late": found.late, "history": found.history, "when": found.when}


def _read(device: str, row: dict[str, Any]) -> Calibration:
    """Return a row as a calibration; ValueError for numbers that none has."""
    def link(pair: Sequence[float] | None) -> Link | None:
        return None if pair is None else Link(*_numbers(pair))

    a_s, c_s = _numbers(row["line"])
    update_s, fixed_s = _numbers([row["update_s"], row["fixed_s"]])
    error, late = _numbers([row["error"], row.get("late", 0.0)])
    sizes = tuple(int(size) for size in row["sizes"])
    if c_s <= 0 or not sizes or min(sizes) < 1 or max(error, late) > 1:
        raise ValueError(row)
    codecs = {str(name): (codec_s, ratio) for name, pair in row["codecs"].items() for codec_s, ratio in
              [_numbers(pair)]}
    return Calibration(device, str(row["precision"]), int(row["local"]), int(row["hosts"]), LinearTime(a_s, c_s),
                       sizes, update_s, error, str(row["transport"]), bool(row["overlaps"]), link(row["within"]),
                       link(row["between"]), codecs, _numbers(row["save_s"]), fixed_s, late, str(row["history"]),
                       str(row["when"]))


def _numbers(values: Sequence[Any]) -> tuple[float, float]:
    """Return two numbers; ValueError for others."""
    first, second = (float(value) for value in values)
    if not (0 <= first < 1e9 and 0 <= second < 1e9):
        raise ValueError(values)
    return first, second


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("workload", "precision", "local", "hosts", "transport"))


def _rows(device: str) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        path = balance_probe.cache_folder("calibration") / f"{_slug(device)}.json"
        if path.stat().st_size <= LARGEST:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["version"] == VERSION:
                return [row for row in found["calibrations"] if isinstance(row, dict)]
    return []


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-.")[:80] or "device"


def measured_here(run: Run, scene: MemoryProbeContext, device: str, buckets: Sequence[Bucket],
                  wanted: int) -> tuple[Workload, list[Calibration]]:
    """Measure a run's model, and its device where that is needed and not known, which is kept; collective.

    ``wanted``: samples of a rank's step in the plan, if the plan has ranks as in this job: 0: none. -1: measure in any
    case. Return the workload, and what is known of ``device`` with it.
    """
    control = run.control
    name = key(run, scene.sample(1))
    local = len(run.topology.host_of(control.rank).ranks)
    alike = [c for c in known(device, name) if (c.local, c.precision) == (local, run.parts.precision.own)]
    lacking = wanted < 0 or wanted > 0 and not any(c.covers(wanted) for c in alike[-1:])
    made: dict[str, Calibration] = {}
    if control.agree(lacking):
        made = {one.device: one for one in control.gather(calibrated(run, scene, device))}  # ranks may differ
        for one in made.values() if control.rank == 0 else ():
            keep(one, name)
    elif scene.backend.flops_of_pass(run.parts, scene.sample(SAMPLES))[0] is None:
        trained(run)  # which traces the graph that is counted
    workload = agreed(control, lambda: workload_of(run, scene, buckets), "memory")
    return workload, [*known(device, name), *(corrected(one, runs_of(one)) for one in made.values())]
