"""The compressors' seam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hvdtrain.core.protocols.arrays import Array
from hvdtrain.core.protocols.ops import Ops
from hvdtrain.core.protocols.wire import Exchange

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import Bucket


class Compressor(Protocol):
    """How one flat bucket of gradients is summed over the ranks; written once for all frameworks.

    ``dtypes``: of the buckets it takes; None: whatever the collectives sum. ``reductions``: beside "sum", what it
    asks of the collectives. ``own_mean``: it wants the mean over the rank's own samples, not its part of the global
    mean. ``elementwise``: it has no state and takes each element by itself, so that a bucket may be taken apart. State
    arrays are never written to: an exchange returns new ones, so that a step that is left out can be undone. A
    compressor must not hide what is not finite: NaN in, NaN out.
    """

    name: str
    dtypes: frozenset[str] | None
    reductions: frozenset[str]
    own_mean: bool
    elementwise: bool

    def describe(self) -> str:
        """Name and settings in short, for the summary; equal texts mean equal compression."""
        ...

    def stage(self, step: int) -> int:
        """Which stage of a warm-up step ``step`` (from 0) of the run belongs to; 0 where there is none.

        The numbers are few: a framework with graphs makes one for each.
        """
        ...

    def init(self, ops: Ops, bucket: Bucket) -> dict[str, Array]:
        """State of one bucket before its first exchange."""
        ...

    def exchange(self, ops: Ops, flat_N: Array, state: dict[str, Array], bucket: Bucket, size: int,
                 stage: int = 0) -> Exchange:
        """Yield requests, receive their results, return ``(sum_N, new state)``; same bits on every rank."""
        ...

    def wire_bytes(self, bucket: Bucket, size: int, stage: int | None = None) -> int:
        """Bytes one rank sends for a bucket; ``stage`` None is the one after any warm-up."""
        ...
