"""Calibration of a device kind: a short run of a model, for plans.

Owns the measurement. Its file is left to `hvdtrain.engine.calibration_file`, plans to `hvdtrain.planning.hardware`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
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
from hvdtrain.config.sections import DataParallelConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Bucket, StepBatch
from hvdtrain.core.units import MIB
from hvdtrain.engine import balance_probe, loop, memory_survey, step_history
from hvdtrain.engine.calibration_file import corrected, keep, known, runs_of
from hvdtrain.engine.machine import SAMPLES
from hvdtrain.engine.memory_survey import MemoryProbeContext
from hvdtrain.engine.run import Run
from hvdtrain.parallel.data_parallel import DataParallelSetup, zero
from hvdtrain.parallel.data_parallel.replicate import Replicate
from hvdtrain.parallel.data_parallel.zero import Zero
from hvdtrain.planning.batch.sampler import BatchShares
from hvdtrain.planning.compressor_choice import CodecCost, codec_of
from hvdtrain.planning.hardware.rates import MOST_ERROR, Calibration, ZeroUpdate
from hvdtrain.planning.hardware.workload import Workload
from hvdtrain.planning.linear import LinearTime, Link, with_adding
from hvdtrain.planning.memory.forecast import MemoryFacts, Sharding
from hvdtrain.planning.simulator import Exchange, Rank, host_links, step
from hvdtrain.planning.simulator import Scene as Played
from hvdtrain.planning.simulator.scene import BACKWARD, NO_LINK

LEAST_STEPS, MOST_STEPS, STEPS_PART = 8, 100, 1.5
"""Steps that are trained, as many as fit into so many times `rebalance.probe_s`."""

LONGEST = 5.0
"""A step that took so many times the median was another kind of step: one that traces a graph."""

WARM = 3
"""First steps, which trace and allocate."""

LEAST_ERROR, WINDOWS = 0.05, 4
"""Error that a calibration has at least: runs minutes apart differ by as much on shared hosts. Means of so many windows
of steps tell how far a mean step may be off."""

LEAST_SAMPLES = 2
"""Samples of each micro-batch where a rank's batch is divided to time adding gradients: BatchNorm needs two."""

WARM_UPDATES, UPDATES = 3, 5
"""ZeRO's updates that lay out memory, and those that are timed."""

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


def calibrated(run: Run, scene: MemoryProbeContext, device: str) -> tuple[Calibration, Link]:
    """Measure this job: line, adding of gradients, update, exchange, compressors; collective.

    ``device``: its name in plans. Return the link of sums over the job's transport, too. The line is the probe's,
    scaled to what forward and backward took in training steps.
    """
    control = run.control
    speeds = balance_probe.probe(run, scene.backend)
    own = speeds[control.rank]
    trained_steps = trained(run)
    line, accumulate_s = _divided(run, own.line, trained_steps)
    host = run.topology.host_of(control.rank)
    hosts = len(run.topology.hosts)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found = Calibration(device, run.parts.precision.own, len(host.ranks), hosts, line, own.sizes,
                        trained_steps.update_s, 0.0, run.collectives.name, run.collectives.overlaps,
                        accumulate_s=accumulate_s, when=now)
    link = NO_LINK
    if control.size > 1:
        found, link = _exchanging(run, found, hosts)
    blocks_s, write_s = slowest(control, list(agreed(control, lambda: _saving(run), "checkpoint")))
    found = replace(found, save_s=(blocks_s, write_s), late=slowest(control, [trained_steps.late])[0])
    short_s = trained_steps.step_s - _predicted(run, found, trained_steps)
    worst, fixed_s = slowest(control, [max(trained_steps.spread, LEAST_ERROR, -short_s / trained_steps.step_s),
                                       max(0.0, short_s)])
    history = agreed(control, lambda: step_history.key_of(run), "calibration")
    return replace(found, error=min(MOST_ERROR, worst), fixed_s=fixed_s, history=history), link


def _divided(run: Run, line: LinearTime, steps: TrainedSteps) -> tuple[LinearTime, float]:
    """Return ``line`` scaled to ``steps``, and the seconds of adding gradients, from steps of twice the micro-batches.

    Collective. Where a batch cannot be divided, adding takes no time.
    """
    before, at, more = run.feed.cut_at(run.state.cursor.step), run.state.cursor.step, 2 * steps.micros
    divides = not run.control.agree(steps.samples < LEAST_SAMPLES * more)
    try:
        if divides:
            run.feed.recut(BatchShares.of(before.shares_P, more), at)
    except UserError:  # of the loss or a layer, on all ranks alike
        divides = False
    if not divides:
        return line.scaled(max(1e-3, steps.compute_s / max(1e-9, line.seconds(steps.samples, steps.micros)))), 0.0
    again = trained(run)
    run.feed.recut(before, run.state.cursor.step)
    return with_adding(line, steps.samples, (steps.micros, steps.compute_s), (again.micros, again.compute_s))


def zero_update(run: Run, link: Link) -> ZeroUpdate | None:
    """Time ZeRO's update of this rank's shard and its gathering of parameters over ``link``, outside a step.

    Collective; None where the optimizer needs whole tensors. A run without ZeRO gets the strategy, and is of no other
    use afterwards.
    """
    control, parts = run.control, run.parts
    if run.dp.divides_state:
        dp = cast(Zero, run.dp)
    else:
        ops = run.dp.reducer.ops  # type: ignore[attr-defined]
        config = replace(run.spelled, data_parallel=DataParallelConfig("zero", 2))
        setup = DataParallelSetup(config, control, run.topology, run.setup.group, run.collectives, ops, parts, [])
        try:
            dp = cast(Zero, agreed(control, lambda: zero.make(setup), "ZeRO"))
        except UserError:
            return None
    rows = []
    grads = [dp.reducer.ops.zeros(sizes_P[control.rank], b.dtype) for b, sizes_P in zip(dp.buckets, dp.sizes_BP)]
    for _ in range(WARM_UPDATES + UPDATES):
        dp.begin(0)
        control.barrier("an update by ZeRO")
        begin = time.perf_counter()
        dp.update(0, grads)
        rows.append((time.perf_counter() - begin - dp.gather_s, dp.gather_s))
    update_s, gather_s = (float(np.median(times)) for times in zip(*rows[WARM_UPDATES:]))
    gather_s = min(control.gather(gather_s))  # who updates last waits for no other
    nbytes = sum(bucket.nbytes for bucket in dp.buckets)
    return ZeroUpdate(control.size, update_s, max(0.0, gather_s - link.seconds(nbytes / 2)),
                      dp.reducer.collectives.overlaps)


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


def _exchanging(run: Run, found: Calibration, hosts: int) -> tuple[Calibration, Link]:
    """Return the calibration with the links of this job's transport, and the compressors; and the former; collective.
    """
    control, wire = run.control, run.collectives
    ops = run.dp.reducer.ops  # type: ignore[attr-defined]
    nbytes = sum(bucket.nbytes for bucket in run.dp.buckets)
    measured, = transport_sweep.measure({wire.name: wire}, ops, control, nbytes, SWEEP_S)
    codecs: dict[str, CodecCost] = {}
    if run.config.compression == "none" and not run.dp.divides_state:
        dp = cast(Replicate, run.dp)
        swept = sweep.measure(wire, ops, control, dp.buckets, run.config, dp.buckets_with)
        costs = {cost.name: cost for cost in swept.costs}
        plain = costs.pop("none")
        codecs = {name: codec_of(cost, plain, swept.links, measured.link, [b.nbytes for b in dp.buckets_with(name)],
                                 [b.nbytes for b in dp.buckets]) for name, cost in costs.items()}
    hosts_P = [number for number, host in enumerate(run.topology.hosts) for _ in host.ranks]
    within, between = host_links(wire.name, hosts_P, measured.link)
    return replace(found, within=within, between=between if hosts > 1 else None, codecs=codecs), measured.link


def _predicted(run: Run, found: Calibration, steps: TrainedSteps) -> float:
    """Return the step that the calibration predicts for this very job; collective."""
    rows = run.control.gather((found.line, steps.samples, steps.micros, found.update_s))
    ranks = tuple(Rank(run.topology.hosts.index(run.topology.host_of(r)), line, samples, micros, update_s,
                       accumulate_s=found.accumulate_s) for r, (line, samples, micros, update_s) in enumerate(rows))
    exchange = Exchange(found.transport if run.control.size > 1 else "null", tuple(b.nbytes for b in run.dp.buckets),
                        found.within or NO_LINK, found.between or NO_LINK, found.overlaps, late=found.late)
    return step(Played(ranks, exchange)).mid_s


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
    own, link = calibrated(run, scene, device) if control.agree(lacking) else (None, NO_LINK)
    if own is None and scene.backend.flops_of_pass(run.parts, scene.sample(SAMPLES))[0] is None:
        trained(run)  # which traces the graph that is counted
    workload = agreed(control, lambda: workload_of(run, scene, buckets), "memory")
    if own is not None:
        own = replace(own, zero=zero_update(run, link) if control.size > 1 else None)  # last: it takes the optimizer
        made = {one.device: one for one in control.gather(own)}  # ranks may differ
        for one in made.values() if control.rank == 0 else ():
            keep(one, name)
    return workload, [*known(device, name), *(corrected(one, runs_of(one)) for one in made.values())]
