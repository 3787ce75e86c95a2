"""Memory of a rank by kind, forecast from a few numbers about model, rank and strategy. Pure.

The most of a step is at one of two moments: in forward and backward, or in the update, with the optimizer's scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.core.protocols import BlockCost, ParamSpec
from hvdtrain.core.protocols.types import Bucket, itemsize
from hvdtrain.core.units import Footprint
from hvdtrain.planning import shards

MARGIN = {"torch": 0.17, "tensorflow": 0.08, "numpy": 0.06}
"""Part of what is allocated and freed in a step that fragmentation of the heap takes beside it, as measured on CPUs."""

SCRATCH = {"torch": 5.0, "tensorflow": 3.0, "numpy": 1.0}
"""Copies of the largest tensor that an update makes on its way, and what fragmentation of the heap makes of them."""


def forecast(facts: MemoryFacts) -> Footprint:
    """Return the memory of this rank at the step's peak."""
    model, rank, way, measured = facts.model, facts.rank, facts.way, facts.measured
    param_bytes = model.param_bytes
    parameters = sum(param_bytes) + model.other_bytes + model.average_bytes
    sizes_BP = way.cut() if way.stage else []
    spans = shards.spans(way.buckets, sizes_BP, rank.rank, len(model.specs)) if way.stage else None
    own_B = [sizes_P[rank.rank] * (b.nbytes // max(1, b.n)) for b, sizes_P in zip(way.buckets, sizes_BP)]
    state = model.state_bytes(spans)
    divided = way.stage == 2 and rank.micros == 1
    gradients = sum(own_B) if divided else sum(param_bytes)
    step = max(0, _pass(facts, own_B, divided) - measured.spared)
    largest = max(param_bytes, default=0)
    if way.stage:
        largest = max(own_B, default=0)
    in_graph = model.framework == "tensorflow" and not way.buckets  # backward lets go of what the update has read
    update = 0 if in_graph else int(SCRATCH[model.framework] * largest)
    scratch = int(max(measured.scratch[0] * rank.micro_batch, measured.scratch[1]))
    workspace = (scratch + update + int(MARGIN[model.framework] * (step + scratch)) + measured.held_bytes
                 + rank.batch_bytes * rank.ahead)
    copies = 0
    if rank.saves:  # rank 0 copies what all hold alike; what is divided each owner copies
        copies = (parameters + state) if rank.rank == 0 else state if way.stage else 0
    return Footprint(parameters, gradients, state, step, _buckets(facts, divided), workspace + max(0, copies - step))


def _pass(facts: MemoryFacts, own_B: Sequence[int], divided: bool) -> int:
    """Return the peak of forward and backward without parameters, state and the gradients' lasting memory."""
    model, rank, way, measured = facts.model, facts.rank, facts.way, facts.measured
    param_bytes = model.param_bytes
    if measured.line is None:
        return 0
    line = measured.line
    total = sum(param_bytes)
    if measured.with_gradients:  # of the framework's own, at the end of backward
        beside = 0 if way.buckets else total
        return max(0, line.peak(rank.micro_batch) - beside)
    n = len(line.base_E)
    groups = [b.params for b in way.buckets]
    held_E: np.ndarray = first_copies(line.made, n, param_bytes, groups)
    if divided:
        held_E = held_E + _done(line.made, n, way.buckets, own_B) - sum(own_B)
    elif not way.buckets:
        held_E = held_E - total  # all of them are counted as gradients
    return max(0, line.peak(rank.micro_batch, held_E))


def _done(made: Sequence[tuple[int, int]], n_events: int, buckets: Sequence[Bucket],
          own_B: Sequence[int]) -> np.ndarray:
    """Return int64 (E,): bytes of this rank's slices of the buckets summed by each moment."""
    held_E = np.zeros(n_events + 1, np.int64)
    at = {i: event for event, i in made}
    for bucket, own in zip(buckets, own_B):
        held_E[min(n_events, max((at.get(i, n_events) for i in bucket.params), default=n_events))] += own
    found_E: np.ndarray = np.cumsum(held_E)[:n_events]
    return found_E


def _buckets(facts: MemoryFacts, divided: bool) -> int:
    """Return the memory of the exchange without the gradients themselves."""
    rank, way = facts.rank, facts.way
    if not way.buckets:
        return 0
    total, largest = sum(b.nbytes for b in way.buckets), max(b.nbytes for b in way.buckets)
    held = way.remembered
    if way.compression != "none":
        held += 3 * largest + (0 if divided else total)  # sums are vectors of their own
    elif way.wire == "shared" and rank.local > 1:
        # Of each other rank's row this one reads and writes its own stripe.
        rows = largest if divided else total
        held += rows * (rank.local - 1) // rank.local
    elif way.wire != "null":
        held += largest
    if divided:
        held += largest  # the vector in flight
    if way.stage:
        held += 2 * largest  # parameters in transfer: own shard and the whole
    return held


@dataclass(frozen=True)
class Slots:
    """Optimizer state of one parameter: bytes for each of its elements, and fixed bytes."""

    per_element: float
    fixed: int = 0

    def bytes(self, n: int) -> int:
        """Return the bytes for a slice of ``n`` elements; none for an empty one."""
        return round(self.per_element * n) + self.fixed if n else 0


@dataclass(frozen=True)
class Model:
    """A model with its optimizer, on one rank's device.

    ``specs``: trainable tensors. ``other_bytes``: frozen parameters and buffers. ``slots``: of each of ``specs``;
    ``common_bytes``: held once by the optimizer. ``elementwise``: its state can be divided anywhere. ``average_bytes``:
    moving average of the weights, which ZeRO does not divide. ``norm_channels``: of each BatchNorm layer.
    """

    specs: Sequence[ParamSpec]
    other_bytes: int
    slots: Sequence[Slots]
    common_bytes: int = 0
    elementwise: bool = True
    framework: str = "torch"
    average_bytes: int = 0
    norm_channels: tuple[int, ...] = ()

    @property
    def param_bytes(self) -> list[int]:
        """Of each trainable tensor."""
        return [spec.n * itemsize(spec.dtype) for spec in self.specs]

    def state_bytes(self, spans: Sequence[tuple[int, int]] | None = None) -> int:
        """Return the bytes of optimizer state for whole tensors, or for one slice [begin, end) of each."""
        lengths = [spec.n for spec in self.specs] if spans is None else [end - begin for begin, end in spans]
        return sum(slot.bytes(n) for slot, n in zip(self.slots, lengths)) + self.common_bytes


@dataclass(frozen=True)
class MeasuredMemory:
    """Measurements of a few samples on this rank.

    ``line``: bytes of a pass; None: not measured. ``with_gradients``: gradients are included. ``scratch``: bytes of
    kernels beyond the line for each sample, and at least. ``held_bytes``: of the process outside counted tensors.
    ``blocks``: saving and cost of recomputing each block with ``block_samples``. ``spared``: bytes that recomputing
    saves in a pass.
    """

    line: MemoryLine | None = None
    with_gradients: bool = False
    scratch: tuple[float, float] = (0.0, 0.0)
    held_bytes: int = 0
    blocks: tuple[BlockCost, ...] = ()
    block_samples: int = 1
    spared: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Place and memory of a rank, of ``size``, ``local`` of which share its host. ``free_bytes``: may take in all, or
    None.

    ``micro_batch``: samples of its largest micro-batch; ``micros``: micro-batches of a step. ``batch_bytes``: samples
    of a step; ``ahead``: steps in memory. ``saves``: state is copied for checkpoints in the background.
    """

    rank: int = 0
    size: int = 1
    local: int = 1
    free_bytes: int | None = None
    micro_batch: int = 1
    micros: int = 1
    batch_bytes: int = 0
    ahead: int = 1
    saves: bool = False


@dataclass(frozen=True)
class Sharding:
    """Stage 0 (every rank holds all), 1 or 2 of ZeRO, with transport and compressor.

    ``buckets``: none if nothing is sent. ``parts_P``: shares of the state by rank; ``sizes_BP``: elements of each
    bucket by rank, if divided already. ``remembered``: bytes of the compressor's state.
    """

    stage: int = 0
    buckets: Sequence[Bucket] = ()
    parts_P: Sequence[float] = ()
    wire: str = "null"
    compression: str = "none"
    remembered: int = 0
    sizes_BP: Sequence[Sequence[int]] = ()

    def cut(self) -> Sequence[Sequence[int]]:
        """Return the elements of each bucket that each rank owns in ZeRO."""
        return self.sizes_BP or [shards.sizes(b.n, self.parts_P) for b in self.buckets]


@dataclass(frozen=True)
class MemoryFacts:
    """Model, rank, strategy and measurements."""

    model: Model
    rank: RankMemory = field(default_factory=RankMemory)
    way: Sharding = field(default_factory=Sharding)
    measured: MeasuredMemory = field(default_factory=MeasuredMemory)


@dataclass(frozen=True)
class MemoryTrace:
    """A pass of ``samples``: ``live_E`` bytes after each of E allocations, without the gradients of parameters.

    ``made``: (allocations before it, index of the parameter) for each gradient, in order.
    """

    samples: int
    live_E: np.ndarray
    made: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MemoryLine:
    """Bytes at each moment of a pass of any number of samples: ``base_E`` + n x ``slope_E``.

    A pass of n samples runs the same operations as one of m, on tensors linear in the samples: two small passes tell
    all.
    """

    base_E: np.ndarray
    slope_E: np.ndarray
    made: tuple[tuple[int, int], ...]

    def live_E(self, samples: float) -> np.ndarray:
        """Return the bytes of a pass of so many samples, without gradients; none are below 0."""
        return np.maximum(0.0, self.base_E + samples * self.slope_E)

    def peak(self, samples: float, held_E: np.ndarray | float = 0.0) -> int:
        """Return the most bytes of a pass, with ``held_E`` beside them at each moment."""
        live_E = self.live_E(samples) + held_E
        return int(live_E.max()) if live_E.size else 0


def line(small: MemoryTrace, large: MemoryTrace) -> MemoryLine:
    """Return the line through two traces; through their peaks alone if they differ in more than sizes.

    With one size twice it is proportional to the samples.
    """
    a, b = small, large
    if len(a.live_E) != len(b.live_E) or a.made != b.made:
        ends = tuple((1, i) for _, i in b.made)
        a, b = (MemoryTrace(t.samples, np.array([t.live_E.max(initial=0)]), ends) for t in (a, b))
    if a.samples == b.samples:
        return MemoryLine(np.zeros(len(b.live_E)), b.live_E / max(1, b.samples), b.made)
    slope_E = (b.live_E - a.live_E) / float(b.samples - a.samples)
    return MemoryLine(a.live_E - a.samples * slope_E, slope_E, b.made)


def first_copies(made: Sequence[tuple[int, int]], n_events: int, param_bytes: Sequence[int],
                 groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Return int64 (E,): bytes of gradients that wait at each moment until all of their group have been made.

    ``groups``: parameters by bucket: when the last of a bucket is there, all are copied into it and freed. Without
    groups gradients stay. The last group is copied when backward has ended.
    """
    held_E = np.zeros(n_events + 1, np.int64)
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    missing = [set(group) for group in groups]
    waiting = [0] * len(groups)
    for at, i in made:
        held_E[min(at, n_events)] += param_bytes[i]
        if i not in group_of:
            continue
        g = group_of[i]
        waiting[g] += param_bytes[i]
        missing[g].discard(i)
        if not missing[g] and g + 1 < len(groups):  # let go after the next allocation at the earliest
            held_E[min(at + 1, n_events)] -= waiting[g]
    found_E: np.ndarray = np.cumsum(held_E)[:n_events] if n_events else held_E[:0]
    return found_E
