"""Plans of a partitioned model, and their tables, records and summaries. Pure. `partition` makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.config import Config
from hvdtrain.core.errors import count
from hvdtrain.core.mesh import Layout
from hvdtrain.core.terminal import as_text
from hvdtrain.core.units import MIB
from hvdtrain.planning.pipeline.orders import Step
from hvdtrain.planning.pipeline.search import Partition, Task

COLUMNS = {"copy": "replica", "stage": "stage", "rank": "rank", "host": "host", "device": "device", "blocks": "blocks",
           "busy_s": "ms", "parameters_bytes": "parameters", "gradients_bytes": "gradients",
           "optimizer_bytes": "optimizer", "activations_bytes": "activations", "total_bytes": "total MiB",
           "capacity_bytes": "of MiB"}
"""Keys of `rows`, and their heads in a table."""

OVER_RANKS = ("copy", "rank", "host")
"""Columns that only a model partitioned over ranks has."""

MOST_SHOWN = 3
"""Different partitions that the summary names."""


@dataclass(frozen=True)
class CopyPlan:
    """Partition of one replica, the task that it solves, and the predicted step."""

    task: Task
    choice: Partition
    step: Step

    def rows(self) -> list[dict[str, Any]]:
        """Return what is planned of each stage, JSON-able. Seconds are of a step."""
        found = []
        for stage, place in enumerate(self.choice.places):
            kind, held = self.task.kinds[place], self.choice.holds(self.task, stage)
            found.append({
                "stage": stage, "device": kind.device,
                "blocks": ", ".join(span(kind.names, chunk) for chunk in self.choice.chunks(self.task, stage)),
                "busy_s": self.step.busy_s[stage], "micro_batches": self.task.micros,
                "parameters_bytes": int(held.parameters), "gradients_bytes": int(held.gradients),
                "optimizer_bytes": int(held.slots), "activations_bytes": int(held.activations),
                "capacity_bytes": kind.capacity_bytes})
        return found


@dataclass(frozen=True)
class DevicePlan(CopyPlan):
    """Partition over the ``devices`` of each rank, whose names are this rank's own; all else is equal on all ranks."""

    devices: tuple[str, ...] = ()

    @property
    def stages(self) -> list[range]:
        """Block numbers of each stage."""
        return [self.choice.chunks(self.task, stage)[0] for stage in range(self.task.depth)]

    def stage_of(self, block: int) -> int:
        """Return the stage of a block, by its number."""
        return next(s for s, stage in enumerate(self.stages) if block in stage)

    @property
    def micros(self) -> int:
        """Parts of a micro-batch."""
        return self.task.micros

    def words(self) -> str:
        """Format for the summary, one line."""
        return f"{' | '.join(row['blocks'] for row in self.rows())} on {', '.join(self.devices)}"

    def table(self) -> str:
        """Format the stages as a table."""
        return "\n".join([f"model partitioned over {self.task.depth} devices, a micro-batch in {self.micros} parts "
                          "(predicted; ms of a micro-batch, memory in MiB)",
                          _table([{**row, "device": name} for row, name in zip(self.rows(), self.devices)],
                                 [key for key in COLUMNS if key not in OVER_RANKS]),
                          f"  bubble: {self.step.idle_share:.1%} predicted"])


@dataclass(frozen=True)
class Planned(Layout):
    """A layout with its ``plans`` by copy and ``hosts`` by rank."""

    plans: tuple[CopyPlan, ...] = ()
    hosts: tuple[str, ...] = ()

    def foreseen(self, samples: Sequence[int], micros: Sequence[int]) -> Planned:
        """Return the layout with predictions for copies of ``samples`` in ``micros``, proportional by block."""
        plans = []
        for plan, n, m in zip(self.plans, samples, micros):
            kinds = tuple(kind.over(n / m, -(-n // m)) for kind in plan.task.kinds) if m else plan.task.kinds
            task = replace(plan.task, kinds=kinds, micros=m)
            plans.append(replace(plan, task=task, step=plan.choice.played(task)))
        return replace(self, plans=tuple(plans))

    @property
    def step_s(self) -> float:
        """Predicted seconds of forwards and backwards of a step, of the slowest copy."""
        return max(plan.step.step_s for plan in self.plans)

    @property
    def idle_share(self) -> float:
        """Predicted fraction of all ranks' time that they wait for other stages or copies."""
        busy_s = math.fsum(s for plan in self.plans for s in plan.step.busy_s)
        ranks = sum(len(copy) for copy in self.mesh.copies)
        return max(0.0, 1 - busy_s / (ranks * self.step_s)) if self.step_s > 0 else 0.0


def rows(layout: Planned) -> list[dict[str, Any]]:
    """Return what is planned of each copy and stage, JSON-able: a record's ``stages``."""
    return [{"copy": copy, "stage": row["stage"], "rank": rank, "host": layout.hosts[rank], **row}
            for copy, (plan, ranks) in enumerate(zip(layout.plans, layout.mesh.copies))
            for row, rank in zip(plan.rows(), ranks)]


def record(layout: Planned) -> dict[str, Any]:
    """Return what is planned of all copies, JSON-able."""
    return {"stages": rows(layout), "step_s": layout.step_s, "idle_share": layout.idle_share}


def text(layout: Planned) -> str:
    """Return the table with a title and the predictions below."""
    return "\n".join([f"model partitioned over ranks, {layout.plans[0].task.order} (predicted; ms of a step, memory in "
                      "MiB)",
                      _table(rows(layout), list(COLUMNS)), *("  " + line for line in foretold(layout))])


def _table(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    """Format rows of stages in columns ``keys``."""
    def cell(row: dict[str, Any], key: str) -> str:
        if key == "total_bytes":
            value = sum(row[f"{kind}_bytes"] for kind in ("parameters", "gradients", "optimizer", "activations"))
        else:
            value = row[key]
        if key == "capacity_bytes":
            return f"{value / MIB:.0f}" if value else "?"
        if key == "busy_s":
            return f"{1e3 * value:.2f}"
        return f"{value / MIB:.2f}" if key.endswith("_bytes") else str(value)

    return as_text([COLUMNS[key] for key in keys], [[cell(row, key) for key in keys] for row in rows], "  ")


def foretold(layout: Planned) -> list[str]:
    """Return the predicted step and idle share of each copy, equal ones together, and of all."""
    said: dict[str, list[int]] = {}
    for copy, plan in enumerate(layout.plans):
        said.setdefault(f"{count(plan.task.micros, 'micro-batch', 'micro-batches')} in "
                        f"{1e3 * plan.step.step_s:.2f} ms, "
                        f"{plan.step.idle_share:.1%} idle", []).append(copy)
    lines = [f"{'replica' if len(copies) == 1 else 'replicas'} {', '.join(map(str, copies))}: {words}"
             for words, copies in said.items()]
    if len(layout.plans) > 1:
        lines.append(f"all: {1e3 * layout.step_s:.2f} ms, {layout.idle_share:.1%} idle")
    return lines


def measured_text(layout: Planned, busy_s: Sequence[float], step_s: float, idle_share: float) -> str:
    """Return the stages' planned and measured times of a step side by side; ``busy_s``: measured, by rank."""
    head = ("copy", "stage", "rank", "host", "device", "blocks")
    lines = [(*(str(row[name]) for name in head), f"{1e3 * row['busy_s']:.2f}",
              f"{1e3 * busy_s[row['rank']]:.2f}") for row in rows(layout)]
    return "\n".join([
        "model partitioned over ranks, planned and measured (of a step)",
        as_text((*(COLUMNS[name] for name in head), "ms planned", "ms measured"), lines, "  "),
        f"  forward and backward: {1e3 * layout.step_s:.2f} ms planned, {1e3 * step_s:.2f} ms measured",
        f"  idle: {layout.idle_share:.1%} planned, {idle_share:.1%} measured"])


def facts(layout: Layout | None, config: Config) -> dict[str, Any] | None:
    """Return ranks of each copy by stage and blocks of each stage, JSON-able; None for an unpartitioned model."""
    if layout is None:
        return None
    copies = range(len(layout.mesh.copies))
    return {"order": config.pipeline.order, "copies": [list(ranks) for ranks in layout.mesh.copies],
            "blocks": [stages(layout, copy) for copy in copies]}


def stages(layout: Layout, copy: int) -> list[str]:
    """Return the names of the blocks of each stage of a copy."""
    depth, chunks = len(layout.mesh.copies[copy]), layout.chunks(copy)
    return [", ".join(span(layout.names, chunk) for chunk in chunks[place::depth]) for place in range(depth)]


def role(layout: Layout | None) -> str:
    """Return this rank's stage for messages; "" for a model that is not partitioned."""
    if layout is None or layout.mesh.depth == 1:
        return ""
    mesh = layout.mesh
    copy = f" of replica {mesh.copy + 1}" if len(mesh.copies) > 1 else ""
    return f"stage {mesh.place + 1} of {mesh.depth}{copy} ({stages(layout, mesh.copy)[mesh.place]})"


def span(names: Sequence[str], chunk: range) -> str:
    """Return the names of the first and last block of a chunk."""
    first, last = names[chunk.start], names[chunk.stop - 1]
    return first if len(chunk) == 1 else f"{first}..{last}"


def ranks_of(copies: Sequence[Sequence[int]]) -> str:
    """Return how many ranks a run has and, where its model is partitioned over them, in what copies.

    >>> ranks_of([[0], [1]]), ranks_of([[0, 1], [2, 3]]), ranks_of([[0], [1, 2]]), ranks_of([[0, 1]])
    ('2', '4 in 2 pipelines of 2', '3 in pipelines of 1 and 2', '2 in one pipeline')
    """
    depths = [len(copy) for copy in copies]
    if max(depths) == 1:
        return str(len(depths))
    if len(depths) == 1:
        return f"{depths[0]} in one pipeline"
    if len(set(depths)) == 1:
        return f"{sum(depths)} in {len(depths)} pipelines of {depths[0]}"
    return f"{sum(depths)} in pipelines of {', '.join(map(str, depths[:-1]))} and {depths[-1]}"


def summary(found: dict[str, Any]) -> str:
    """Return the summary's row from `facts`."""
    cuts = list(dict.fromkeys(" | ".join(blocks) for blocks in found["blocks"] if len(blocks) > 1))
    more = f"; and {len(cuts) - MOST_SHOWN} other partitions" if len(cuts) > MOST_SHOWN else ""
    return f"{found['order']}, ranks {ranks_of(found['copies'])}: " + "; ".join(cuts[:MOST_SHOWN]) + more
