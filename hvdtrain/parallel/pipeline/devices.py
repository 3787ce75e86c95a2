"""One split of a model, the same on every rank: what was measured, where it is cut, what that is predicted to give.

Owns how ranks come to one cut. Measuring and placing are the backends' (`measure`, then `Plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.core.table import as_text
from hvdtrain.core.terminal import say
from hvdtrain.core.units import MIB, format_bytes
from hvdtrain.planning.pipeline.blocks import Block, Needs
from hvdtrain.planning.pipeline.devices.cut import Cut, min_max_cut
from hvdtrain.planning.pipeline.devices.schedule import bubble

MICROS_FOR_EACH = 4
"""Split micro-batches for each device where nothing is configured: a bubble below a fifth."""

HEAD = ("stage", "device", "blocks", "cost", "parameters", "gradients", "optimizer", "activations", "MiB in all",
        "of MiB")


@dataclass(frozen=True)
class Measured:
    """What one rank found: its blocks, its devices by name, their memory (0: unknown), and `Needs`.

    ``together_bytes``: of devices that share a memory, what they may hold in all; 0 for devices with their own.
    ``speeds``: of each device relative to the first; () for equal ones.
    """

    blocks: tuple[Block, ...]
    devices: tuple[str, ...]
    capacity_bytes: tuple[int, ...]
    needs: Needs
    together_bytes: int = 0
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A cut with what it was made from. ``devices`` are this rank's own; all else is equal on all ranks."""

    cut: Cut
    blocks: tuple[Block, ...]
    devices: tuple[str, ...]
    capacity_bytes: tuple[int, ...]
    needs: Needs
    speeds: tuple[float, ...] = ()

    @property
    def stages(self) -> list[range]:
        """Block numbers of each stage."""
        return self.cut.stages(len(self.blocks))

    def bubble(self) -> float:
        """The predicted part of all devices' time that they wait."""
        return bubble(self.stage_s(), self.needs.micros)

    def stage_s(self) -> list[float]:
        """Seconds of each stage over one split micro-batch."""
        speeds = self.speeds or (1.0,) * len(self.devices)
        return [sum(self.blocks[i].cost_s for i in stage) / speed for stage, speed in zip(self.stages, speeds)]

    def table(self) -> str:
        """The cut for people, several lines."""
        return text(self)

    def words(self) -> str:
        """One line for the summary."""
        names = " | ".join(span(self.blocks, stage) for stage in self.stages)
        return f"{names} on {', '.join(self.devices)}"


def micros_of(config: Config) -> int:
    """Parts that a split model computes a micro-batch in, where it has so many samples."""
    return config.split_micro_batches or MICROS_FOR_EACH * config.model_parallel


def parts_of(samples: int, micros: int) -> int:
    """Parts of a micro-batch of ``samples``: ``micros``, or for fewer samples a power of two (few kinds of graph)."""
    if samples >= micros:
        return micros
    return 1 << (max(1, samples).bit_length() - 1)


def part_samples(config: Config, rank: int, size: int) -> int:
    """Most samples of a rank's split micro-batch by configured shares: what blocks are measured with; 1 at least."""
    assert isinstance(config.shares, (list, tuple))  # names have been spelled out
    shares = config.shares or [1.0] * size
    own = config.global_batch * shares[rank] / sum(shares)
    micro = own / config.accumulate
    if config.micro_batch_limit:
        micro = min(micro, config.micro_batch_limit)
    return max(1, -(-int(-(-micro // 1)) // micros_of(config)))


def agree(measured: Measured, config: Config, control: Control) -> Plan:
    """The plan of all ranks: each block costs what it costs the slowest rank; collective. Rank 0 prints its table.

    So it is told what will be where before anything is allocated on the devices.
    Errors: `UserError` on every rank for unlike blocks, too many devices, too little memory.
    """
    rows: list[Measured] = control.gather(measured)

    def made() -> Plan:
        joint = joined(rows)
        _check_together(joint)
        cut = min_max_cut(joint.blocks, config.model_parallel, joint.capacity_bytes, joint.needs, joint.speeds)
        return Plan(cut, joint.blocks, measured.devices, joint.capacity_bytes, joint.needs, joint.speeds)

    plan = agreed(control, made, "split")
    if control.rank == 0 and config.progress != "off":
        say(plan.table())
    return plan


def joined(rows: Sequence[Measured]) -> Measured:
    """The worst of all ranks: longest costs, largest activations, smallest memories; speeds on the mean. Pure."""
    first = rows[0]
    for rank, row in enumerate(rows):
        if [(b.name, b.param_bytes) for b in row.blocks] != [(b.name, b.param_bytes) for b in first.blocks]:
            raise UserError(f"rank {rank} has other blocks than rank 0", "the same model on every rank",
                            "build the model on every rank in the same way")
    blocks = tuple(replace(block, cost_s=max(row.blocks[i].cost_s for row in rows),
                           activation_bytes=max(row.blocks[i].activation_bytes for row in rows))
                   for i, block in enumerate(first.blocks))
    capacity = tuple(min((c for c in held if c), default=0) for held in zip(*(row.capacity_bytes for row in rows)))
    needs = Needs(max(r.needs.gradients for r in rows), max(r.needs.slots for r in rows),
                  max(r.needs.micros for r in rows))
    together = min((row.together_bytes for row in rows if row.together_bytes), default=0)
    equal = (1.0,) * len(first.devices)
    speeds = tuple(sum(column) / len(rows) for column in zip(*(row.speeds or equal for row in rows)))
    return Measured(blocks, first.devices, capacity, needs, together, () if speeds == equal else speeds)


def _check_together(joint: Measured) -> None:
    """Raise `UserError` where devices that share a memory would hold more than it has, however the model is cut."""
    held = joint.needs.of(joint.blocks)
    if joint.together_bytes and held.total > joint.together_bytes:
        raise UserError(f"training needs {format_bytes(held.total)} and the devices share "
                        f"{format_bytes(joint.together_bytes)} ({held.words()})",
                        "a model that fits the memory they share", "use a smaller model or micro_batch, or "
                        "fewer ranks on each host")


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
    lines: list[tuple[str, ...]] = []
    for row in rows(plan):
        capacity = f"{row.capacity_mib:.0f}" if row.capacity_mib else "?"
        lines.append((str(row.stage), row.device, row.blocks, f"{row.cost_share:.0%}",
                      *(f"{mib:.2f}" for mib in row[4:9]), capacity))
    return "\n".join([f"model split over {len(plan.stages)} devices, a micro-batch in {plan.needs.micros} parts "
                      "(memory predicted, MiB)", as_text(HEAD, lines, "  "),
                      f"  bubble: {plan.bubble():.1%} predicted"])
