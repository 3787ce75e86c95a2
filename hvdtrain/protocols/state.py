"""The seams of a run's state: how its parts give it to a checkpoint and take it back, and who writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from hvdtrain.checkpoint.snapshot import Snapshot

Read = Callable[[str], Mapping[str, np.ndarray]]
"""``read(group)``: the arrays of a checkpoint's group by name; empty where it has none for this rank."""


@dataclass(frozen=True, eq=False)
class Shard:
    """Elements [begin, begin + n) of one tensor in row-major order.

    ``group``: the file it is kept in, such as "model". ``shape``: of the whole tensor. ``values``: (n,), contiguous
    host memory that nobody changes afterwards; bfloat16 as its bits in uint16.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    begin: int
    values: np.ndarray


class Stateful(Protocol):
    """A part of a run whose state belongs into a checkpoint."""

    def shards(self) -> Iterable[Shard]:
        """Yield what this rank has to give; over all ranks every element comes exactly once.

        State that all ranks hold alike comes from rank 0. Enters no collective: one rank is asked after the other.
        """
        ...

    def rest(self) -> dict[str, Any]:
        """Return the JSON-able rest of the state; asked of rank 0 only, after its `shards`."""
        ...

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        """Undo `shards` and `rest`; return in words what did not fit and starts anew, or ""."""
        ...


class Outcome(NamedTuple):
    """What came of saving the state of a step: ``error`` is "" or why it was not written."""

    step: int
    error: str


class Saver(Protocol):
    """Writes checkpoints on rank 0. Enters no collective; its outcomes are told to the other ranks by the caller."""

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Write ``snapshot``, now or later; trouble with the disk is an outcome, not an exception."""
        ...

    def settled(self) -> list[Outcome]:
        """Return what has been written or given up since the last call, oldest first."""
        ...

    def wait(self) -> None:
        """Return once nothing is left to write."""
        ...
