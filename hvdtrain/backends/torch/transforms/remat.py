"""Blocks that keep only their inputs from forward to backward, and are computed once more there (the key ``remat``).

Owns which blocks those are, and the forward pass that stands in for theirs. How a block is computed again exactly is
`hvdtrain.backends.torch.recompute`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from hvdtrain.backends.torch.recompute.frame import Block, Frame
from hvdtrain.backends.torch.recompute.random import Generators
from hvdtrain.backends.torch.transforms.sync_batchnorm import SyncBatchNorm
from hvdtrain.protocols import Batch, BlockCost

Named = Sequence[tuple[str, torch.nn.Module]]


class Recomputed:
    """Stands in for the forward pass of a block; ``beneath``: what stood there before, None for the class's own.

    A copy or a pickle of the block has the forward pass beneath.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.beneath: Any = vars(module).get("forward")
        self.block: Block | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Compute the block; where a backward may follow, keep its inputs only."""
        if self.block is None or not torch.is_grad_enabled():
            return self.compute(*args, **named)
        return Frame(self.block, args, named).run(args, named)

    def compute(self, *args: Any, **named: Any) -> Any:
        """The block's own forward pass."""
        if self.beneath is not None:
            return self.beneath(*args, **named)
        return type(self.module).forward(self.module, *args, **named)

    def __reduce__(self) -> Any:
        if self.beneath is not None:
            return _itself, (self.beneath,)
        return getattr, (self.module, "forward")


def _itself(forward: Any) -> Any:
    return forward


class Remat:
    """Implements `hvdtrain.protocols.Remat` for the blocks ``named`` of a model on ``devices``."""

    collective = False

    def __init__(self, named: Named, devices: Sequence[torch.device], sync: SyncBatchNorm | None) -> None:
        self._named = dict(named)
        self.names: Sequence[str] = list(self._named)
        self.chosen: tuple[str, ...] = ()
        self._generators = Generators(devices)
        self._kinds = sorted({d.type for d in devices})
        self._tapes = [] if sync is None else sync.tapes
        self._placed: dict[str, Recomputed] = {}
        self._installed = False

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        """Have the chosen blocks recomputed, from now on."""
        self._installed = True
        for name in self.chosen:
            module = self._named[name]
            if not isinstance(vars(module).get("forward"), Recomputed):
                placed = self._placed[name] = Recomputed(module)
                placed.block = Block(name, module, placed.compute, self._generators, self._kinds, self._tapes)
                vars(module)["forward"] = placed

    def remove(self, model: torch.nn.Module) -> None:
        """Give every block its own forward pass back."""
        self._installed = False
        for placed in self._placed.values():
            own = vars(placed.module)
            if placed.beneath is None:
                del own["forward"]
            else:
                own["forward"] = placed.beneath
        self._placed = {}

    def refusal(self, name: str) -> str:
        """Return why a block cannot be recomputed exactly, in words; "" where it can."""
        return ""

    def choose(self, names: Collection[str]) -> None:
        """Recompute these blocks and no others from the next step on."""
        installed = self._installed
        self.remove(torch.nn.Identity())
        self.chosen = tuple(name for name in self.names if name in names)
        if installed:
            self.install(torch.nn.Identity())

    def costs(self, batch: Batch) -> list[BlockCost]:
        """Measure every block on ``batch``."""
        return []

    def describe(self) -> dict[str, str]:
        """Return the recomputed blocks, for the summary."""
        return {"recomputed": ", ".join(self.chosen)} if self.chosen else {}

    def caveats(self) -> list[str]:
        """Return nothing: it is exact."""
        return []
