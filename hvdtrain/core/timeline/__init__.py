"""Attribute each second of a rank to one cause: `span` around a piece of work is the one hook, for causes and traces.

Owns the clock of causes and the sums over steps. A span outside of a run, or in a thread that nobody has named, does
nothing; `blocked` is the span around an exchange with other ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hvdtrain.core.errors import UserError
from hvdtrain.core.timeline.spans import Blocked, BlockedSpans

__all__ = ["CAUSES", "Blocked", "Taker", "Timeline", "active", "blocked", "current", "idle", "span", "stamped"]

_local = threading.local()


class Taker(Protocol):
    """Takes the spans of a trace."""

    def take(self, name: str, lane: str, begin_s: float, end_s: float, args: dict[str, Any], cause: str = "") -> None:
        """Keep what ``lane`` (a thread, a transport) did; seconds of `time.perf_counter`. Called from any thread.

        ``cause``: one of `CAUSES`, "wait" for the time in an exchange; "": that of the span around it.
        """


class Timeline:
    """A rank's timeline: ``clock`` gives its seconds to causes, ``taker`` takes spans while a trace is being taken.

    ``idle_s``: rank -> seconds that it waited for that stage of a pipeline. ``stood``: the exchanges in which it stood.
    ``totals``: sums over its steps. ``step``: the one at work, or the latest. ``closely``: what can tell a trace more,
    at a cost, is to do so. ``alone``: what this rank does without the others, so that an exchange would hang; "" if
    nothing.
    ``marks``: begin and end a range in the eyes of a device's profiler, called around each span of the run's own
    thread. A new one gives all that has passed since its process began to "start", and continues so until `begin`.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.clock.add("start", unclaimed_s())
        self.clock.base("start")
        self.totals = StepTotals()
        self.taker: Taker | None = None
        self.closely = False
        self.marks: tuple[Callable[[str], Any], Callable[[], Any]] | None = None
        self.stood = BlockedSpans()
        self.idle_s: dict[int, float] = {}
        self.alone = ""
        self.step = 0

    @property
    def watched(self) -> bool:
        """Return whether spans without a cause are recorded."""
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
            claim()


def current() -> Timeline | None:
    """Return the timeline of this thread, to be handed on to a thread of its own; None outside of a run."""
    lane = getattr(_local, "lane", None)
    return None if lane is None else lane.timeline


class span:  # read as a statement: with span("update")
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


class blocked:  # read as a statement: with blocked("vote")
    """Encloses standing in the exchange ``name``, for other ranks or for the transport; the same on every rank (law 5).

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
                                    "no exchange in a callback with where = 'root': the other ranks do not enter it",
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


_told = [0.0]


def unclaimed_s() -> float:
    """Return the seconds since this process began, or since `claim`; 0 where the system does not tell.

    Linux counts a process' begin in hundredths of a second since the system has started (proc(5), field 22).
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        lived_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    since_s = time.perf_counter() - _told[0] if _told[0] else lived_s
    return max(0.0, min(lived_s, since_s))


def claim() -> None:
    """Let what has passed belong to a run: the next one in this process begins now."""
    _told[0] = time.perf_counter()


CAUSES = ("start", "input", "compute", "idle", "channel", "wait", "wire", "update", "checkpoint", "evaluation", "other")
"""``idle``: for another stage of a pipeline; ``channel``: for what stages send each other to be copied and to arrive.
``wait``: for ranks that come later to an exchange; ``wire``: for the exchange itself, when all have come."""


class Clock:
    """A stack of causes: seconds go to the one on top. One thread uses it.

    While a rank stands in an exchange its seconds go to "wait": which of them are "wire" is known when the ranks have
    compared when each came (`hvdtrain.core.timeline.spans`).
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._stack = ["other"]
        self._since = now()

    def base(self, cause: str) -> None:
        """Give what comes to ``cause`` wherever nothing is on the stack."""
        self._lap()
        self._stack[0] = cause

    def push(self, cause: str) -> None:
        """Give what comes to ``cause``, one of `CAUSES`, until `pop`."""
        self._lap()
        self._stack.append(cause)

    def pop(self) -> None:
        """Give what comes to the cause before."""
        self._lap()
        self._stack.pop()

    def add(self, cause: str, seconds: float) -> None:
        """Give seconds from before this clock began, such as those of the process' start."""
        self._seconds[cause] += seconds

    def carve(self, cause: str, seconds: float) -> None:
        """Give ``seconds`` that somebody else has measured to ``cause``, in place of the cause on top just now.

        A graph stamps how long it has waited within a call that is one piece of computing for this clock.
        """
        self._lap()
        own = self._stack[-1]
        seconds = min(max(0.0, seconds), self._seconds[own])
        self._seconds[own] -= seconds
        self._seconds[cause] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far by cause."""
        self._lap()
        return dict(self._seconds)

    def _lap(self) -> None:
        now = self._now()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now


class StepTotals:
    """Sums over this rank's steps: seconds by phase, steps, samples. `hvdtrain.engine.run_parts` adds to them.

    "wait": for gradients and agreements, and steps that are repeated. Finer causes are `Clock`'s.
    """

    NAMES = ("data", "compute", "wait", "update")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(self.NAMES, 0.0)
        self.steps = 0
        self.samples = 0
        self.own_samples = 0
        self.own_micros = 0
        self.step_s = 0.0
        self.first_s = 0.0
        self.first_samples = 0

    def add(self, name: str, seconds: float) -> None:
        """Add to one phase."""
        self.seconds[name] += max(0.0, seconds)

    def lose(self, seconds: float) -> None:
        """Count a discarded step's time as waiting, so that speed estimates ignore it."""
        self.add("wait", seconds)
        self.step_s += seconds

    def step(self, seconds: float, samples: int, own: int = 0, micros: int = 0) -> None:
        """Count one step of all ranks' ``samples``, of which this rank had ``own`` in ``micros`` micro-batches."""
        if not self.steps:
            self.first_s, self.first_samples = seconds, samples
        self.steps += 1
        self.samples += samples
        self.own_samples += own
        self.own_micros += micros
        self.step_s += seconds

    def samples_per_s(self) -> float:
        """Global samples per second of step time and data time, without the first step (warm-up, tracing)."""
        seconds = self.step_s - self.first_s + self.seconds["data"]
        return (self.samples - self.first_samples) / seconds if self.steps > 1 and seconds > 0 else math.nan
