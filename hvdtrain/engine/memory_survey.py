"""Memory of a run: the facts that its estimate needs, measured on this rank."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from hvdtrain.cluster.machine import memory
from hvdtrain.config import Config
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import Batch, BlockCost, Control, DataParallel, DividesState
from hvdtrain.core.protocols.types import Bucket, Cursor
from hvdtrain.core.units import format_bytes, format_ms
from hvdtrain.data.feed import Feed
from hvdtrain.engine.average import average_bytes
from hvdtrain.engine.run import Run
from hvdtrain.parallel.recovery import attempt
from hvdtrain.planning.memory.fit import peak as peak_with
from hvdtrain.planning.memory.forecast import (
    MeasuredMemory,
    MemoryFacts,
    MemoryLine,
    MemoryTrace,
    Model,
    RankMemory,
    Sharding,
    first_copies,
    line,
)

PARTS = (8, 4)
"""A micro-batch is measured by an eighth and by a quarter of its samples."""

LEAST_SAMPLES = (2, 4)

GRAPH_PART = 0.6
"""Part of what a first small pass takes for good that another graph takes again; the rest is the framework's start."""


@dataclass(frozen=True)
class MemoryProbeContext:
    """Objects to measure: a run's parts, or a setup's, before it trains. ``device``: this rank's `DeviceFacts`.

    ``cursor``: where the run stands. ``average``: that of its weights, where it keeps one (`hvdtrain.engine.average`).
    """

    config: Config
    control: Control
    topology: Any
    wire: Any
    parts: Any
    backend: Any
    feed: Feed
    device: Any
    cursor: Cursor = Cursor()
    average: Any = None

    def sample(self, n: int) -> Batch:
        """Return ``n`` samples to try the model on; of a stream those that the run comes to next, which are kept."""
        return self.feed.sample(n, self.cursor)

    def facts_of_replica(self) -> MemoryFacts:
        """Measure a few samples and return the facts of this rank where the state is not divided."""
        model = model_of(self)
        return MemoryFacts(model, rank_of(self), Sharding(), measure(self, model, Sharding()))

    def buckets(self) -> list[Bucket]:
        """Return the buckets that an exchange would have, of a run that has none yet."""
        return plan_buckets(self.parts.params.specs, self.config.exchange.unmeasured_mb,
                            aligned=self.wire.host and self.config.compression == "none")

    @property
    def local(self) -> int:
        """Ranks of this host, which share its memory."""
        return len(self.topology.host_of(self.control.rank).ranks)


def scene_of(run: Run, backend: Any) -> MemoryProbeContext:
    """Return the scene of an assembled run."""
    return MemoryProbeContext(run.spelled, run.control, run.topology, run.collectives, run.parts, backend, run.feed,
                 run.devices[run.control.rank], run.state.cursor, run.average)


def rank_of(scene: MemoryProbeContext) -> RankMemory:
    """Return what is known of this rank without computing anything."""
    largest, micros, samples = _cut(scene.feed, scene.config)
    batch = scene.feed.read_before() if scene.feed.samples else ()  # a stream is not opened for a count
    own = sum(np.asarray(array)[:1].nbytes for array in batch) * samples
    prefetch = scene.config.data.prefetch
    checkpoint = scene.config.checkpoint
    saves = checkpoint.every != "off" or checkpoint.every_steps > 0 or checkpoint.every_s > 0
    return RankMemory(scene.control.rank, scene.control.size, scene.local, free_bytes(scene), largest, micros, own,
                prefetch + 2 if prefetch else 1, saves)


def _cut(feed: Feed, config: Config) -> tuple[int, int, int]:
    """Return (samples of this rank's largest micro-batch, micro-batches of a step, samples of a step)."""
    n = feed.global_batch if feed.samples is None else min(feed.global_batch, feed.samples)
    cut = feed.cut_at(0)
    count = int(np.diff(cut.offsets(n))[feed.rank])
    bounds = cut.bounds(count, feed.rank)
    several = config.accumulate > 1 or config.micro_batch != 0
    return max((b - a for a, b in bounds), default=0), max(len(bounds), 2 if several else 1), count


def free_bytes(scene: MemoryProbeContext) -> int | None:
    """Return what this rank may hold in all, above what its imports take; None where that is unknown."""
    if scene.device.kind != "cpu":
        return int(memory.DEVICE_PART * scene.device.memory_bytes) or None
    room = memory.host_room_bytes(scene.local)
    return None if room is None else max(0, memory.resident_bytes() - memory.imported_bytes()) + room


def room_bytes(scene: MemoryProbeContext) -> int | None:
    """Return what this rank may take beyond what it holds now; None where that is unknown."""
    free = free_bytes(scene)
    base = memory.imported_bytes() if scene.device.kind == "cpu" else 0
    return None if free is None else max(0, free + base - _now(scene))


def way_of(scene: MemoryProbeContext, dp: DataParallel) -> Sharding:
    """Return how the replicas of the model stay one in ``dp``."""
    if not dp.buckets:
        return Sharding(wire=scene.wire.name)
    zero = cast(DividesState, dp) if dp.divides_state else None
    return Sharding(zero.stage if zero else 0, dp.buckets, [1.0] * scene.wire.size, scene.wire.name, dp.compression,
               dp.remembered_bytes(), zero.sizes_BP if zero else ())


def facts_of(scene: MemoryProbeContext, way: Sharding, measured: MeasuredMemory | None = None) -> MemoryFacts:
    """Return this rank's facts; without ``measured`` no more than follows from the model's tensors."""
    return MemoryFacts(model_of(scene), rank_of(scene), way, measured or MeasuredMemory())


def model_of(scene: MemoryProbeContext) -> Model:
    """Return the model of a scene, with the average that its run is to keep."""
    model: Model = scene.backend.model_bytes(scene.parts)
    return replace(model, average_bytes=average_bytes(model.specs)) if scene.config.ema else model


def measure(scene: MemoryProbeContext, model: Model, way: Sharding, with_blocks: bool = False) -> MeasuredMemory:
    """Compute a few samples' gradients and return what they took; less than a step's work, and no collective.

    ``with_blocks``: what recomputing each block would save, too, unless some are recomputed already.

    No more samples are tried than there seems to be room for by the first two. Where a device runs out of memory all
    the same, half as many are. Errors: what the backend calls out of memory, where one sample is too many.
    """
    held = _held(scene, model, way)
    most = max(1, _cut(scene.feed, scene.config)[0])
    before = _now(scene)
    first, peak = _first_pass(scene, min(LEAST_SAMPLES[0], most))  # compiles, and takes what is taken once
    most = most if first > 1 else 1
    own = max(0, _now(scene) - held)  # now: TensorFlow gives nothing back of what a larger pass has taken
    again = int(GRAPH_PART * max(0, own + held - before))  # training's own graph is made beside that of a trial
    sizes = _sizes(most, _at_most(scene, first, peak - before))

    def work() -> MeasuredMemory:
        found = _measured(scene, model, sizes, held + own, own, again)
        blocks = _blocks(scene, sizes[-1]) if with_blocks else ()
        return replace(found, blocks=blocks, block_samples=sizes[-1])

    while True:
        measured, _ = attempt(work, lambda error: sizes != [1] and scene.backend.out_of_memory(error),
                              scene.backend.free_cached)
        if measured is not None:
            return measured
        sizes = _sizes(most, max(1, sizes[-1] // 2))


def _first_pass(scene: MemoryProbeContext, n: int) -> tuple[int, int]:
    """Return (samples, most bytes held) of a pass of ``n`` samples, or of one where memory lacks for more."""
    peak, _ = attempt(lambda: _peak(scene, n), lambda error: n > 1 and scene.backend.out_of_memory(error),
                      scene.backend.free_cached)
    return (1, _peak(scene, 1)) if peak is None else (n, peak)


def _measured(scene: MemoryProbeContext, model: Model, sizes: list[int], held: int, own: int,
              again: int) -> MeasuredMemory:
    """Return what passes of ``sizes`` samples took beyond ``held`` bytes."""
    found = [scene.backend.traced(scene.parts, scene.sample(n)) for n in sizes]
    peaks = [max(0, _peak(scene, n) - held) for n in sizes]
    if any(trace is None for trace in found):
        traces = [MemoryTrace(n, np.array([peak], np.int64), ()) for n, peak in zip(sizes, peaks)]
        return MeasuredMemory(line(traces[0], traces[-1]), True, held_bytes=own + again)
    through = line(found[0], found[-1])
    return MeasuredMemory(through, False, _scratch(through, model, sizes, peaks), own)


def _blocks(scene: MemoryProbeContext, n: int) -> tuple[BlockCost, ...]:
    """Return what recomputing each block would save and cost with ``n`` samples; () where some are recomputed."""
    remat = scene.parts.remat
    return () if remat is None or remat.chosen else tuple(remat.costs(scene.sample(n)))


def roughly_fits(scene: MemoryProbeContext, facts: MemoryFacts) -> bool:
    """Return whether a micro-batch certainly fits, by one small pass whose first-time costs count for each sample."""
    most, left = facts.rank.micro_batch, room_bytes(scene)
    if left is None or not most:
        return True
    first, before = min(LEAST_SAMPLES[0], most), _now(scene)
    rise = max(0, _peak(scene, first) - before)
    model = facts.model
    to_come = (sum(model.param_bytes) + model.state_bytes() - scene.backend.state_now(scene.parts)
               + model.average_bytes - _average_now(scene, model))
    return rise * most // first + to_come <= left


def pass_bytes(scene: MemoryProbeContext, n: int) -> int:
    """Return the most bytes that a pass of ``n`` samples holds: of its tensors where they are counted, else of all
    there is in this process; to be compared with another pass.
    """
    trace = scene.backend.traced(scene.parts, scene.sample(n))
    return _peak(scene, n) if trace is None else int(trace.live_E.max(initial=0))


def _sizes(micro_batch: int, most: int) -> list[int]:
    """Return samples to measure with, ascending, ``most`` at most: two numbers, or one of a micro-batch of one."""
    found = {min(micro_batch, max(least, micro_batch // part)) for part, least in zip(PARTS, LEAST_SAMPLES)}
    return sorted(found if max(found) <= most else {max(1, most // 2), most})


def _at_most(scene: MemoryProbeContext, samples: int, rise: int) -> int:
    """Return the samples that there is room for, where ``samples`` took ``rise`` bytes, one-time costs included."""
    left = room_bytes(scene)
    if left is None or rise <= 0:
        return sys.maxsize
    return max(1, int(samples * left / rise))


def _scratch(through: MemoryLine, model: Model, sizes: list[int], peaks: list[int]) -> tuple[float, float]:
    """Bytes that a pass takes beyond its tensors: (for each sample, at least)."""
    grads_E = first_copies(through.made, len(through.base_E), model.param_bytes, ())
    beyond = [max(0, peak - through.peak(n, grads_E)) for n, peak in zip(sizes, peaks)]
    slope = (beyond[-1] - beyond[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.0
    return max(0.0, slope), float(max(beyond))


def _held(scene: MemoryProbeContext, model: Model, way: Sharding) -> int:
    """Bytes of tensors that this process holds now and that are counted by kind, and those of its imports."""
    own = way.stage < 2 and (way.wire != "shared" or way.compression != "none")
    lasting = sum(b.nbytes for b in way.buckets) if own else 0  # shared memory that nobody has written takes none
    base = memory.imported_bytes() if scene.device.kind == "cpu" else 0
    model_bytes = sum(model.param_bytes) + model.other_bytes + _average_now(scene, model)
    return base + model_bytes + scene.backend.state_now(scene.parts) + lasting


def _average_now(scene: MemoryProbeContext, model: Model) -> int:
    return model.average_bytes if scene.average is not None and scene.average.started else 0


def _now(scene: MemoryProbeContext) -> int:
    if scene.device.kind != "cpu":
        return int(scene.backend.peak_bytes(lambda: None))
    memory.give_back()
    return memory.resident_bytes()


def _peak(scene: MemoryProbeContext, n: int) -> int:
    """Most bytes that this process holds while it computes ``n`` samples' gradients."""
    batch = scene.sample(n)

    def work() -> None:
        scene.parts.stage.trial(batch)

    return memory.host_peak_bytes(work) if scene.device.kind == "cpu" else int(scene.backend.peak_bytes(work))


COLUMNS = ("block", "saves, predicted", "measured", "costs, predicted", "measured")
"""Headings of `rows`."""

REPEATS = 5

LONGEST_S = 60.0
"""Time after which what is left is not measured: TensorFlow traces a graph for each set of blocks."""


def rows(scene: MemoryProbeContext, costs: Sequence[BlockCost], n: int) -> list[list[str]]:
    """Return a row for each block and one for all: peak and time of a trial of ``n`` samples less than without.

    ``costs``: measured with ``n`` samples. Nothing is recomputed afterwards. Not collective.
    """
    remat = scene.parts.remat
    assert remat is not None
    remat.choose(())
    whole, begin = pass_bytes(scene, n), time.monotonic()
    found: list[list[str]] = []
    for names in [tuple(cost.name for cost in costs), *((cost.name,) for cost in costs)]:
        seconds = sum(cost.forward_s for cost in costs if cost.name in names)
        row = ["all" if not found else names[0], format_bytes(whole - peak_with(costs, names, whole)), "-",
               format_ms(seconds), "-"]
        if time.monotonic() - begin < LONGEST_S:
            remat.choose(names)
            row[2] = format_bytes(whole - pass_bytes(scene, n))
            row[4] = format_ms(_longer_s(scene, names, n))
        found.append(row)
    remat.choose(())
    return [*found[1:], found[0]]


def _longer_s(scene: MemoryProbeContext, names: Sequence[str], n: int) -> float:
    """Seconds by which a trial takes longer with these blocks recomputed: the median of pairs, one after the other."""
    remat, batch, seconds = scene.parts.remat, scene.sample(n), []
    assert remat is not None
    for _ in range(REPEATS + 1):  # the first pair may trace graphs
        pair = []
        for chosen in ((), names):
            remat.choose(chosen)
            begin = time.perf_counter()
            scene.parts.stage.trial(batch)
            pair.append(time.perf_counter() - begin)
        seconds.append(pair[1] - pair[0])
    return statistics.median(seconds[1:])
