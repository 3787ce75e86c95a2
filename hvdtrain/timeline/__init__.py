"""What this rank does and when: `span` around a piece of work is the one hook, for seconds by cause and for traces.

A span outside of a run, or in a thread that nobody has named, does nothing. Spans of a run's own thread move its
`hvdtrain.timeline.clock.Clock`; spans of any thread are handed to the recorder of a trace while one is being taken.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from hvdtrain.timeline.clock import CAUSES, Clock

__all__ = ["CAUSES", "Taker", "Timeline", "active", "current", "span"]

_local = threading.local()


class Taker(Protocol):
    """Takes the spans of a trace."""

    def take(self, name: str, lane: str, begin_s: float, end_s: float, args: dict[str, Any]) -> None:
        """Keep what ``lane`` (a thread, a wire) did; seconds of `time.perf_counter`. Called from any thread."""
        ...


class Timeline:
    """One rank's: ``clock`` gives its seconds to causes, ``taker`` takes spans while a trace is being taken."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.taker: Taker | None = None


class _Lane:
    """A thread in a run; ``main``: the one whose seconds are counted."""

    __slots__ = ("timeline", "name", "main")

    def __init__(self, timeline: Timeline, name: str, main: bool) -> None:
        self.timeline, self.name, self.main = timeline, name, main


@contextlib.contextmanager
def active(timeline: Timeline, lane: str = "main") -> Iterator[None]:
    """Let spans of this thread count for ``timeline`` within the body; only those of lane "main" move its clock."""
    before = getattr(_local, "lane", None)
    _local.lane = _Lane(timeline, lane, lane == "main")
    try:
        yield
    finally:
        _local.lane = before


def current() -> Timeline | None:
    """Return the timeline of this thread, to be handed on to a thread of its own; None outside of a run."""
    lane = getattr(_local, "lane", None)
    return None if lane is None else lane.timeline


class span:  # noqa: N801  (read as a statement: with span("update"))
    """Encloses a piece of work called ``name``; ``cause``: what its seconds are spent on, "" for that around it."""

    __slots__ = ("name", "cause", "args", "_lane", "_begin")

    def __init__(self, name: str, cause: str = "", **args: Any) -> None:
        self.name, self.cause, self.args = name, cause, args
        self._lane: _Lane | None = None
        self._begin = 0.0

    def __enter__(self) -> span:
        lane = self._lane = getattr(_local, "lane", None)
        if lane is not None:
            if self.cause and lane.main:
                lane.timeline.clock.push(self.cause)
            if lane.timeline.taker is not None:
                self._begin = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        lane = self._lane
        if lane is None:
            return
        if self.cause and lane.main:
            lane.timeline.clock.pop()
        taker = lane.timeline.taker
        if taker is not None and self._begin:
            taker.take(self.name, lane.name, self._begin, time.perf_counter(), self.args)
