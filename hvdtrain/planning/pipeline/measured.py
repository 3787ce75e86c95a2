"""What a rank finds of a model that is to be cut over ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.config import Config, micro_batches
from hvdtrain.core.mesh import Mesh
from hvdtrain.planning.pipeline.blocks import Block, Needs

LEAST_S = 1e-9
"""A block's seconds at least, that one may be divided by them."""

ALIKE = 0.1
"""Devices of one name whose times differ by less than this part are taken to be equally fast."""

FORWARD_PART = 1 / 3
"""Of a block's seconds, where its forward was not timed alone: a backward computes two products for each of a forward.
"""


@dataclass(frozen=True)
class Measured:
    """What one rank found: all blocks of the model, each measured on this rank's device.

    ``blocks``: costs, activations and cargo of a micro-batch of ``samples`` samples. ``capacity_bytes``: what this rank
    may hold, on a host that it shares its part; 0 where unknown. ``needs``: what it holds beside parameters; how many
    micro-batches are in flight the plan counts by itself. ``device``: its name. A device whose speed is emulated is
    measured as it is. ``most``: samples of the largest micro-batch where they are not all alike; 0: they are. ``why``:
    why fewer samples were measured, and the blocks scaled from those; "": they were not.
    """

    blocks: tuple[Block, ...]
    samples: float
    capacity_bytes: int
    needs: Needs
    device: str
    most: float = 0.0
    why: str = ""

    @property
    def cost_s(self) -> float:
        """Seconds of all blocks."""
        return math.fsum(block.cost_s for block in self.blocks)

    def over(self, samples: float, most: float) -> Measured:
        """The same over micro-batches of ``samples`` in the mean and ``most`` at most, in proportion."""
        f, g = samples / self.samples, most / self.largest
        return replace(self, blocks=tuple(b.over(f, g) for b in self.blocks), samples=samples, most=most)

    @property
    def largest(self) -> float:
        """Samples of the largest micro-batch, which memory has to hold."""
        return self.most or self.samples

    def slowed(self, speed: float) -> Measured:
        """The same on a device of ``speed`` times its speed."""
        blocks = (replace(b, cost_s=b.cost_s / speed, forward_s=b.forward_s / speed) for b in self.blocks)
        return replace(self, blocks=tuple(blocks))


def forward_s(block: Block) -> float:
    """Return the seconds of a block's forward."""
    return block.forward_s or block.cost_s * FORWARD_PART


def measured_samples(config: Config, mesh: Mesh) -> int:
    """Return how many samples a micro-batch of this rank's copy has, by configured shares; 1 at least."""
    assert isinstance(config.shares, (list, tuple))  # names have been spelled out
    shares = config.shares or [1.0] * len(mesh.copies)
    own = config.global_batch * shares[mesh.copy] / sum(shares)
    samples = math.ceil(math.ceil(own) / micro_batches(config, mesh.depth))
    return max(1, min(samples, config.micro_batch_limit or samples))


def evened(rows: Sequence[Measured]) -> tuple[list[int], list[Measured]]:
    """Return (the kind of each row, what is taken to be true of each kind). Pure.

    Rows are of one kind if their devices have one name and are about equally fast over as many samples: what they
    differ by is scatter, and one plan serves all. A block of a kind takes the least of its rows' seconds, as a
    disturbance only adds to some, times what the rows are slower than that in the mean; it holds as much as its
    smallest.
    """
    kinds: list[list[Measured]] = []
    kind_of = []
    for row in rows:
        found = next((k for k, (first, *_) in enumerate(kinds) if _alike(row, first)), len(kinds))
        if found == len(kinds):
            kinds.append([])
        kinds[found].append(row)
        kind_of.append(found)
    return kind_of, [_mean(kind) for kind in kinds]


def _alike(row: Measured, other: Measured) -> bool:
    if row.device != other.device or row.samples != other.samples or row.needs != other.needs:
        return False
    if bool(row.capacity_bytes) != bool(other.capacity_bytes):
        return False
    least_s = [max(block.cost_s, LEAST_S) for block in other.blocks]
    pairs = ((_slower(row, least_s), 1.0), (row.capacity_bytes, other.capacity_bytes))
    return all(abs(a - b) <= ALIKE * max(a, b) for a, b in pairs)


def _slower(row: Measured, least_s: Sequence[float]) -> float:
    """How many times ``least_s`` its blocks take, the median: a disturbance meets a few of them, a slow device all."""
    return statistics.median(block.cost_s / least for block, least in zip(row.blocks, least_s))


def _mean(rows: Sequence[Measured]) -> Measured:
    blocks = []
    least_s = [max(min(b.cost_s for b in same), LEAST_S) for same in zip(*(row.blocks for row in rows))]
    mean = math.fsum(_slower(row, least_s) for row in rows) / len(rows)
    for same in zip(*(row.blocks for row in rows)):
        blocks.append(replace(same[0], cost_s=mean * min(b.cost_s for b in same),
                              forward_s=mean * min(forward_s(b) for b in same),
                              activation_bytes=max(b.activation_bytes for b in same),
                              cargo_bytes=max(b.cargo_bytes for b in same)))
    return replace(rows[0], blocks=tuple(blocks), capacity_bytes=min(row.capacity_bytes for row in rows))
