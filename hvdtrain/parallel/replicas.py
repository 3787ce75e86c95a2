"""The ranks that hold the same blocks of a model which is cut over ranks, and the wire between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.core.group import Group
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Collectives, ParamSpec


@dataclass(frozen=True)
class Replicas:
    """``group``: one rank of each copy of the model; ``blocks``: the numbers of the blocks that just these ranks have.

    ``wire``: between the group's ranks alone.
    """

    group: Group
    blocks: tuple[int, ...]
    wire: Collectives

    def params(self, specs: Sequence[ParamSpec]) -> list[int]:
        """The indices of those of this rank's ``specs`` that these ranks hold."""
        return [i for i, spec in enumerate(specs) if spec.block in self.blocks]


def replicas_of(layout: Layout, wire: Collectives) -> list[Replicas]:
    """Return those of this rank, the model's last blocks first; collective over all ranks of the job.

    A rank may be in several groups, where copies are of unlike depth. All ranks make the wires of their groups in one
    order, by the last block of each, so that none waits for one that waits for it.
    """
    return [Replicas(group, blocks, wire.among(group)) for group, blocks in layout.replicas()]
