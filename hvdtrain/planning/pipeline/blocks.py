"""Named blocks of a model as measured on a device: time, memory, size of outputs. Pure.

Measuring belongs to the backends, the choice of a partition to `search`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.config import Config
from hvdtrain.core.units import format_bytes

LEAST_S = 1e-9
"""Lower bound of a block's seconds, so that ratios are defined."""

ALIKE = 0.1
"""Devices of one name are equally fast if their times differ by less than this fraction."""

FORWARD_PART = 1 / 3
"""Fraction of a block's seconds if its forward was not timed alone: a backward computes two products, a forward one."""

MICROS_FOR_EACH = 4
"""Default parts of a micro-batch for each device of a split model: a bubble below a fifth."""


@dataclass(frozen=True)
class Block:
    """A named block of a model, measured.

    ``cost_s``: seconds of forward and backward of one micro-batch; ``forward_s``: of forward alone, 0 if not timed.
    ``param_bytes``: of all its variables. ``activation_bytes``: kept for backward, of one micro-batch. ``cargo_bytes``:
    of its output, sent if the next block is on another device.
    """

    name: str
    cost_s: float
    param_bytes: int
    activation_bytes: int
    forward_s: float = 0.0
    cargo_bytes: int = 0

    def over(self, factor: float, memory_factor: float | None = None) -> Block:
        """Return the block with ``factor`` times the samples; ``memory_factor``: for the activations, if different."""
        kept = factor if memory_factor is None else memory_factor
        return replace(self, cost_s=self.cost_s * factor, forward_s=self.forward_s * factor,
                       cargo_bytes=math.ceil(self.cargo_bytes * factor),
                       activation_bytes=round(self.activation_bytes * kept))


@dataclass(frozen=True)
class Holds:
    """Bytes on one device, by purpose."""

    parameters: float
    gradients: float
    slots: float
    activations: float

    @property
    def total(self) -> float:
        """Sum of all bytes."""
        return self.parameters + self.gradients + self.slots + self.activations

    def words(self) -> str:
        return (f"parameters {format_bytes(self.parameters)}, gradients {format_bytes(self.gradients)}, optimizer "
                f"{format_bytes(self.slots)}, activations {format_bytes(self.activations)}")


@dataclass(frozen=True)
class Needs:
    """Bytes of gradients and of optimizer slots for each byte of parameters.

    ``gradients``: 1 for the gradients, 1 more for the flat buckets of an exchange, 1 more for sums over micro-batches.
    ``slots``: 0 for SGD, 1 with momentum, 2 for Adam.
    """

    gradients: float = 1.0
    slots: float = 2.0


@dataclass(frozen=True)
class DeviceProfile:
    """All blocks of a model, measured on one device.

    ``blocks``: costs of a micro-batch of ``samples`` samples. ``capacity_bytes``: memory that training may use, a share
    on a host with several ranks; 0 if unknown. ``device``: its name. ``most``: samples of the largest micro-batch if
    sizes differ, else 0. ``why``: reason that fewer samples were measured and scaled, "" if not. ``together_bytes``:
    limit of all devices of this rank that share one memory, 0 for devices with their own.
    """

    blocks: tuple[Block, ...]
    samples: float
    capacity_bytes: int
    needs: Needs
    device: str
    most: float = 0.0
    why: str = ""
    together_bytes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks, in the order of the forward pass."""
        return tuple(block.name for block in self.blocks)

    @property
    def cost_s(self) -> float:
        """Seconds of all blocks."""
        return math.fsum(block.cost_s for block in self.blocks)

    def over(self, samples: float, most: float) -> DeviceProfile:
        """Scale to micro-batches of ``samples`` on average and ``most`` at most."""
        f, g = samples / self.samples, most / self.largest
        return replace(self, blocks=tuple(b.over(f, g) for b in self.blocks), samples=samples, most=most)

    @property
    def largest(self) -> float:
        """Samples of the largest micro-batch, which memory has to hold."""
        return self.most or self.samples

    def slowed(self, speed: float) -> DeviceProfile:
        """Return the profile of a device of ``speed`` times the speed."""
        blocks = (replace(b, cost_s=b.cost_s / speed, forward_s=b.forward_s / speed) for b in self.blocks)
        return replace(self, blocks=tuple(blocks))


def forward_s(block: Block) -> float:
    """Return the seconds of a block's forward."""
    return block.forward_s or block.cost_s * FORWARD_PART


def micro_samples(config: Config, replica: int, replicas: int, micros: int) -> int:
    """Return the samples of a micro-batch of ``replica`` in ``micros`` of a step, by configured shares; at least 1."""
    assert isinstance(config.shares, (list, tuple))  # names of hosts have been resolved
    shares = config.shares or [1.0] * replicas
    own = config.global_batch * shares[replica] / sum(shares)
    samples = math.ceil(math.ceil(own) / micros)
    return max(1, min(samples, config.micro_batch_limit or samples))


def split_micros(config: Config) -> int:
    """Return the parts in which a model split over devices computes a micro-batch with enough samples."""
    return config.split_micro_batches or MICROS_FOR_EACH * config.model_parallel


def parts_of(samples: int, micros: int) -> int:
    """Return ``micros``, or for fewer samples a power of two, so that few kinds of graph are traced."""
    return micros if samples >= micros else 1 << (max(1, samples).bit_length() - 1)


def part_samples(config: Config, rank: int, ranks: int) -> int:
    """Return the samples of a part of this rank's micro-batch in a model split over devices; at least 1."""
    return -(-micro_samples(config, rank, ranks, config.accumulate) // split_micros(config))


def evened(rows: Sequence[DeviceProfile]) -> tuple[list[int], list[DeviceProfile]]:
    """Return (the kind of each row, the profile of each kind).

    Rows are of one kind if their devices have one name and are about equally fast over as many samples: the rest is
    noise, and one plan serves all. Noise only adds to some blocks: a block takes the least seconds of its rows, times
    the mean slowdown of the rows relative to those.
    """
    kinds: list[list[DeviceProfile]] = []
    kind_of = []
    for row in rows:
        found = next((k for k, (first, *_) in enumerate(kinds) if _alike(row, first)), len(kinds))
        if found == len(kinds):
            kinds.append([])
        kinds[found].append(row)
        kind_of.append(found)
    return kind_of, [_mean(kind) for kind in kinds]


def slowest(rows: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return the worst of all rows for each block, and the smallest known memory."""
    def least(sizes: Sequence[int]) -> int:
        return min((size for size in sizes if size), default=0)

    blocks = tuple(replace(same[0], cost_s=max(b.cost_s for b in same), forward_s=max(forward_s(b) for b in same),
                           activation_bytes=max(b.activation_bytes for b in same),
                           cargo_bytes=max(b.cargo_bytes for b in same)) for same in zip(*(row.blocks for row in rows)))
    return replace(rows[0], blocks=blocks, capacity_bytes=least([row.capacity_bytes for row in rows]),
                   together_bytes=least([row.together_bytes for row in rows]))


def _alike(row: DeviceProfile, other: DeviceProfile) -> bool:
    if row.device != other.device or row.samples != other.samples or row.needs != other.needs:
        return False
    if bool(row.capacity_bytes) != bool(other.capacity_bytes):
        return False
    least_s = [max(block.cost_s, LEAST_S) for block in other.blocks]
    pairs = ((_slowdown(row, least_s), 1.0), (row.capacity_bytes, other.capacity_bytes))
    return all(abs(a - b) <= ALIKE * max(a, b) for a, b in pairs)


def _slowdown(row: DeviceProfile, least_s: Sequence[float]) -> float:
    """Return the median ratio to ``least_s``: noise affects a few blocks, a slow device all."""
    return statistics.median(block.cost_s / least for block, least in zip(row.blocks, least_s))


def _mean(rows: Sequence[DeviceProfile]) -> DeviceProfile:
    columns = list(zip(*(row.blocks for row in rows)))
    least_s = [max(min(b.cost_s for b in same), LEAST_S) for same in columns]
    mean = math.fsum(_slowdown(row, least_s) for row in rows) / len(rows)
    worst = slowest(rows)
    return replace(worst, blocks=tuple(
        replace(block, cost_s=mean * min(b.cost_s for b in same), forward_s=mean * min(forward_s(b) for b in same))
        for block, same in zip(worst.blocks, columns)))
