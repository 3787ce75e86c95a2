"""What a run tells about itself, and the seam of everything that shows or keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hvdtrain.core.cursor import Cursor

if TYPE_CHECKING:
    from hvdtrain.core.events import Event

RunT = TypeVar("RunT", contravariant=True)


class Position(Protocol):
    """The state of a run, as reports see it."""

    cursor: Cursor


class StepsLeft(Protocol):
    """The data of a run, as reports see them."""

    def steps_left(self, cursor: Cursor) -> int | None:
        """Return the steps from ``cursor`` to the end of its epoch; None where that is unknown."""
        ...


class RecordedRun(Protocol):
    """A run as its records and reports see it: below `hvdtrain.engine`, nothing knows more of one.

    ``begun``: it writes into ``out``, its directory, and cannot be refused any more.
    """

    out: Path
    begun: bool

    @property
    def state(self) -> Position:
        """Where it stands."""
        ...

    @property
    def feed(self) -> StepsLeft:
        """Its training data."""
        ...

    def note(self, text: str) -> None:
        """Keep a remark for the summary and the log, and print it on rank 0 now."""
        ...


@dataclass(frozen=True)
class Record:
    """One thing that happened: ``event`` at ``step`` and ``time_s`` (unix seconds), with ``values`` by name.

    `hvdtrain.core.records.schema` has every event of the house with its values. Values are JSON-able; NaN and
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
        ...

    def close(self) -> None:
        """Write what is still held: the fit has ended, well or not. Called once."""
        ...


class Tracker(Protocol):
    """Hands records on to another tool, beside training: ``trackers: [path/file.py:callable]``, called with the run.

    Made, used and closed in one thread of rank 0, after the run has begun, so ``run.out`` is there; only what does not
    change in the run may be read from it. It gets a "step" record every ``log_every`` steps and all others. What it
    raises is said once, and it gets nothing more: it never ends a run.
    """

    def write(self, record: Record) -> None:
        """Take one record; `hvdtrain.core.records.numbers` reads numbers and settings out of it."""
        ...

    def close(self) -> None:
        """Write what is still held: the fit has ended, well or not, or this tracker has failed. Called once."""
        ...


class Callback(Protocol[RunT]):
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
    def steers(self) -> bool:
        """See above."""
        ...

    def hears(self, event: Event) -> bool:
        """Return whether `on` does anything at ``event``."""
        ...

    def on(self, event: Event, run: RunT) -> None:
        """See one moment."""
        ...

    def saving(self, run: RunT) -> None:
        """Bring together what `state_dict` will tell, before each save; collective with ``where`` "all"."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state to keep in a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        ...

    def restored(self, run: RunT) -> None:
        """See the run between `load_state_dict` and the return of what each rank owns, such as compressor state."""
        ...


class Launcher(Protocol):
    """Turns a launch into a command line without running it."""

    def command(self, spec: Any) -> tuple[list[str], dict[str, str]]:
        """Return (argv, environment); pure."""
        ...
