"""A split for people: a line for each stage. Owns words and columns; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.parallel.memory import MIB, Block

if TYPE_CHECKING:
    from hvdtrain.parallel.plan import Plan

HEAD = ("stage", "device", "blocks", "cost", "parameters", "gradients", "optimizer", "activations", "MiB in all",
        "of MiB")


class Row(NamedTuple):
    """One stage; sizes in MiB, ``capacity_mib`` 0 where unknown; ``cost_share``: of all stages' seconds."""

    stage: int
    device: str
    blocks: str
    cost_share: float
    parameters_mib: float
    gradients_mib: float
    slots_mib: float
    activations_mib: float
    total_mib: float
    capacity_mib: float


def span(blocks: Sequence[Block], stage: range) -> str:
    """First and last block of a stage."""
    first, last = blocks[stage.start].name, blocks[stage.stop - 1].name
    return first if len(stage) == 1 else f"{first}..{last}"


def rows(plan: Plan) -> list[Row]:
    """The stages of a plan."""
    stage_s = plan.stage_s()
    found = []
    for s, stage in enumerate(plan.stages):
        part = [plan.blocks[i] for i in stage]
        held = plan.needs.of(part)
        found.append(Row(s, plan.devices[s], span(plan.blocks, stage),
                         stage_s[s] / sum(stage_s) if sum(stage_s) else 1 / len(stage_s), held.parameters / MIB,
                         held.gradients / MIB, held.slots / MIB, held.activations / MIB, held.total / MIB,
                         plan.capacity_bytes[s] / MIB if plan.capacity_bytes else 0.0))
    return found


def text(plan: Plan) -> str:
    """The table with a first and a last line in words."""
    lines: list[tuple[str, ...]] = [HEAD]
    for row in rows(plan):
        capacity = f"{row.capacity_mib:.0f}" if row.capacity_mib else "?"
        lines.append((str(row.stage), row.device, row.blocks, f"{row.cost_share:.0%}",
                      *(f"{mib:.2f}" for mib in row[4:9]), capacity))
    body = ["  " + line for line in columns(lines, ("device", "blocks"))]
    return "\n".join([f"model split over {len(plan.stages)} devices, a micro-batch in {plan.needs.micros} parts "
                      "(memory predicted, MiB)", *body, f"  bubble: {plan.bubble():.1%} predicted"])


def columns(lines: Sequence[Sequence[str]], left: Sequence[str]) -> list[str]:
    """Cells under their heads, the first line, in columns as wide as they need; those of ``left`` begin alike."""
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) if head in left else cell.rjust(w)
                      for cell, head, w in zip(line, lines[0], widths)).rstrip() for line in lines]
