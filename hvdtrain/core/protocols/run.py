"""Protocols of a run: records and their reports, callbacks, and the state that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from hvdtrain.core.events import Event
from hvdtrain.core.protocols.types import Cursor

RunT = TypeVar("RunT", contravariant=True)


class Position(Protocol):
    """The state of a run, as reports see it."""

    cursor: Cursor


class StepsLeft(Protocol):
    """The data of a run, as reports see them."""

    def steps_left(self, cursor: Cursor) -> int | None:
        """Return the steps from ``cursor`` to the end of its epoch; None where that is unknown."""


class RecordedRun(Protocol):
    """A run as its records and reports see it: below `hvdtrain.engine`, nothing knows more of one.

    ``begun``: it writes into ``out``, its directory, and cannot be refused any more.
    """

    out: Path
    begun: bool

    @property
    def state(self) -> Position: ...

    @property
    def feed(self) -> StepsLeft: ...

    def note(self, text: str) -> None:
        """Keep a remark for the summary and the log, and print it on rank 0 now."""


@dataclass(frozen=True)
class Record:
    """A recorded event: ``event`` at ``step`` and ``time_s`` (unix seconds), with ``values`` by name.

    `hvdtrain.core.records` has every event of the house with its values. Values are JSON-able; NaN and
    infinities may be among them. Nobody changes them.
    """

    event: str
    step: int
    time_s: float
    values: dict[str, Any]


class Report(Protocol):
    """Shows or keeps records; lives on rank 0 alone and enters no collective.

    ``every``: which "step" records it takes, "10 step", "5 s" or "" for each; of other events it gets all.
    ``at_once``: it takes records also before the run has begun and may still be refused, so it must leave nothing on
    disk then; others get those when the run has begun. What it raises is said once, and it is asked no more: a report
    never ends a run.
    """

    every: str
    at_once: bool

    def write(self, record: Record) -> None:
        """Take one record; short, since training waits for it."""

    def close(self) -> None:
        """Write what is still held: the fit has ended, well or not. Called once."""


class Tracker(Protocol):
    """Hands records on to another tool, in the background: ``trackers: [path/file.py:callable]``, called with the run.

    Made, used and closed in one thread of rank 0, after the run has begun, so ``run.out`` is there; only what does not
    change in the run may be read from it. It gets a "step" record every ``log_every`` steps and all others. What it
    raises is said once, and it gets nothing more: it never ends a run.
    """

    def write(self, record: Record) -> None:
        """Take one record; `hvdtrain.core.records` reads numbers and settings out of it."""

    def close(self) -> None:
        """Write what is still held: the fit has ended, well or not, or this tracker has failed. Called once."""


class RunCallback(Protocol[RunT]):
    """Observes a run: a method per `Event` it cares for, called with the run.

    ``where``: "root" (rank 0 only; gets no group, so it cannot enter a collective) or "all".
    ``every``: "N step", "N epoch" or "N s" thins out STEP_END (root only for seconds); "" is every time.
    ``doing``: what it does, for a person who waits for it; "": the name of the event tells. ``steers``: metrics change
    the training through it.
    """

    where: str
    every: str
    doing: str

    @property
    def steers(self) -> bool: ...

    def hears(self, event: Event) -> bool:
        """Return whether `on` does anything at ``event``."""

    def listener(self, event: Event) -> Callable[[RunT], None]:
        """Return what is called at ``event``: does what `on` does."""

    def on(self, event: Event, run: RunT) -> None:
        """Handle ``event``."""

    def saving(self, run: RunT) -> None:
        """Bring together what `state_dict` will tell, before each save; collective with ``where`` "all"."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state to keep in a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""

    def restored(self, run: RunT) -> None:
        """Adapt to the run after `load_state_dict`, before each rank gets back its own state (of compressors)."""


class Launcher(Protocol):
    """Turns a launch into a command line without running it."""

    def command(self, spec: Any) -> tuple[list[str], dict[str, str]]:
        """Return (argv, environment); pure."""


Read = Callable[[str], Mapping[str, np.ndarray]]
"""``read(group)``: what this rank wants of a checkpoint's group, by name: whole arrays in their shape, windows (n,)."""


class ArrayWindow(NamedTuple):
    """Memory (n,) for elements [begin, begin + n) of an array in row-major order."""

    begin: int
    values: np.ndarray


Place = Callable[[str, str, tuple[int, ...], Any], np.ndarray | ArrayWindow | None]
"""``place(group, name, shape, dtype)``: what an array is to be copied into.

Memory of its shape; or an `ArrayWindow` for those elements alone, whose ``values`` come back; or None for a view.
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
    """Gives a rank's state to a checkpoint."""

    def shards(self, place: Place | None = None) -> Iterable[Shard]:
        """Yield what this rank has to give; over all ranks every element comes exactly once.

        State that all ranks hold alike comes from rank 0. Enters no collective: one rank is asked after the other.
        ``place``: where the values are copied to; those for which it gives None may be views, good until the next step.
        """

    def rest(self) -> dict[str, Any]:
        """Return the JSON-able rest of the state; asked of rank 0 only, after its `shards`."""


class Stateful(Given, Protocol):
    """A part of a run whose state belongs into a checkpoint and comes back from one."""

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        """Return what `load` needs of a checkpoint that holds ``heads``. Errors: `UserError` where it does not fit."""

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        """Undo `shards` and `rest`; return in words what did not fit and starts again, or ""."""


class Outcome(NamedTuple):
    """Result of saving the state of a step on a rank: ``error`` is "" or why it was not written.

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

    def settled(self) -> list[Outcome]:
        """Return what has been done or given up since the last call, oldest first."""

    def wait(self, timeout_s: float) -> bool:
        """Return once nothing is left to do; False where ``timeout_s`` have passed before."""

    def end(self) -> None:
        """Give back what is kept from save to save."""


@dataclass
class SaveCost:
    """Cost of saves on this rank: ``blocked_s`` of training, ``cpu_s`` of threads, and the same of the ``last``.

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
    """Saves a run, one save at a time, while it continues. ``spent``: what that has cost this rank.

    ``cost_s``: on rank 0, what the latest save that is over has cost the slowest rank; None before there is one.
    """

    spent: SaveCost
    cost_s: float | None

    def begin(self) -> None:
        """Copy the state of the step that has ended and have it written; collective.

        Waits for the save before this one, if that is under way.
        """

    def busy(self) -> bool:
        """Return whether a save is under way on this rank."""

    def settled(self) -> list[Outcome]:
        """Return what has been written or given up since the last call, oldest first."""

    def latest(self) -> str:
        """Return "" or why the latest save, which is over, wrote nothing; earlier results stay `settled`'s."""

    def wait(self) -> None:
        """Return when nothing is left to write or to send; `WaitTimeout` where that takes too long."""

    def end(self) -> None:
        """Give back memory and channel when the last save is over; the next one has its own. Collective."""

    def close(self) -> None:
        """Finish a save that is under way, soon, or drop it: a run that ends by an error enters no collective."""
