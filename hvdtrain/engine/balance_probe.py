"""Speed of each rank, measured in a few seconds or remembered between runs, and sizes that ran out of memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.machine import memory
from hvdtrain.cluster.machine.software import version_of
from hvdtrain.config import Config
from hvdtrain.core import user_cache as cache_folder
from hvdtrain.core import whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch
from hvdtrain.engine.run import Run
from hvdtrain.parallel.recovery import attempt
from hvdtrain.planning.linear import Speed, fit, least

CONFIRMS = 0.15
"""A remembered time is confirmed by a measurement that differs from it by less than this part."""

CONFIRM_S = 0.2

HOST_PART = 0.1
"""Of a host's memory: where the samples alone would take more, no smaller sizes are tried after a shortage, since near
its limit the kernel ends the process."""

LEAST_REPEATS = 2


@dataclass(frozen=True)
class Tools:
    """Backend functions that a probe calls: `Step.trial`, samples to try it on, and how it tells of memory."""

    trial: Callable[[Any], None]
    sample: Callable[[int], Any]
    out_of_memory: Callable[[BaseException], bool]
    free: Callable[[], None]
    peak_bytes: Callable[[Callable[[], None]], int]


def probe(run: Run, backend: Any) -> list[Speed]:
    """Return every rank's speed, by rank; collective.

    Memory is measured each time. Remembered times of the same device and model are used only where all ranks have
    them, and one measurement of each confirms them. Errors: `UserError`, the same everywhere.
    """
    config, control = run.config, run.control
    cursor = run.state.cursor
    tools = Tools(run.parts.stage.trial, lambda n: run.feed.sample(n, cursor), backend.out_of_memory,
                  backend.free_cached, backend.peak_bytes)
    given = cast(Sequence[int], run.spelled.rebalance.max_micro_batch)
    remembers = config.rebalance.probe_cache
    with deadline(config.control_timeout_s, "the probe of balance"):
        ran_out = agreed(control, lambda: ceiling_of(run, tools.sample(1)) if remembers else 0, "probe")
        limit = least(config.micro_batch_limit, given[control.rank] if given else 0, ran_out)
        held = agreed(control, lambda: _held(run, tools, limit), "probe")
        name = agreed(control, lambda: key(run, tools.sample(1)), "probe") if remembers else ""
        known = load(name) if remembers else None
        usable = known is not None and known[0] == tuple(held.batches)
        own = None
        if not control.agree(not usable):
            assert known is not None
            own = agreed(control, lambda: _confirmed(known[1], held, tools), "probe")
        if control.agree(own is None):
            own = agreed(control, lambda: _measured(run, held, tools), "probe")
            if remembers:
                save(name, own.sizes, own.seconds)
    return control.gather(own)


def sizes_of(share: int, n: int, limit: int) -> list[int]:
    """Micro-batches to time, ascending: half, whole and double of an equal share, within ``n`` and ``limit``. Pure.

    Two samples at least, where there may be two: BatchNorm takes no statistics of one.
    """
    most = min(limit or n, n)
    return sorted({min(max(2, b), most) for b in (share // 2, share, 2 * share)})


def verified(run: Run, backend: Any, micro_batch: int, tried: int) -> int:
    """Return the largest micro-batch up to ``micro_batch`` that this rank's device really holds; not collective.

    ``tried``: what is known to work. On an out-of-memory a fifth is taken off, on this rank alone, until it works.
    Meanwhile the memory that the optimizer will take with its first update is held. A host's memory is not tried: the
    kernel would end the process instead of refusing.
    """
    def trial() -> None:
        ballast = [backend.hold_bytes(run.parts.optimizer.bytes_to_come())]
        run.parts.stage.trial(run.feed.sample(size, run.state.cursor))
        ballast.clear()

    size = micro_batch
    while size > tried and attempt(trial, backend.out_of_memory, backend.free_cached)[1]:
        size = max(tried, int(0.8 * size))
    return size


@dataclass(frozen=True)
class _Held:
    """Micro-batches that the memory holds, by size, and the largest one that it should hold (0: any)."""

    batches: dict[int, Any]
    ceiling: int


def _held(run: Run, tools: Tools, limit: int) -> _Held:
    """Run the sizes once, which also traces, tunes and allocates what later runs reuse; find the ceiling.

    Where memory lacks for the smallest size, a half and a quarter are tried, down to one sample.
    """
    config, rank = run.config, run.control.rank
    device = run.devices[rank]
    most = config.global_batch if run.feed.samples is None else min(config.global_batch, run.feed.samples)
    sizes = sizes_of(-(-most // run.control.size), most, limit)
    batches: dict[int, Any] = {}
    peaks: list[int] = []
    local, shortage = len(run.topology.host_of(rank).ranks), ""

    def short(error: BaseException) -> bool:
        # MemoryError: the host has no room for so many samples, whatever the device holds. BatchNorm takes no sample
        # alone, to which memory has driven the probe then.
        return isinstance(error, MemoryError) or tools.out_of_memory(error) or bool(shortage) and isinstance(
            error, UserError)

    def work(size: int) -> Any:
        batch = tools.sample(size)
        peaks.append(_peak(device.kind, tools, batch))
        return batch

    host = memory.host_budget_bytes(local)
    budget = host if device.kind == "cpu" else memory.DEVICE_PART * device.memory_bytes
    while sizes:
        b = sizes.pop(0)
        if device.kind == "cpu" and _beyond(b, tuple(batches), peaks, host):
            break  # the kernel would not refuse it, but end the process
        batch, why = attempt(lambda: work(b), short, tools.free)  # called at once
        if not why:
            batches[b] = batch
            continue
        shortage, sizes = shortage or why, []
        small = device.kind != "cpu" or not host or b * _bytes_of(tools.sample(1)) < HOST_PART * host
        if not batches and b > 1 and small:
            sizes = sorted({max(min(2, b // 2), b // 4), b // 2})
    if not batches:
        raise UserError(f"{device.name} is out of memory with a micro-batch of {b} on rank {rank} ({shortage})",
                        "memory for the model and a few samples", "use a smaller model, or precision: bf16")
    if shortage:
        return _Held(batches, max(batches))
    room = memory.ceiling((min(batches), max(batches)), (peaks[0], peaks[-1]),
                          budget - run.parts.optimizer.bytes_to_come())
    return _Held(batches, least(limit, room))


def _bytes_of(batch: Batch) -> int:
    return sum(int(getattr(array, "nbytes", 0)) for array in batch)


def _beyond(size: int, tried: Sequence[int], peaks: Sequence[int], budget_bytes: int) -> bool:
    """Return whether two smaller micro-batches show that ``size`` would take more than the budget."""
    if len(tried) < 2 or not budget_bytes or not all(peaks):
        return False
    return size > memory.ceiling((tried[0], tried[-1]), (peaks[0], peaks[-1]), budget_bytes) > 0


def _peak(kind: str, tools: Tools, batch: Any) -> int:
    """Run one trial; the memory it takes."""
    def work() -> None:
        tools.trial(batch)

    return memory.host_peak_bytes(work) if kind == "cpu" else tools.peak_bytes(work)


def _measured(run: Run, held: _Held, tools: Tools) -> Speed:
    """Time every size; one that memory does not suffice for by now, and larger ones, are left out."""
    slot_s = run.config.rebalance.probe_s / len(held.batches)
    seconds: dict[int, float] = {}
    ceiling = held.ceiling
    for size, batch in held.batches.items():
        found, why = attempt(lambda: _time(tools, batch, slot_s), tools.out_of_memory, tools.free)
        if found is None:
            if not seconds:
                raise UserError(f"out of memory with a micro-batch of {size}, which fit before ({why})",
                                "memory for the model and a few samples", "free memory for this rank")
            ceiling = max(seconds)
            break
        seconds[size] = found
    sizes, times = tuple(seconds), tuple(seconds.values())
    return Speed(fit(sizes, times), ceiling, sizes, times)


def _confirmed(seconds: Sequence[float], held: _Held, tools: Tools) -> Speed | None:
    """Return the remembered times, corrected by one measurement; None where that differs too much or memory lacks."""
    at = len(seconds) // 2
    sizes = tuple(held.batches)
    found, _ = attempt(lambda: _time(tools, held.batches[sizes[at]], CONFIRM_S), tools.out_of_memory, tools.free)
    ratio = math.inf if found is None else found / seconds[at]
    if abs(ratio - 1.0) >= CONFIRMS:
        return None
    corrected = tuple(t * ratio for t in seconds)
    return Speed(fit(sizes, corrected), held.ceiling, sizes, corrected, remembered=True)


def _time(tools: Tools, batch: Any, slot_s: float) -> float:
    """Return mean seconds of a trial over ``slot_s``; a median would miss the pauses of a rationed processor."""
    begin = time.perf_counter()
    repeats = 0
    while repeats < LEAST_REPEATS or time.perf_counter() - begin < slot_s:
        tools.trial(batch)
        repeats += 1
    return (time.perf_counter() - begin) / repeats


LARGEST = 65536
"""Bytes of a file that is read at all."""

MORE_ROOM = 0.05
"""Part by which a rank's room may have grown without its old ceiling being forgotten."""


def key(run: Run, sample: Any) -> str:
    """Return a checksum of model, ``sample`` arrays (1, ...), device and place, versions, threads, precision."""
    config, rank = run.config, run.control.rank
    host = run.topology.host_of(rank)
    names = ["hvdtrain", "numpy", *{"torch": ["torch"], "tensorflow": ["tensorflow-cpu", "tensorflow", "keras"]}.get(
        run.spec.framework, [])]
    facts = [run.spec.framework, run.spec.name, config.model_args, [(p.name, p.shape, p.dtype) for p in
             run.parts.params.specs], [(str(a.dtype), a.shape[1:]) for a in sample], vars(run.devices[rank]) |
             {"memory_bytes": 0}, host.node, host.ranks.index(rank), host.cores, len(host.ranks),
             [version_of(n) or "" for n in names], config.threads, run.parts.precision.own, config.sync_batchnorm,
             config.deterministic, config.emulate_speed[rank] if config.emulate_speed else 1.0]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def load(name: str) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """(sizes, seconds of a micro-batch of each) kept under ``name``, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, ArithmeticError):
        found = read(name)
        sizes, seconds = tuple(found["sizes"]), tuple(float(t) for t in found["seconds"])
        whole = all(type(b) is int and b > 0 for b in sizes)
        if whole and len(sizes) == len(seconds) > 0 and all(0 < t < 1e6 for t in seconds):
            return sizes, seconds
    return None


def save(name: str, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    """Keep the times under ``name``; the file appears whole or not at all."""
    write(name, {"sizes": list(sizes), "seconds": list(seconds)})


def ceiling(name: str, holds: str, room_bytes: int) -> int:
    """Return the largest micro-batch since an earlier run ran out of memory; 0 where none did, or in vain.

    ``holds``: what the run is made of that takes memory, as text. ``room_bytes``: what this rank may hold; where that
    is more than it was then, the micro-batch may be larger too.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = read(f"{name}-memory")
        samples, room = found["micro_batch"], found["room_bytes"]
        alike = found["holds"] == holds and type(samples) is int and samples > 0
        return samples if alike and room_bytes <= (1 + MORE_ROOM) * room else 0
    return 0


def save_ceiling(name: str, holds: str, room_bytes: int, micro_batch: int) -> None:
    """Keep what `ceiling` tells later runs."""
    write(f"{name}-memory", {"micro_batch": micro_batch, "holds": holds, "room_bytes": room_bytes})


def read(name: str, folder: str = "probe") -> Any:
    """Return the content of the file ``name``. Errors: OSError, ValueError, of an absent, large or damaged one."""
    path = cache_folder(folder) / f"{name}.json"
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has over {LARGEST} bytes")
    return json.loads(path.read_text(encoding="utf-8"))


def write(name: str, record: dict[str, Any], folder: str = "probe") -> None:
    """Keep ``record`` under ``name``, whole or not at all, where the cache can be written."""
    with contextlib.suppress(OSError):
        place = cache_folder(folder)
        place.mkdir(parents=True, exist_ok=True)
        with whole_file(place / f"{name}.json") as draft:
            draft.write_text(json.dumps(record) + "\n", encoding="utf-8")


def ceiling_of(run: Run, sample: Any) -> int:
    """Return the micro-batch that an earlier equal run kept on this rank, by ``sample`` (1, ...); 0: none."""
    return ceiling(key(run, sample), _holds(run), _room(run)) if remembers(run.config) else 0


def keep_ceiling(run: Run, sample: Any, micro_batch: int) -> None:
    """Remember that this rank continues with ``micro_batch`` samples after it ran out of memory."""
    if remembers(run.config):
        save_ceiling(key(run, sample), _holds(run), _room(run), micro_batch)


def remembers(config: Config) -> bool:
    """Return whether sizes are found by measurement in this run, and are to be remembered."""
    return bool(config.rebalance.probe_cache and (config.balance != "off" or config.micro_batch == "auto"))


def _holds(run: Run) -> str:
    config, remat = run.config, run.parts.remat
    return json.dumps([asdict(config.optimizer), asdict(config.data_parallel), config.compression,
                       config.model_parallel, config.split_micro_batches, config.compile, run.control.size,
                       list(remat.chosen) if remat is not None else []], default=repr)


def _room(run: Run) -> int:
    """Bytes that this rank may hold; 0 where nobody knows."""
    rank = run.control.rank
    device = run.devices[rank]
    if device.kind != "cpu":
        return int(device.memory_bytes)
    return memory.host_budget_bytes(len(run.topology.host_of(rank).ranks))
