"""Measurement of an exchange: links by kind of call, the compressors' own work, whole plans of buckets.

Every function is collective: the slowest rank's number decides about each turn, and all ranks return the same numbers.
`hvdtrain.planning.compressor_choice` decides about training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hvdtrain.comm import compressors
from hvdtrain.comm.collectives.base import NullCollectives, ReadyHandle
from hvdtrain.comm.collectives.lockstep import ring_bytes
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import (
    AllGather,
    AllReduce,
    AllToAll,
    Array,
    Collectives,
    Compressor,
    Control,
    Ops,
    ParamSpec,
    Request,
)
from hvdtrain.core.protocols.types import Bucket, itemsize
from hvdtrain.core.units import KIB, MIB
from hvdtrain.planning.compressor_choice import CompressorCost, pick_bucket
from hvdtrain.planning.linear import Link, Traffic, fit_link

Work = Callable[[Sequence[Array]], list[Array]]


SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB)
"""Bytes of the vector on each rank that a link is measured with."""

LONGEST_S = 0.3
"""Longest call that a larger one may follow."""

REPEATS = 9
BUDGET_S = 2.0
"""About the time of one sweep over links, and of one over bucket sizes; a call that has begun is not cut short."""

CODEC_BUDGET_S = 0.2
"""Seconds after which no further round of one compressor begins."""

MOST_ELEMENTS = 1 << 23
"""Compressors run on buckets of at most about so many elements; a larger model's are sampled, evenly."""

BUCKET_SIZES_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

AFTER_WARMUP = 1 << 30
"""Step beyond every warm-up."""


@dataclass(frozen=True)
class Sweep:
    """Result of `measure`: links by kind, costs by compressor, why others cannot be used, and its seconds."""

    links: dict[str, Link]
    costs: tuple[CompressorCost, ...]
    refused: dict[str, str]
    seconds: float


def measure(collectives: Collectives, ops: Ops, control: Control, buckets: Sequence[Bucket], config: Config,
            own: Callable[[str], Sequence[Bucket]] | None = None) -> Sweep:
    """Time every compressor on random gradients of ``buckets``' shapes, and the links that their requests need.

    ``own``: gives the buckets that a run with a compressor would have, where these are not ``buckets``.
    """
    begin = time.perf_counter()
    costs: list[CompressorCost] = []
    refused: dict[str, str] = {}
    for name in compressors.choices():
        compressor, refused[name] = _candidate(name, config, collectives, buckets)
        if compressor is None:
            continue
        theirs = buckets if own is None else own(name)
        sample = _sample(theirs)
        grads = _random(sample, ops)
        control.barrier(f"compression auto: {name}")  # ranks that share cores compute at once when they train, too
        cost = _cost(compressor, ops, collectives, theirs, sample, grads)
        lacking = {t.kind.partition(" ")[2] for t in cost.traffic if t.kind.startswith("allreduce")}
        lacking -= collectives.dtypes
        if lacking:
            refused[name] = f"{collectives.name} does not sum {min(lacking)}"
            continue
        codec_s, = slowest(control, [cost.codec_s])
        costs.append(replace(cost, codec_s=codec_s))
    links = measure_links(collectives, ops, control, sorted({t.kind for c in costs for t in c.traffic}))
    seconds = time.perf_counter() - begin
    return control.bcast(Sweep(links, tuple(costs), {n: why for n, why in refused.items() if why}, seconds))


def _random(buckets: Sequence[Bucket], ops: Ops) -> list[Array]:
    draw = np.random.default_rng(0)
    return [ops.cast(ops.from_host(draw.standard_normal(b.n, np.float32)), b.dtype) for b in buckets]


def _candidate(name: str, config: Config, collectives: Collectives,
               buckets: Sequence[Bucket]) -> tuple[Compressor | None, str]:
    """Return (compressor, "") or (None, why it is no candidate here; "" for one that never is)."""
    try:
        compressor = compressors.create(name, config)
    except UserError as error:
        return None, str(error)
    if compressor.not_auto or not compressor.auto_order:
        return None, compressor.not_auto
    taken: frozenset[str] | None = compressor.dtypes
    dtypes = {b.dtype for b in buckets}
    if taken is not None and dtypes - taken:
        return None, f"gradients of type {min(dtypes - taken)}"
    if compressor.reductions - collectives.reductions:
        return None, f"{collectives.name} lacks {min(compressor.reductions - collectives.reductions)}"
    return compressor, ""


class _Listening(NullCollectives):
    """Loopback transport: returns its input and records each call as (kind, round, bytes)."""

    def __init__(self, real: Collectives) -> None:
        super().__init__(0, real.size)
        self.in_graph = real.in_graph
        self.asked: list[tuple[str, int, int]] = []

    def allreduce(self, flat_N: Array, name: str, op: str = "sum") -> ReadyHandle:
        self._keep("allreduce", flat_N, name)
        return super().allreduce(flat_N, name, op)

    def allgather(self, x_K: Array, name: str) -> ReadyHandle:
        self._keep("allgather", x_K, name)
        return super().allgather(x_K, name)

    def alltoall(self, x_PK: Array, name: str) -> ReadyHandle:
        self._keep("alltoall", x_PK, name)
        return super().alltoall(x_PK, name)

    def _keep(self, kind: str, x: Array, name: str) -> None:
        dtype = _dtype(x)
        nbytes = int(np.prod([int(n) for n in x.shape], dtype=np.int64)) * itemsize(dtype)
        self.asked.append((_kind(kind, dtype), int(name.rpartition(".r")[2]), ring_bytes(kind, nbytes, self.size)))


def _cost(compressor: Compressor, ops: Ops, collectives: Collectives, buckets: Sequence[Bucket],
          sample: Sequence[Bucket], grads: Sequence[Array]) -> CompressorCost:
    """Return this rank's cost of one step of ``compressor``, from the buckets of ``sample``; none costs nothing by
    itself.

    A transport that overlaps has the requests of all buckets at once: they start up together, once a round.
    """
    size = collectives.size
    wire = _Listening(collectives)
    reducer = Reducer([replace(b, group="auto") for b in sample], compressor, wire, ops)
    reducer.stage = compressor.stage(AFTER_WARMUP)
    codec_s = _codec_seconds(reducer, wire, grads)
    part = sum(b.n for b in buckets) / sum(b.n for b in sample)
    calls = len(buckets) / len(sample)
    sent = sum(compressor.wire_bytes(b, size) for b in buckets)
    sampled = sum(compressor.wire_bytes(b, size) for b in sample)
    traffic = []
    for kind, later in sorted({(kind, round_ > 0) for kind, round_, _ in wire.asked}):
        same = [(round_, nbytes) for k, round_, nbytes in wire.asked if (k, round_ > 0) == (kind, later)]
        starts = len({round_ for round_, _ in same}) if collectives.overlaps else calls * len(same)
        traffic.append(Traffic(kind, later, starts, sum(n for _, n in same) * (sent / sampled if sampled else 1.0)))
    return CompressorCost(compressor.name, 0.0 if compressor.in_place else part * codec_s, tuple(traffic), sent,
                compressor.numerics)


def _codec_seconds(reducer: Reducer, wire: _Listening, grads: Sequence[Array]) -> float:
    """Return the median seconds of encoding and decoding ``grads``; one round's requests stay in ``wire.asked``.

    Inside a graph where training has the exchange in one (``ops.compiled``). Otherwise the sums are copied once,
    because a step copies what does not arrive in its own buckets.
    """
    ops = reducer.ops
    exact, in_graph = reducer.compressor.in_place, _in_graph(wire, ops)

    def once(flats: Sequence[Array]) -> list[Array]:
        wire.asked.clear()
        sums = exchange(reducer, flats)
        return sums if exact or in_graph else [ops.pack([sum_N]) for sum_N in sums]

    work = _as_in_training(once, wire, ops)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 2 or (time.perf_counter() - began < CODEC_BUDGET_S and len(seconds) <= REPEATS):
        seconds.append(_timed(work, grads, ops))
        if not in_graph and seconds[0] > CODEC_BUDGET_S:
            break
    return statistics.median(seconds[1:] or seconds)  # the first one warms up


def _sample(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return all buckets, or about `MOST_ELEMENTS` worth, taken evenly."""
    return list(buckets[::max(1, -(-sum(b.n for b in buckets) // MOST_ELEMENTS))])


def measure_links(collectives: Collectives, ops: Ops, control: Control, kinds: Sequence[str],
                  budget_s: float = BUDGET_S) -> dict[str, Link]:
    """Fit a `Link` for each of ``kinds`` ("allreduce DTYPE", "allgather", "alltoall") from real calls."""
    begin = time.perf_counter()
    links = {}
    for i, kind in enumerate(kinds):
        used_s, = slowest(control, [time.perf_counter() - begin])
        probe = _LinkProbe(collectives, ops, kind)
        links[kind] = fit_link(_points(probe, control, max(0.0, budget_s - used_s) / (len(kinds) - i)))
    return control.bcast(links)


def _points(probe: _LinkProbe, control: Control, budget_s: float) -> list[tuple[float, float]]:
    """Return (sent bytes, median seconds on the slowest rank) of growing vectors, as the time allows, at least two.

    First one call of each size, to see how far it goes; then the repeats, the largest first: by then a link that lets a
    burst through before it slows down (a token bucket) shows the speed that lasts.
    """
    begin = time.perf_counter()
    probe.seconds(SIZES[0])  # connects, or traces
    first_s: list[float] = []
    used_s = 0.0
    for nbytes in SIZES:
        if len(first_s) >= 2:
            next_s = first_s[-1] * nbytes / SIZES[len(first_s) - 1]
            if first_s[-1] > LONGEST_S or used_s + 2 * next_s > budget_s:
                break
        seconds, used_s = slowest(control, [probe.seconds(nbytes), time.perf_counter() - begin])
        first_s.append(seconds)
    points = []
    for i in reversed(range(len(first_s))):
        fair_s = (budget_s - used_s) / (i + 1)
        repeats = min(REPEATS, max(1, int(fair_s / max(first_s[i], 1e-9))))
        each = [probe.seconds(SIZES[i]) for _ in range(repeats)]
        seconds, used_s = slowest(control, [statistics.median(each), time.perf_counter() - begin])
        points.append((float(probe.wire_bytes(SIZES[i])), seconds))
    return points


class _LinkProbe:
    """Calls of one kind with vectors of any size, kept between the calls."""

    def __init__(self, collectives: Collectives, ops: Ops, kind: str) -> None:
        self._wire = Transport(collectives, ops)
        self._kind, _, dtype = kind.partition(" ")
        self._dtype = dtype or "float32"
        self._name = f"auto.link.{kind.replace(' ', '.')}"
        self._requests: dict[int, Request] = {}

    def wire_bytes(self, nbytes: int) -> int:
        """Return the bytes a rank sends in a call of about ``nbytes``."""
        K, size = self._columns(nbytes), self._wire.collectives.size
        rows = 1 if self._kind in ("allreduce", "allgather") else size
        return ring_bytes(self._kind, rows * K * itemsize(self._dtype), size)

    def seconds(self, nbytes: int) -> float:
        request = self._requests.get(nbytes)
        if request is None:
            request = self._requests[nbytes] = self._request(nbytes)
        begin = time.perf_counter()
        result = self._wire.arrived(self._wire.issue(request, self._name).wait())
        settle(self._wire.ops, result)
        return time.perf_counter() - begin

    def _columns(self, nbytes: int) -> int:
        """Return the elements of the vector, or of one of its P rows: the vector, or what is gathered, has ``nbytes``.
        """
        n = nbytes // itemsize(self._dtype)
        return n if self._kind == "allreduce" else max(1, n // self._wire.collectives.size)

    def _request(self, nbytes: int) -> Request:
        """Return a request of zeros; for a sum, in the collectives' own memory where they have some, as in training."""
        K, ops, wire = self._columns(nbytes), self._wire.ops, self._wire.collectives
        if self._kind == "allreduce":
            own = wire.buffer(K, self._dtype) if wire.host else None
            return AllReduce(ops.zeros(K, self._dtype) if own is None else ops.from_host(own))
        if self._kind == "allgather":
            return AllGather(ops.zeros(K, self._dtype))
        return AllToAll(ops.reshape(ops.zeros(wire.size * K, self._dtype), (wire.size, K)))


def pick_bucket_mb(collectives: Collectives, ops: Ops, control: Control,
                   params: Sequence[ParamSpec]) -> tuple[float, str]:
    """Return the bucket size in MiB with the cheapest exchange of ``params``, and its numbers; collective.

    Whole exchanges are measured where that takes about `BUDGET_S`; over a slow transport, or one that sums in memory of
    its own, which a trial would use up, they are predicted from the link instead.
    """
    plans: dict[float, list[Bucket]] = {}
    for mb in BUCKET_SIZES_MB:
        plan = plan_buckets(params, mb)
        if all([b.params for b in plan] != [b.params for b in other] for other in plans.values()):
            plans[mb] = plan
    if collectives.size == 1 or len(plans) == 1:
        why = "one rank sends nothing" if collectives.size == 1 else f"from {min(plans):g} MiB on it is a single bucket"
        return (max(plans) if collectives.size == 1 else min(plans)), why
    begin = time.perf_counter()
    kinds = sorted({f"allreduce {b.dtype}" for b in next(iter(plans.values()))})
    links = measure_links(collectives, ops, control, kinds, BUDGET_S / 4)

    def seconds(bucket: Bucket) -> float:
        return links[f"allreduce {bucket.dtype}"].seconds(ring_bytes("allreduce", bucket.nbytes, collectives.size))

    totals_s = {mb: sum(map(seconds, plan)) for mb, plan in plans.items()}
    used_s, = slowest(control, [time.perf_counter() - begin])
    apart = collectives.host and collectives.buffer(1, "float32") is not None
    measured = not apart and 3 * sum(totals_s.values()) < BUDGET_S - used_s
    if measured:
        for left, (mb, plan) in zip(range(len(plans), 0, -1), plans.items()):
            totals_s[mb] = _exchange_seconds(collectives, ops, control, plan, mb, (BUDGET_S - used_s) / left)
            used_s, = slowest(control, [time.perf_counter() - begin])
    best_mb, numbers = pick_bucket(totals_s, {mb: seconds(plan[-1]) for mb, plan in plans.items()},
                                   collectives.overlaps)
    how = "measured" if measured else "predicted from the link"
    return control.bcast((best_mb, f"an exchange, {how}: {numbers}"))


def _exchange_seconds(collectives: Collectives, ops: Ops, control: Control, plan: Sequence[Bucket], mb: float,
                      budget_s: float) -> float:
    """Return the median seconds, on the slowest rank, of an exchange of ``plan``, after two to warm up."""
    plan = [replace(bucket, group=f"auto.{mb:g}mb") for bucket in plan]
    reducer = Reducer(plan, compressors.create("none", Config()), collectives, ops)
    work = _as_in_training(partial(exchange, reducer), collectives, ops)
    timed = partial(_timed, work, [ops.zeros(b.n, b.dtype) for b in plan], ops)
    warm_s, used_s = timed(), 0.0
    warm_s, used_s = slowest(control, [timed(), warm_s])
    repeats = min(REPEATS, max(1, int((budget_s - used_s - warm_s) / max(warm_s, 1e-9))))
    median_s, = slowest(control, [statistics.median(timed() for _ in range(repeats))])
    return median_s


def exchange(reducer: Reducer, flats: Sequence[Array]) -> list[Array]:
    """Return the sums of one vector for each bucket."""
    for i, flat_N in enumerate(flats):
        reducer.start(i, flat_N)
    return reducer.finish()


def _as_in_training(work: Work, collectives: Collectives, ops: Ops) -> Work:
    """Return ``work`` as one graph where training has the exchange in one, else as it is."""
    return getattr(ops, "compiled")(work) if _in_graph(collectives, ops) else work


def _in_graph(collectives: Collectives, ops: Ops) -> bool:
    return collectives.in_graph and hasattr(ops, "compiled")


def _timed(work: Work, flats: Sequence[Array], ops: Ops) -> float:
    """Return the seconds of ``work`` until its results are there."""
    begin = time.perf_counter()
    for sum_N in work(list(flats)):
        settle(ops, sum_N)
    return time.perf_counter() - begin


def slowest(control: Control, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number over the ranks, the same on every rank."""
    return [max(column) for column in zip(*control.gather([float(x) for x in numbers]))]


def settle(ops: Ops, x: Array) -> None:
    """Return once ``x`` has been computed: an accelerator works behind the program's back, host memory does not."""
    device = str(getattr(x, "device", "")).lower()
    if "cuda" in device or "gpu" in device:
        ops.to_host(ops.reshape(x, (-1,))[:1])


def _kind(kind: str, dtype: str) -> str:
    """Return the link of a call: sums are measured by dtype, since adding takes part in them; moves by bytes alone."""
    return f"{kind} {dtype}" if kind == "allreduce" else kind


def _dtype(x: Array) -> str:
    return getattr(x.dtype, "name", None) or str(x.dtype).removeprefix("torch.")
