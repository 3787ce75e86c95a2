"""The seams of a run's state: how its parts give it to a checkpoint and take it back, and who writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Read = Callable[[str], Mapping[str, np.ndarray]]
"""``read(group)``: what this rank wants of a checkpoint's group, by name: whole arrays in their shape, windows (n,)."""


class Window(NamedTuple):
    """Memory (n,) for elements [begin, begin + n) of an array in row-major order."""

    begin: int
    values: np.ndarray


Place = Callable[[str, str, tuple[int, ...], Any], np.ndarray | Window | None]
"""``place(group, name, shape, dtype)``: what an array is to be copied into.

Memory of its shape; or a `Window` where only those elements are asked for, and what comes back is its ``values``; or
None for a view.
"""


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


class Head(NamedTuple):
    """A `Shard` without its values: what its receiver has to know before they come. ``n``: number of values."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    n: int


class Want(NamedTuple):
    """Elements [begin, end) of an array of a checkpoint, in row-major order, that a rank needs to load it."""

    group: str
    name: str
    begin: int
    end: int


class Given(Protocol):
    """What a rank gives to a checkpoint."""

    def shards(self, place: Place | None = None) -> Iterable[Shard]:
        """Yield what this rank has to give; over all ranks every element comes exactly once.

        State that all ranks hold alike comes from rank 0. Enters no collective: one rank is asked after the other.
        ``place``: where the values are copied to; those for which it gives None may be views, good until the next step.
        """
        ...

    def rest(self) -> dict[str, Any]:
        """Return the JSON-able rest of the state; asked of rank 0 only, after its `shards`."""
        ...


class Stateful(Given, Protocol):
    """A part of a run whose state belongs into a checkpoint and comes back from one."""

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        """Return what `load` needs of a checkpoint that holds ``heads``. Errors: `UserError` where it does not fit."""
        ...

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        """Undo `shards` and `rest`; return in words what did not fit and starts anew, or ""."""
        ...


class Outcome(NamedTuple):
    """What came of saving the state of a step on a rank: ``error`` is "" or why it was not written.

    ``took_s``: from its begin to its end. ``cpu_s``: processor seconds of the thread that worked on it.
    """

    step: int
    error: str
    took_s: float = 0.0
    cpu_s: float = 0.0


class Saver(Protocol):
    """Does a rank's part of a checkpoint once its state is copied. Enters no collective.

    Rank 0's outcomes count; the caller tells them to the other ranks.
    """

    def save(self, step: int, work: Callable[[], None]) -> None:
        """Call ``work``, now or in a thread; an exception that it raises is an outcome."""
        ...

    def settled(self) -> list[Outcome]:
        """Return what has been done or given up since the last call, oldest first."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Return once nothing is left to do; False where ``timeout_s`` have passed before."""
        ...

    def end(self) -> None:
        """Give back what is kept from save to save."""
        ...


@dataclass
class Spent:
    """What saves have cost this rank: ``blocked_s`` of training, ``cpu_s`` of threads, and the same of the ``last``.

    ``longest_s``: from the begin of a save to its end.
    """

    saves: int = 0
    blocked_s: float = 0.0
    cpu_s: float = 0.0
    last_blocked_s: float = 0.0
    last_cpu_s: float = 0.0
    last_took_s: float = 0.0
    longest_s: float = 0.0
    written: int = -1
    """Step of the latest checkpoint that was written; rank 0 knows."""


class RunSaver(Protocol):
    """Saves a run, one save at a time, while it goes on. ``spent``: what that has cost this rank.

    ``cost_s``: on rank 0, what the latest save that is over has cost the slowest rank; None before there is one.
    """

    spent: Spent
    cost_s: float | None

    def begin(self) -> None:
        """Copy the state of the step that has ended and have it written; collective.

        Waits for the save before this one, if that is under way.
        """
        ...

    def busy(self) -> bool:
        """Return whether a save is under way on this rank."""
        ...

    def settled(self) -> list[Outcome]:
        """Return what has been written or given up since the last call, oldest first."""
        ...

    def latest(self) -> str:
        """Return "" or why the latest save, which is over, wrote nothing; what came of those before stays `settled`'s.
        """
        ...

    def wait(self) -> None:
        """Return when nothing is left to write or to send; `WaitTimeout` where that takes too long."""
        ...

    def end(self) -> None:
        """Give back memory and channel when the last save is over; the next one has its own. Collective."""
        ...

    def close(self) -> None:
        """Finish a save that is under way, soon, or drop it: a run that ends by an error enters no collective."""
        ...
