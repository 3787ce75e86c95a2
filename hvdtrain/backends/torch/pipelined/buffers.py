"""What a rank's part of a PyTorch model holds beside its gradients, over the ranks that have the same blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core.protocols import Writable
from hvdtrain.parallel.parts import ReplicaGroup

Named = Sequence[tuple[str, torch.nn.Module]]


class PartBuffers(Buffers):
    """Implements `hvdtrain.core.protocols.Buffers`: one `Buffers` for the blocks that each group of ranks has in
    common."""

    def __init__(self, model: torch.nn.Module, blocks: Named, replicas: Sequence[ReplicaGroup]) -> None:
        paths = {id(module): name for name, module in model.named_modules()}
        self._parts = [Buffers(torch.nn.ModuleList([blocks[i][1] for i in each.blocks]), Transport(each.wire, Ops()),
                               paths) for each in replicas]

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

    def sync(self) -> list[str]:
        """Make the buffers equal; return those that are no statistics and differed; collective."""
        return [name for part in self._parts for name in part.sync()]

    def appeared(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Note what the first samples have filled or registered."""
        self._parts[0].appeared(buffers)

    def writable(self) -> dict[str, Writable]:
        """Return what forward passes may write to in this rank's blocks, by name."""
        return {name: one for part in self._parts for name, one in part.writable().items()}

    def statistics(self) -> list[str]:
        """Return the names of BatchNorm's statistics."""
        return [name for part in self._parts for name in part.statistics()]

    def aliases(self) -> dict[str, str]:
        """Return nothing: PyTorch's names are those of the whole model."""
        return {}

    def noticed(self) -> list[str]:
        """Return what was written to since `keep`, without what is tracked."""
        return [name for part in self._parts for name in part.noticed()]

    def track(self, names: Iterable[str]) -> None:
        """Have `keep` copy these always."""
        names = list(names)
        for part in self._parts:
            part.track(names)

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        """Reduce those of ``reductions`` that this rank's blocks have; collective over the ranks with a block."""
        for part in self._parts:
            part.combine(reductions, samples, force)
