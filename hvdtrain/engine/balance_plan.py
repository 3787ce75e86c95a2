"""The replicas among which balance divides the batch: a rank each, or several ranks of a pipeline."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, cast

from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.deadline import deadline
from hvdtrain.config import micro_batches
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.engine.balance_probe import LEAST_REPEATS, sizes_of
from hvdtrain.engine.run import Run
from hvdtrain.parallel.pipeline.over_ranks import OverRanks
from hvdtrain.parallel.pipeline.plan import Planned
from hvdtrain.planning.batch.plan import COLUMNS, RankLabel
from hvdtrain.planning.linear import Speed, fit, least

SIZES = 3
"""Micro-batches of so many sizes are timed at most (`sizes_of`)."""


def called(mesh: Mesh) -> str:
    """Return what shares a batch, in one word."""
    return "rank" if mesh.deepest == 1 else "replica"


def columns(mesh: Mesh) -> tuple[str, ...]:
    """Return the headings of a plan's table."""
    return (called(mesh), *COLUMNS[1:])


def labels(run: Run) -> list[RankLabel]:
    """Return what the table calls each copy."""
    found = []
    for ranks in run.mesh.copies:
        hosts = [run.topology.host_of(rank).node for rank in ranks]
        devices = [run.devices[rank].name for rank in ranks]
        counted = [f"{devices.count(name)} x {name}" if devices.count(name) > 1 else name for name in devices]
        found.append(RankLabel(_once(hosts), _once(counted),
                               _once([run.parts.precision.names[rank] for rank in ranks])))
    return found


def _once(names: Sequence[str]) -> str:
    return " + ".join(dict.fromkeys(names))


def hosts(run: Run) -> list[tuple[str, tuple[int, ...]]]:
    """Return (host, its copies); [] where a copy reaches over hosts, since then none can be left out by itself."""
    where: dict[str, list[int]] = {}
    for copy, ranks in enumerate(run.mesh.copies):
        nodes = {run.topology.host_of(rank).node for rank in ranks}
        if len(nodes) > 1:
            return []
        where.setdefault(nodes.pop(), []).append(copy)
    return [(host.node, tuple(where[host.node])) for host in run.topology.hosts if host.node in where]


def least_parts(run: Run) -> int | list[int]:
    """Return the micro-batches of a step that each copy computes at least."""
    if run.mesh.deepest == 1:
        return int(run.config.accumulate)
    return [micro_batches(run.config, len(ranks)) for ranks in run.mesh.copies]


def lowest(mesh: Mesh, by_rank: dict[int, int]) -> list[int]:
    """Return for each copy the lowest limit of its ranks; 0 where none has one."""
    return [least(*(by_rank.get(rank, 0) for rank in ranks)) for ranks in mesh.copies]


def probe(run: Run) -> list[Speed]:
    """Time the pipelines of all copies at the same time, as they will compute; collective. Their speeds by copy."""
    config, control, mesh = run.config, run.control, run.mesh
    given = cast(Sequence[int], run.spelled.rebalance.max_micro_batch)
    limit = least(config.micro_batch_limit, lowest(mesh, dict(enumerate(given)))[mesh.copy],
                  _ceiling(run.parts.layout, mesh.copy))
    micros = micro_batches(config, mesh.depth)
    share = -(-config.global_batch // len(mesh.copies))
    due = sizes_of(max(1, share // micros), max(1, config.global_batch // micros), limit)
    seconds: dict[int, float] = {}
    with deadline(config.control_timeout_s, "the probe of balance"):
        for number in itertools.count():
            if not control.agree(number < SIZES or not seconds):  # every copy takes part in each round
                break
            size = due[0]
            batch = agreed(control, lambda size=size: run.feed.sample(size, run.state.cursor), "probe")  # type: ignore
            took_s, why = _time(run, [batch] * micros, config.rebalance.probe_s / SIZES)
            agreed(control, lambda size=size, why=why: _check_least(size, why), "probe")  # type: ignore[misc]
            if why:
                due = [max(seconds, default=size // 2)]
                limit = due[0]
                continue
            seconds.setdefault(size, took_s / micros)
            due = due[1:] or due
    rows = control.gather((list(seconds), list(seconds.values()), limit))
    speeds = []
    for ranks in mesh.copies:
        tried, _, limit = rows[ranks[0]]
        slowest = [max(rows[rank][1][i] for rank in ranks) for i in range(len(tried))]
        speeds.append(Speed(fit(tried, slowest), limit, tuple(tried), tuple(slowest)))
    return speeds


def _time(run: Run, micros: list[Any], slot_s: float) -> tuple[float, str]:
    """(mean seconds that this rank's copy takes over ``micros``, over about ``slot_s`` of the slowest copy, "");
    (0, why) where memory lacked on a rank of this copy. Collective.
    """
    spent_s = total_s = 0.0
    repeats = -1  # the first traces and allocates
    whys: dict[int, str] = {}  # by copy, which computes nothing more then
    while (repeats < LEAST_REPEATS or total_s < slot_s) and len(whys) < len(run.mesh.copies):
        run.control.agree(False)  # so that all begin together
        rows = run.control.gather(agreed(run.control, lambda: (0.0, "") if run.mesh.copy in whys else _trial(
            run, micros), "probe"))
        run.parts.buffers.discard()
        repeats += 1
        for rank, (_, why) in enumerate(rows):
            if why:
                whys.setdefault(run.mesh.copy_of(rank), why)
        if repeats:
            spent_s += max(rows[rank][0] for rank in run.mesh.ranks)
            total_s += max(took_s for took_s, _ in rows)
    return spent_s / max(1, repeats), whys.get(run.mesh.copy, "")


def _trial(run: Run, micros: list[Any]) -> tuple[float, str]:
    """(seconds of one trial, why memory did not suffice for it or "")."""
    begin = time.perf_counter()
    schedule = cast(OverRanks, run.schedule)
    _, why = run.recovery.attempt(lambda: schedule.trial(micros), out_of_memory=lambda error: isinstance(
        error, MemoryError) or run.recovery.out_of_memory(error))
    return time.perf_counter() - begin, why


def _check_least(size: int, why: str) -> None:
    if why and size == 1:
        raise UserError("out of memory with a micro-batch of 1 sample in a pipeline: "
                        f"{why}", "stages that hold a sample",
                        "partition the model over more ranks, or set remat or precision: bf16")


def _ceiling(layout: Any, copy: int) -> int:
    """Return the largest micro-batch for which every stage of a replica fits its memory; 0 where that is not known."""
    if not isinstance(layout, Planned):
        return 0
    plan, limits = layout.plans[copy], []
    for place, kind in enumerate(plan.choice.places):
        measured, held = plan.task.kinds[kind], plan.choice.holds(plan.task, place)
        if measured.capacity_bytes and held.activations:
            room = measured.capacity_bytes - (held.total - held.activations)
            limits.append(max(1, math.floor(room * measured.largest / held.activations)))
    return least(*limits)
