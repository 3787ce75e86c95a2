"""How fast every rank is with this model, and how much its memory holds: measured in a few seconds, or remembered.

Owns the measurement: which sizes, for how long, what an out-of-memory means. Plans nothing (`hvdtrain.balance.plan`)
and leaves the model as it was (`Step.trial`). All ranks measure at the same time, as they will compute: ranks that
share cores or memory bandwidth find what is left to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.balance import cache, memory
from hvdtrain.balance.line import fit
from hvdtrain.balance.speed import Speed, least
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.exit import agreed
from hvdtrain.errors import UserError

CONFIRMS = 0.15
"""A remembered time is confirmed by a measurement that differs from it by less than this part."""

LEAST_REPEATS = 2


@dataclass(frozen=True)
class Tools:
    """What a backend offers to a probe: `Step.trial`, samples to try it on, and how it tells of memory."""

    trial: Callable[[Any], None]
    sample: Callable[[int], Any]
    out_of_memory: Callable[[BaseException], bool]
    peak_bytes: Callable[[Callable[[], None]], int]


def probe(run: Any, backend: Any) -> list[Speed]:
    """Every rank's speed, by rank; collective.

    Ranks take what they measured before on the same device with the same model only if all of them can, and one
    measurement of each confirms it. Errors: `UserError`, the same on every rank.
    """
    config, control = run.config, run.control
    tools = Tools(run.step.trial, run.feed.sample, backend.out_of_memory, backend.peak_bytes)
    given = config.rebalance.max_micro_batch
    limit = least(config.micro_batch, given[control.rank] if given else 0)
    share = -(-config.global_batch // control.size)
    remembers = config.rebalance.probe_cache
    key = agreed(control, lambda: cache.key(run), "probe") if remembers else ""
    known = cache.load(key) if remembers else None
    with deadline(config.control_timeout_s, "the probe of balance"):
        if not control.agree(known is None):
            assert known is not None
            if not control.agree(not agreed(control, lambda: _confirmed(known, tools, limit), "probe")):
                return control.gather(replace(known, remembered=True, ceiling=least(known.ceiling, limit)))
        own = agreed(control, lambda: _measure(run, tools, share, limit), "probe")
    if remembers:
        cache.save(key, own)
    return control.gather(own)


def sizes_of(share: int, n: int, limit: int) -> list[int]:
    """Micro-batches to time, ascending: half, whole and double of an equal share, within ``n`` and ``limit``. Pure.

    Two samples at least, where there may be two: BatchNorm takes no statistics of one.
    """
    most = min(limit or n, n)
    return sorted({min(max(2, b), most) for b in (share // 2, share, 2 * share)})


def verified(run: Any, backend: Any, micro_batch: int, tried: int) -> int:
    """The largest micro-batch up to ``micro_batch`` that this rank's device really holds; not collective.

    ``tried``: what is known to work. On an out-of-memory a fifth is taken off, on this rank alone, until it works.
    A host's memory is not tried: the kernel would end the process instead of refusing.
    """
    size = micro_batch
    while size > tried:
        try:
            run.step.trial(run.feed.sample(size))
            return size
        except Exception as error:
            if not backend.out_of_memory(error):
                raise
            size = max(tried, int(0.8 * size))
    return size


def _measure(run: Any, tools: Tools, share: int, limit: int) -> Speed:
    """Time the sizes that memory allows, and find the ceiling."""
    sizes = sizes_of(share, run.config.global_batch, limit)
    batches = {b: tools.sample(b) for b in sizes}
    device = run.devices[run.control.rank]
    peaks: dict[int, int] = {}
    cap = limit
    for b in sizes:
        try:
            peaks[b] = _peak(device.kind, tools, batches[b])
        except Exception as error:
            if not tools.out_of_memory(error):
                raise
            cap = max(peaks, default=0)
            break
    if not peaks:
        raise UserError(f"rank {run.control.rank} ({device.name}) is out of memory with a micro-batch of {sizes[0]}",
                        "memory for the model and a few samples", "use a smaller model, or precision: bf16")
    fitting = [b for b in sizes if b in peaks]
    if fitting == sizes and len(fitting) > 1:
        ends = (fitting[0], fitting[-1])
        host = run.topology.host_of(run.control.rank)
        budget = (memory.host_budget_bytes(len(host.ranks)) if device.kind == "cpu"
                  else int(memory.DEVICE_PART * device.memory_bytes))
        cap = least(limit, memory.ceiling(ends, (peaks[ends[0]], peaks[ends[1]]), budget))
    slot_s = run.config.rebalance.probe_s / len(fitting)
    seconds = [_time(tools, batches[b], slot_s) for b in fitting]
    return Speed(fit(fitting, seconds), cap, tuple(fitting), tuple(seconds))


def _peak(kind: str, tools: Tools, batch: Any) -> int:
    """Run one trial, which also traces, tunes and allocates what later ones reuse; the memory it takes."""
    def work() -> None:
        tools.trial(batch)

    return memory.host_peak_bytes(work) if kind == "cpu" else tools.peak_bytes(work)


def _time(tools: Tools, batch: Any, slot_s: float) -> float:
    """Mean seconds of a trial over about ``slot_s``.

    The mean: a rank whose processor time is rationed in slices computes and pauses in turns, a median sees only one.
    """
    begin = time.perf_counter()
    repeats = 0
    while repeats < LEAST_REPEATS or time.perf_counter() - begin < slot_s:
        tools.trial(batch)
        repeats += 1
    return (time.perf_counter() - begin) / repeats


def _confirmed(known: Speed, tools: Tools, limit: int) -> bool:
    """Whether the middle size takes about as long as it did."""
    usable = [i for i, b in enumerate(known.sizes) if not limit or b <= limit]
    if not usable:
        return False
    at = usable[len(usable) // 2]
    batch = tools.sample(known.sizes[at])
    tools.trial(batch)
    return abs(_time(tools, batch, 0.2) / known.seconds[at] - 1.0) < CONFIRMS
