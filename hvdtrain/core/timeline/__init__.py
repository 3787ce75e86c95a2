"""What this rank does and when: `span` around a piece of work is the one hook, for seconds by cause and for traces.

A span outside of a run, or in a thread that nobody has named, does nothing. Spans of a run's own thread move its
`hvdtrain.core.timeline.clock.Clock`; spans of any thread are handed to the recorder of a trace while one is being
taken. `blocked` is the span around standing in an exchange with other ranks: all places where a rank waits for others
have it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hvdtrain.core.errors import UserError
from hvdtrain.core.timeline import birth
from hvdtrain.core.timeline.clock import CAUSES, Clock, StepTotals
from hvdtrain.core.timeline.stood import Blocked, Stood

__all__ = ["CAUSES", "Blocked", "Taker", "Timeline", "active", "blocked", "current", "idle", "span", "stamped"]

_local = threading.local()


class Taker(Protocol):
    """Takes the spans of a trace."""

    def take(self, name: str, lane: str, begin_s: float, end_s: float, args: dict[str, Any], cause: str = "") -> None:
        """Keep what ``lane`` (a thread, a wire) did; seconds of `time.perf_counter`. Called from any thread.

        ``cause``: one of `CAUSES`, "wait" for the time in an exchange; "": that of the span around it.
        """
        ...


class Timeline:
    """One rank's: ``clock`` gives its seconds to causes, ``taker`` takes spans while a trace is being taken.

    ``idle_s``: rank -> seconds that it waited for that stage of a pipeline. ``stood``: the exchanges in which it stood.
    ``totals``: sums over its steps. ``step``: the one at work, or the latest. ``closely``: what can tell a trace more,
    at a cost, is to do so. ``alone``: what this rank does without the others, so that an exchange would hang; "" if
    nothing.
    ``marks``: begin and end a range in the eyes of a device's profiler, called around each span of the run's own
    thread. A new one gives all that has passed since its process began to "start", and goes on so until `begin`.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.clock.add("start", birth.unclaimed_s())
        self.clock.base("start")
        self.totals = StepTotals()
        self.taker: Taker | None = None
        self.closely = False
        self.marks: tuple[Callable[[str], Any], Callable[[], Any]] | None = None
        self.stood = Stood()
        self.idle_s: dict[int, float] = {}
        self.alone = ""
        self.step = 0

    @property
    def watched(self) -> bool:
        """Whether anybody sees spans that have no cause."""
        return self.taker is not None or self.marks is not None

    def begin(self) -> None:
        """Let what nobody names be "other" from here on."""
        self.clock.base("other")


class _Lane:
    """A thread in a run; ``main``: the one whose seconds are counted."""

    __slots__ = ("timeline", "name", "main", "blocked")

    def __init__(self, timeline: Timeline, name: str, main: bool) -> None:
        self.timeline, self.name, self.main = timeline, name, main
        self.blocked = False


@contextlib.contextmanager
def active(timeline: Timeline, lane: str = "main") -> Iterator[None]:
    """Let spans of this thread count for ``timeline`` within the body; only those of lane "main" move its clock."""
    before = getattr(_local, "lane", None)
    _local.lane = _Lane(timeline, lane, lane == "main")
    try:
        yield
    finally:
        _local.lane = before
        if lane == "main":
            birth.claim()


def current() -> Timeline | None:
    """Return the timeline of this thread, to be handed on to a thread of its own; None outside of a run."""
    lane = getattr(_local, "lane", None)
    return None if lane is None else lane.timeline


class span:  # noqa: N801  (read as a statement: with span("update"))
    """Encloses a piece of work called ``name``; ``cause``: what its seconds are spent on, "" for that around it."""

    __slots__ = ("name", "cause", "args", "_lane", "_begin", "_marks")

    def __init__(self, name: str, cause: str = "", **args: Any) -> None:
        self.name, self.cause, self.args = name, cause, args
        self._lane: _Lane | None = None
        self._begin = 0.0
        self._marks: tuple[Callable[[str], Any], Callable[[], Any]] | None = None

    def __enter__(self) -> span:
        lane = self._lane = getattr(_local, "lane", None)
        if lane is not None:
            timeline = lane.timeline
            if timeline.marks is not None and lane.main:
                self._marks = timeline.marks
                self._marks[0](self.name)
            if self.cause and lane.main:
                timeline.clock.push(self.cause)
            if timeline.taker is not None:
                self._begin = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        lane = self._lane
        if lane is None:
            return
        timeline = lane.timeline
        if self.cause and lane.main:
            timeline.clock.pop()
        if self._begin:
            if timeline.taker is not None:
                timeline.taker.take(self.name, lane.name, self._begin, time.perf_counter(), self.args, self.cause)
            self._begin = 0.0  # a span may be entered again
        if self._marks is not None:
            self._marks[1]()
            self._marks = None


@contextlib.contextmanager
def idle(rank: int) -> Iterator[None]:
    """Enclose waiting for ``rank``, another stage of a pipeline, to send."""
    begin = time.perf_counter()
    with span(f"wait for rank {rank}", "idle"):
        yield
    lane: _Lane | None = getattr(_local, "lane", None)
    if lane is not None and lane.main:
        waits = lane.timeline.idle_s
        waits[rank] = waits.get(rank, 0.0) + time.perf_counter() - begin


class blocked:  # noqa: N801  (read as a statement: with blocked("vote"))
    """Encloses standing in the exchange ``name``, for other ranks or for the wire; the same on every rank (law 5).

    ``came_s``: when this rank had handed over its part (`time.perf_counter`), which may become known in the body; 0: on
    entering the body. Within another `blocked`, and in threads other than the run's own, it is a `span` without cause.
    """

    __slots__ = ("name", "came_s", "_lane", "_begin", "_counts", "_marks")

    def __init__(self, name: str, came_s: float = 0.0) -> None:
        self.name, self.came_s = name, came_s
        self._lane: _Lane | None = None
        self._begin, self._counts = 0.0, False
        self._marks: tuple[Callable[[str], Any], Callable[[], Any]] | None = None

    def __enter__(self) -> blocked:
        lane = self._lane = getattr(_local, "lane", None)
        if lane is not None:
            if lane.timeline.marks is not None and lane.main:
                self._marks = lane.timeline.marks
                self._marks[0](self.name)
            self._counts = lane.main and not lane.blocked
            if self._counts:
                if lane.timeline.alone:
                    raise UserError(f"{lane.timeline.alone} entered the exchange {self.name!r}, on rank 0 alone",
                                    "no exchange in a callback with where = 'root': the other ranks do not come",
                                    "set where = 'all' in the callback")
                lane.blocked = True
                lane.timeline.clock.push("wait")
            self._begin = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        lane = self._lane
        if lane is None:
            return
        timeline, end = lane.timeline, time.perf_counter()
        if self._counts:
            lane.blocked = False
            timeline.clock.pop()
            timeline.stood.add(Blocked(timeline.step, self.name, self.came_s or self._begin, self._begin, end))
        if timeline.taker is not None:
            timeline.taker.take(self.name, lane.name, self._begin, end, {}, "wait" if self._counts else "")
        if self._marks is not None:
            self._marks[1]()


def stamped(seconds: float, name: str = "", begin_s: float = 0.0, end_s: float = 0.0) -> None:
    """Tell that within the call that has just returned this rank stood ``seconds`` in exchanges.

    For those inside a graph, which stamps them. ``name``: of one with which the call ended; it had handed over all its
    parts at ``begin_s`` and had nothing left to compute until ``end_s``, both by `time.perf_counter`.
    """
    lane: _Lane | None = getattr(_local, "lane", None)
    if lane is None or not lane.main:
        return
    timeline = lane.timeline
    timeline.clock.carve("wait", seconds)
    if name:
        timeline.stood.add(Blocked(timeline.step, name, begin_s, begin_s, end_s))
        if timeline.taker is not None:
            timeline.taker.take(name, lane.name, begin_s, end_s, {}, "wait")
