"""A plan of a pipeline for people: a line for each copy and stage. Owns words and columns; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import count
from hvdtrain.parallel.memory import MIB
from hvdtrain.parallel.table import columns, span

if TYPE_CHECKING:
    from hvdtrain.pipeline.plan import Planned

HEAD = ("copy", "stage", "rank", "host", "device", "blocks", "ms", "parameters", "gradients", "optimizer",
        "activations", "MiB in all", "of MiB")

LEFT = ("host", "device", "blocks")


def rows(layout: Planned) -> list[dict[str, Any]]:
    """Return what is planned of each copy and stage, JSON-able: a record's ``stages``. Seconds are of a step."""
    found = []
    for copy, (plan, ranks) in enumerate(zip(layout.plans, layout.mesh.copies)):
        for stage, rank in enumerate(ranks):
            kind, held = plan.task.kinds[plan.choice.places[stage]], plan.choice.holds(plan.task, stage)
            found.append({
                "copy": copy, "stage": stage, "rank": rank, "host": layout.hosts[rank], "device": kind.device,
                "blocks": ", ".join(span(kind.blocks, chunk) for chunk in plan.choice.chunks(plan.task, stage)),
                "busy_s": plan.step.busy_s[stage], "micro_batches": plan.task.micros,
                "parameters_bytes": int(held.parameters), "gradients_bytes": int(held.gradients),
                "optimizer_bytes": int(held.slots), "activations_bytes": int(held.activations),
                "capacity_bytes": kind.capacity_bytes})
    return found


def record(layout: Planned) -> dict[str, Any]:
    """Return what is planned of all copies, JSON-able."""
    return {"stages": rows(layout), "step_s": layout.step_s, "idle_share": layout.idle_share}


def text(layout: Planned) -> str:
    """Return the table with a first line and the predictions in words."""
    lines: list[tuple[str, ...]] = [HEAD]
    for row in rows(layout):
        sizes = [row[f"{kind}_bytes"] / MIB for kind in ("parameters", "gradients", "optimizer", "activations")]
        capacity = f"{row['capacity_bytes'] / MIB:.0f}" if row["capacity_bytes"] else "?"
        lines.append((str(row["copy"]), str(row["stage"]), str(row["rank"]), row["host"], row["device"], row["blocks"],
                      f"{1e3 * row['busy_s']:.2f}", *(f"{mib:.2f}" for mib in (*sizes, sum(sizes))), capacity))
    return "\n".join([f"model cut over ranks, {layout.plans[0].task.order} (predicted; ms of a step, memory in MiB)",
                      *("  " + line for line in columns(lines, LEFT)), *("  " + line for line in foretold(layout))])


def foretold(layout: Planned) -> list[str]:
    """Return the predicted step and idle share of each copy, equal ones together, and of all."""
    said: dict[str, list[int]] = {}
    for copy, plan in enumerate(layout.plans):
        said.setdefault(f"{count(plan.task.micros, 'micro-batch', 'micro-batches')} in "
                        f"{1e3 * plan.step.step_s:.2f} ms, "
                        f"{plan.step.idle_share:.1%} idle", []).append(copy)
    lines = [f"{'copy' if len(copies) == 1 else 'copies'} {', '.join(map(str, copies))}: {words}"
             for words, copies in said.items()]
    if len(layout.plans) > 1:
        lines.append(f"all: {1e3 * layout.step_s:.2f} ms, {layout.idle_share:.1%} idle")
    return lines


def measured_text(layout: Planned, busy_s: Sequence[float], step_s: float, idle_share: float) -> str:
    """Return the stages' planned and measured times of a step side by side; ``busy_s``: measured, by rank."""
    lines: list[tuple[str, ...]] = [("copy", "stage", "rank", "host", "device", "blocks", "ms planned", "ms measured")]
    for row in rows(layout):
        lines.append((*(str(row[name]) for name in ("copy", "stage", "rank", "host", "device", "blocks")),
                      f"{1e3 * row['busy_s']:.2f}", f"{1e3 * busy_s[row['rank']]:.2f}"))
    return "\n".join([
        "model cut over ranks, planned and measured (of a step)", *("  " + line for line in columns(lines, LEFT)),
        f"  forwards and backwards: {1e3 * layout.step_s:.2f} ms planned, {1e3 * step_s:.2f} ms measured",
        f"  idle: {layout.idle_share:.1%} planned, {idle_share:.1%} measured"])
