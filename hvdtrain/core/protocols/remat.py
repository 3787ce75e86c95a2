"""The seam of rematerialisation: blocks that forget what their forward made and compute it again in backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdtrain.core.protocols.arrays import Batch
from hvdtrain.core.protocols.model_state import Transform


@dataclass(frozen=True)
class BlockCost:
    """What recomputing one block saves and costs, for a micro-batch that was tried.

    ``saved_bytes``: activations that the block keeps from forward to backward, less what recomputing has to keep (its
    inputs that nobody else keeps). ``forward_s``: seconds of its forward pass, which is made once more.
    ``inner_bytes``: what comes back for the time of the block's own backward, since only one block is recomputed at a
    time: 0 where that is not known.
    """

    name: str
    saved_bytes: int
    forward_s: float
    inner_bytes: int = 0


class Remat(Transform, Protocol):
    """Recomputes chosen blocks of a model in backward (activation checkpointing), exactly.

    The gradients have the bits that they have without it (CPU, fp32), random masks are the same, buffers are updated
    once, and the random state after a step is the same. ``names``: the model's blocks in the order of its forward
    pass. ``chosen``: those that are recomputed.
    """

    names: Sequence[str]
    chosen: tuple[str, ...]

    def refusal(self, name: str) -> str:
        """Return why block ``name`` cannot be recomputed exactly, in words; "" where it can."""
        ...

    def choose(self, names: Collection[str]) -> None:
        """Recompute these blocks and no others from the next step on; called between steps, also before the first."""
        ...

    def costs(self, batch: Batch) -> list[BlockCost]:
        """Measure every block on ``batch`` (numpy arrays (B, ...)), in the order of ``names``; all is as before then.

        Exchanges nothing; blocks that `refusal` names are not among the results.
        """
        ...
