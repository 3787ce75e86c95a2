"""Estimate of a set-up: whether it fits, its step as an interval, hours, cost and energy of a number of samples. Pure.

The step is played by `hvdtrain.planning.simulator`, memory is the memory plan's; alternatives are left to
`hvdtrain.planning.hardware.alternatives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.core.units import Footprint, format_bytes
from hvdtrain.planning import shards
from hvdtrain.planning.batch import plan as batch
from hvdtrain.planning.hardware.catalogue import Device
from hvdtrain.planning.hardware.rates import RankRate, Rates, in_range
from hvdtrain.planning.hardware.workload import batches_of
from hvdtrain.planning.memory.forecast import MemoryFacts, RankMemory, Sharding, forecast
from hvdtrain.planning.simulator import (
    Exchange,
    Failures,
    Rank,
    Saves,
    Scene,
    Stages,
    job,
    save_interval_s,
    step,
)

FORWARD = 1 / 3
"""Fraction of forward and backward that forward takes: backward multiplies twice as much."""

FLIGHT = 4
"""Micro-batches of a pipeline per stage: its idle share is then below a fifth."""


@dataclass(frozen=True)
class SiteHost:
    """A host: a device for each rank. ``price_per_hour``, ``power_w``, ``mtbf_hours``: of the host; None: unknown."""

    name: str
    devices: tuple[Device, ...]
    price_per_hour: float | None = None
    power_w: float | None = None
    mtbf_hours: float | None = None

    @property
    def watts(self) -> float | None:
        """Return the power of the host, or of its devices at most; None where one is unknown."""
        if self.power_w is not None:
            return self.power_w
        return sum(d.power_w for d in self.devices) if all(d.power_w for d in self.devices) else None


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training that a plan varies. ``zero``: stage, 0: none. ``stages``: of a pipeline over ranks.

    ``shares``: of ranks, by number; (): equal. ``balance``: shares by speed. ``recompute``: fraction of forward that
    activation checkpointing computes again; ``recompute_timed``: calibrated lines have it. ``change``: of the
    measured memory, such as that of activations in bf16. ``save_steps``, ``save_every_s``: between checkpoints; 0:
    none. ``micro_batch``: at most so many samples; 0: any. ``micros``: of a pipeline's replica; 0: by its stages.
    ``epoch_samples``: of an epoch, whose last batch is smaller; 0: unknown. ``save_auto``: saves as often as
    `save_interval_s`, of ``save_mtbf_s``. ``restart_s``: from a failure of a host until training continues.
    """

    global_batch: int
    precision: str = "fp32"
    accumulate: int = 1
    balance: bool = False
    shares: tuple[float, ...] = ()
    zero: int = 0
    compression: str = "none"
    recompute: float = 0.0
    recompute_timed: bool = False
    stages: int = 1
    change: Callable[[MemoryFacts], MemoryFacts] | None = None
    save_steps: int = 0
    save_every_s: float = 0.0
    micro_batch: int = 0
    micros: int = 0
    sync_batchnorm: bool = False
    epoch_samples: int = 0
    save_auto: bool = False
    save_mtbf_s: float = 0.0
    restart_s: float = 0.0


@dataclass(frozen=True)
class RankMemoryPlan:
    """The rank that is nearest to its limit. ``free``: bytes that it may hold; None: unknown."""

    rank: int
    need: Footprint
    free: int | None

    @property
    def fits(self) -> bool | None:
        """Return whether it fits; None: unknown."""
        return None if self.free is None else self.need.total <= self.free

    @property
    def load(self) -> float:
        """Return the fraction of its memory that the rank takes."""
        return self.need.total / max(1, self.free or 1) if self.free is not None else 0.0


@dataclass(frozen=True)
class Estimate:
    """Estimate of a set-up. ``low_s``, ``high_s``: None where something was assumed. ``parts``: seconds by cause.

    ``hours``, ``cost``, ``energy_kwh``: None without samples, a price of each host, or the power of each.
    ``shares``: samples by rank. ``failures``: expected number; None without a mean time between them.
    """

    fits: bool | None
    low_s: float | None
    mid_s: float
    high_s: float | None
    samples_per_s: float
    efficiency: float
    hours: float | None
    cost: float | None
    energy_kwh: float | None
    assumptions: tuple[str, ...]
    parts: dict[str, float]
    memory: RankMemoryPlan
    shares: tuple[int, ...]
    failures: float | None = None

    @property
    def assumed(self) -> bool:
        """Return whether the step was estimated from assumptions."""
        return bool(self.assumptions)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of ``--json``."""
        need = self.memory.need
        return {"fits": self.fits, "step_s": {"low": self.low_s, "mid": self.mid_s, "high": self.high_s},
                "samples_per_s": self.samples_per_s, "efficiency": self.efficiency, "hours": self.hours,
                "cost": self.cost, "energy_kwh": self.energy_kwh, "failures": self.failures, "assumed": self.assumed,
                "assumptions": list(self.assumptions), "step_parts_s": self.parts,
                "memory": {"rank": self.memory.rank, "need_bytes": need.total, "free_bytes": self.memory.free},
                "samples_by_rank": _folded(self.shares)}


def estimate(hosts: Sequence[SiteHost], settings: TrainingSettings, rates: Rates, samples: int) -> Estimate:
    """Return the estimate of training ``samples`` samples, 0 for an unknown number; `UserError` where a rate is
    unknown.
    """
    devices = [device for host in hosts for device in host.devices]
    paces = _paces(hosts, settings, rates)
    played = _piped if settings.stages > 1 else _unpartitioned
    scene, said = played(hosts, settings, rates, paces)
    if settings.stages > 1:
        memory = _stage_memory(devices, settings, rates)
    else:
        _within_range(scene.ranks, paces, devices)
        memory = _memory(hosts, scene, settings, rates)
    batches = [(scene if n == settings.global_batch else played(hosts, replace(settings, global_batch=n), rates,
                                                                paces)[0], steps)
               for n, steps in batches_of(samples, settings.global_batch, settings.epoch_samples).items()]
    return _outcome(hosts, scene, batches, memory, said, paces)


def _unpartitioned(hosts: Sequence[SiteHost], settings: TrainingSettings, rates: Rates,
                   paces: Sequence[RankRate]) -> tuple[Scene, tuple[str, ...]]:
    """Return the scene of a step in which each rank holds the whole model, and the assumptions behind it."""
    devices = [device for host in hosts for device in host.devices]
    lines = [pace.line.scaled(1 + _again(settings, pace)) for pace in paces]
    wiring = rates.wiring([host.devices for host in hosts])
    divided = _divided(lines, settings, len(devices))
    codec, cast = rates.codec(settings.compression if len(devices) > 1 else "none", devices)
    numbers = [number for number, host in enumerate(hosts) for _ in host.devices]
    ranks = tuple(Rank(number, line, part.samples, part.accumulate, _updates(pace, settings, len(devices)),
                       accumulate_s=pace.accumulate_s)
                  for number, line, part, pace in zip(numbers, lines, divided.parts, paces))
    nbytes = codec.bucket_bytes or tuple(bucket.nbytes for bucket in rates.workload.buckets)
    zeros = [pace.zero for pace in paces if pace.zero is not None and settings.zero]
    # A calibrated line has the waits of its layers in it.
    layers = rates.workload.norm_bytes if settings.sync_batchnorm and any(pace.assumed for pace in paces) else ()
    overlaps = wiring.overlaps if settings.zero < 2 or settings.accumulate > 1 or not zeros else zeros[0].overlaps
    exchange = Exchange(wiring.transport, nbytes, wiring.within, wiring.between, overlaps, codec.codec_s, codec.ratio,
                        settings.zero, copy_s=max((one.copy_s for one in zeros), default=0.0), later_s=codec.later_s,
                        layer_bytes=layers, late=wiring.late)
    scene = Scene(ranks, exchange, saves=_saves(settings, paces), failures=_failures(hosts, settings),
                  error=max(pace.error for pace in paces))
    return scene, (*_said(paces), *wiring.assumed, *([cast] if cast else []))


def _failures(hosts: Sequence[SiteHost], settings: TrainingSettings) -> Failures | None:
    """Return the failures of any of ``hosts``; None where no host has a mean time between them."""
    per_hour = sum(1 / host.mtbf_hours for host in hosts if host.mtbf_hours)
    return Failures(3600 * len(hosts) / per_hour, settings.restart_s) if per_hour else None


def _saves(settings: TrainingSettings, paces: Sequence[RankRate]) -> Saves | None:
    """Return the checkpoints of a training: one blocks it for the copy, or until the one before is written."""
    blocks_s, write_s = (max(pace.save_s[i] for pace in paces) for i in (0, 1))
    every_s = settings.save_every_s
    if settings.save_auto:
        every_s = save_interval_s(blocks_s, write_s, settings.save_mtbf_s)
    if not (settings.save_steps or every_s):
        return None
    waits_s = max(0.0, write_s - every_s) if every_s else 0.0
    return Saves(blocks_s + waits_s, settings.save_steps, 0.0 if settings.save_steps else every_s)


def _outcome(hosts: Sequence[SiteHost], scene: Scene, batches: Sequence[tuple[Scene, int]], memory: RankMemoryPlan,
             said: Sequence[str], paces: Sequence[RankRate]) -> Estimate:
    """Return the estimate. ``scene``: of a whole batch; ``batches``: of each size of a batch, with its steps."""
    steps = sum(n for _, n in batches)
    jobs = [(job(one, steps), n / steps) for one, n in batches]
    found = job(scene, steps).step if steps else step(scene)
    fixed_s = sum(pace.fixed_s for pace in paces) / len(paces)
    parts = {**found.parts, "update": found.parts["update"] - fixed_s, "other": fixed_s}
    hours = cost = kwh = failures = None
    if steps:
        hours = sum(share * made.mid_hours for made, share in jobs)
        failures = sum(share * made.failures for made, share in jobs) if scene.failures else None
        if not math.isfinite(hours):
            raise UserError(f"hosts that fail so often that {steps:,} steps never end", "saves between two failures",
                            "set --checkpoint.every_steps lower, or correct mtbf_hours and --mtbf")
        prices, watts = [host.price_per_hour for host in hosts], [host.watts for host in hosts]
        if None not in prices:
            cost = hours * sum(price for price in prices if price is not None)
        if None not in watts:
            kwh = hours * sum(power for power in watts if power is not None) / 1000
    exact = not said
    return Estimate(memory.fits, found.low_s if exact else None, found.mid_s, found.high_s if exact else None,
                   found.samples_per_s, found.efficiency, hours, cost, kwh, tuple(dict.fromkeys(said)),
                   {name: max(0.0, seconds) for name, seconds in parts.items()}, memory,
                   tuple(rank.samples for rank in scene.ranks), failures)


def _paces(hosts: Sequence[SiteHost], settings: TrainingSettings, rates: Rates) -> list[RankRate]:
    known: dict[tuple[str, int], RankRate] = {}
    found = []
    for host in hosts:
        for device in host.devices:
            key = device.name, len(host.devices)
            if key not in known:
                known[key] = rates.pace(device, len(host.devices), precision_on(device, settings.precision))
            found.append(known[key])
    return found


def precision_on(device: Device, wanted: str) -> str:
    """Return the type that products run in on ``device``; auto: the better 16-bit type that it multiplies faster."""
    if wanted != "auto":
        return wanted
    return next((kind for kind in ("bf16", "fp16") if device.kind != "cpu" and kind in device.flops), "fp32")


def _divided(lines: Sequence[Any], settings: TrainingSettings, size: int) -> batch.BatchPlan:
    ceilings = [settings.micro_batch] * size
    if settings.balance:
        return batch.plan(lines, settings.global_batch, ceilings, settings.accumulate)
    shares = settings.shares or (1.0,) * size
    return batch.of_shares(lines, settings.global_batch, shares, ceilings, settings.accumulate)


def _micro_batch(rank: Rank) -> int:
    """Return the samples of the largest micro-batch of a rank."""
    return -(-rank.samples // max(1, rank.parts))


def _within_range(ranks: Sequence[Rank], paces: Sequence[RankRate], devices: Sequence[Device]) -> None:
    """Refuse micro-batches far from those that were timed."""
    for rank, pace, device in zip(ranks, paces, devices):
        if rank.samples and not in_range(_micro_batch(rank), pace.sizes):
            raise UserError(f"micro-batches of {_micro_batch(rank)} samples on {device.name}, which was calibrated "
                            f"with {min(pace.sizes)} to {max(pace.sizes)}", "sizes near those", "calibrate with "
                            "--global_batch and ranks that give such micro-batches")


def _again(settings: TrainingSettings, pace: RankRate) -> float:
    """Return the fraction of a rank's line that activation checkpointing adds to it."""
    return 0.0 if settings.recompute_timed and not pace.assumed else FORWARD * settings.recompute


def _updates(pace: RankRate, settings: TrainingSettings, size: int) -> float:
    whole_s = pace.update_s / size if settings.zero else pace.update_s
    return (pace.zero.shard_s(size) if settings.zero and size > 1 and pace.zero else whole_s) + pace.fixed_s


def _said(paces: Sequence[RankRate]) -> list[str]:
    return list(dict.fromkeys(pace.assumed for pace in paces if pace.assumed))


def _memory(hosts: Sequence[SiteHost], scene: Scene, settings: TrainingSettings, rates: Rates) -> RankMemoryPlan:
    """Return the memory of the rank nearest to its limit; ranks that are alike are computed once."""
    devices = [device for host in hosts for device in host.devices]
    locals_P = [len(host.devices) for host in hosts for _ in host.devices]
    size, workload = len(devices), rates.workload
    rooms = [device.room_bytes for device in devices]
    known = [room for room in rooms if room is not None]
    parts_P = shards.by_room(known) if len(known) == size else [1 / size] * size
    way = Sharding(settings.zero if size > 1 else 0, workload.buckets if size > 1 else (), parts_P,
                   scene.exchange.transport, settings.compression)
    seen: set[tuple[object, ...]] = set()
    found: list[RankMemoryPlan] = []
    for r, (device, local, played) in enumerate(zip(devices, locals_P, scene.ranks)):
        key = device.name, device.room_bytes, local, _micro_batch(played), played.parts, r == 0
        if key in seen:
            continue
        seen.add(key)
        rank = RankMemory(r, size, local, device.room_bytes, _micro_batch(played), max(1, played.parts),
                          int(workload.sample_bytes * played.samples))
        facts = workload.on_rank(rank, way)
        need = forecast(settings.change(facts) if settings.change else facts)
        found.append(RankMemoryPlan(r, need, device.room_bytes))
    return max(found, key=lambda one: (one.load, one.need.total))


def _piped(hosts: Sequence[SiteHost], settings: TrainingSettings, rates: Rates,
           paces: Sequence[RankRate]) -> tuple[Scene, tuple[str, ...]]:
    """Return the scene of a pipeline, whose stages of equal work are successive ranks, and the assumptions behind it.
    """
    devices = [device for host in hosts for device in host.devices]
    depth, size, workload = settings.stages, len(devices), rates.workload
    for what, bad in (("ZeRO", settings.zero > 0), ("balance", settings.balance), ("shares", bool(settings.shares))):
        if bad:
            raise UserError(f"a plan of a pipeline with {what}", f"a pipeline without {what}", "leave one of them out")
    copies = size // depth
    if copies * depth != size:
        raise UserError(f"{size} ranks for a pipeline of {depth} stages", "a multiple of the stages",
                        "change the number of stages")
    micros, micro = _micros(settings, copies)
    numbers = [number for number, host in enumerate(hosts) for _ in host.devices]
    wiring = rates.wiring([host.devices for host in hosts])
    each = settings.global_batch / copies
    stages = []
    message = workload.boundary_bytes * micro
    for copy in range(copies):
        own = range(copy * depth, (copy + 1) * depth)
        whole = [paces[r].line.seconds(micro, 1) / depth for r in own]
        again = [_again(settings, paces[r]) for r in own]
        travel = tuple((wiring.between if numbers[r] != numbers[r + 1] else wiring.within).seconds(message)
                       for r in own[:-1])
        adding = [paces[r].accumulate_s / depth * (1 - 1 / micros) for r in own]  # in all micro-batches but the first
        backward = tuple((1 - FORWARD + more) * s + add for s, more, add in zip(whole, again, adding))
        stages.append(Stages(tuple(own), "1f1b", micros, tuple(FORWARD * s for s in whole), backward, travel))
    samples_P = [round(each) if r % depth == 0 else 0 for r in range(size)]
    samples_P[0] += settings.global_batch - sum(samples_P)
    ranks = tuple(Rank(number, pace.line, n, micros, pace.update_s / depth + pace.fixed_s)
                  for number, pace, n in zip(numbers, paces, samples_P))
    nbytes = tuple(bucket.nbytes for bucket in workload.buckets)
    codec, cast = rates.codec(settings.compression if copies > 1 else "none", devices)
    exchange = Exchange(wiring.transport, codec.bucket_bytes or nbytes, wiring.within, wiring.between,
                        codec_s=codec.codec_s / depth, ratio=codec.ratio, later_s=codec.later_s / depth)
    said = (*_said(paces), *wiring.assumed, *([cast] if cast else []), "stages have equal work and memory",
            f"stages send each other {format_bytes(message)} per micro-batch, the activations of a block")
    return Scene(ranks, exchange, tuple(stages), _saves(settings, paces), _failures(hosts, settings),
                 max(pace.error for pace in paces)), said


def _micros(settings: TrainingSettings, copies: int) -> tuple[int, int]:
    """Return (micro-batches of a pipeline's replica, samples of one)."""
    wanted = settings.micros or max(FLIGHT * settings.stages, settings.accumulate)
    micros = max(1, min(wanted, settings.global_batch // copies))
    return micros, math.ceil(settings.global_batch / copies / micros)


def _stage_memory(devices: Sequence[Device], settings: TrainingSettings, rates: Rates) -> RankMemoryPlan:
    """Return the memory of the first stage, on the device with the least: its share of the model, and activations of
    all micro-batches in flight.
    """
    facts, depth = rates.workload.facts, settings.stages
    micros, micro = _micros(settings, len(devices) // depth)
    facts = replace(facts, rank=replace(facts.rank, micro_batch=min(depth, micros) * micro, micros=2, size=1),
                    way=Sharding(0, rates.workload.buckets))  # gradients stay over micro-batches
    whole = forecast(settings.change(facts) if settings.change else facts)
    need = Footprint(-(-whole.parameters // depth), -(-whole.gradients // depth), -(-whole.state // depth),
                     -(-whole.activations // depth), whole.buckets, whole.workspace)
    rooms = [device.room_bytes for device in devices]
    worst = min(range(len(rooms)), key=lambda r: math.inf if rooms[r] is None else float(rooms[r] or 0))
    return RankMemoryPlan(worst, need, rooms[worst])


def _folded(shares: Sequence[int]) -> list[list[int]]:
    """Return [ranks, samples] of equal neighbours.

    >>> _folded((4, 4, 2))
    [[2, 4], [1, 2]]
    """
    ends = np.flatnonzero(np.diff(shares)) + 1
    return [[len(part), int(part[0])] for part in np.split(np.array(shares), ends)]


def memory_text(found: RankMemoryPlan) -> str:
    """Return the memory of a rank as text: "needs 12.1 GiB of 36.0 GiB"."""
    free = "an unknown amount" if found.free is None else format_bytes(found.free)
    return f"needs {format_bytes(found.need.total)} of {free}"
