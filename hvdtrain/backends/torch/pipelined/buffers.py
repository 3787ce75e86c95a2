"""What a rank's part of a PyTorch model holds beside its gradients, over the ranks that have the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.exchange.transport import Transport
from hvdtrain.pipeline.replicas import Replicas

Named = Sequence[tuple[str, torch.nn.Module]]


class PartBuffers(Buffers):
    """Implements `hvdtrain.protocols.Buffers`: one `Buffers` for the blocks that each group of ranks has in common."""

    def __init__(self, blocks: Named, replicas: Sequence[Replicas]) -> None:
        self._parts = [Buffers(torch.nn.ModuleList([blocks[i][1] for i in each.blocks]), Transport(each.wire, Ops()))
                       for each in replicas]

    def saw(self, samples: int) -> None:
        """Count the samples of one forward pass."""
        for part in self._parts:
            part.saw(samples)

    def loaded(self) -> None:
        """Note that every rank has been given the same buffers."""
        for part in self._parts:
            part.loaded()

    def keep(self) -> None:
        """Remember the buffers as they are before a step."""
        for part in self._parts:
            part.keep()

    def discard(self) -> None:
        """Give the buffers the values they had at `keep`."""
        for part in self._parts:
            part.discard()

    def share(self) -> None:
        """Give every rank the parameters and buffers of the first that has them; collective."""
        for part in self._parts:
            part.share()

    def sync(self) -> None:
        """Make the buffers equal; collective."""
        for part in self._parts:
            part.sync()
