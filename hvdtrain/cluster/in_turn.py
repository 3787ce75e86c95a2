"""Work that needs so much of a host's memory that only one of its ranks may do it at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.cluster.control import agreed
from hvdtrain.core.protocols import Control

T = TypeVar("T")


def in_turn(control: Control, work: Callable[[], T], what: str) -> T:
    """Return ``work()`` of this rank, done by one rank of each host after the other; collective, as `agreed`."""
    found: list[T] = []
    for turn in range(max(control.gather(control.local_size))):
        agreed(control, lambda: found.append(work()) if turn == control.local_rank else None, what)  # noqa: B023
    return found[0]
