"""What a run tells about itself, and the seam of everything that shows or keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


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
