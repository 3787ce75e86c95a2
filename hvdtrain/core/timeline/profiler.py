"""What a framework's profiler adds to a trace, and how its clock is brought to the rank's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

MARKS = 5
"""At the start and at the end each: the narrowest of them count."""


class Profiler(Protocol):
    """Takes the framework's own events on one rank; a backend's class ``Profiler``.

    ``within_s``: how far its events may be off on the rank's clock, once it has stopped.
    """

    within_s: float

    def start(self) -> None:
        """Begin. Raises whatever the framework's does, for instance where another profiler is running."""
        ...

    def stop(self) -> list[Span]:
        """End, and return what was found, in seconds of `time.perf_counter`."""
        ...


class Marks:
    """Events of the profiler's own, each made between two readings of the rank's clock."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._read: list[tuple[float, float]] = []

    def put(self) -> None:
        """Make some."""
        for _ in range(MARKS):
            before_s = time.perf_counter()
            with self._make():
                pass
            self._read.append((before_s, time.perf_counter()))

    def shift(self, seen_s: Sequence[float]) -> tuple[float, float]:
        """Return what is to be added to the profiler's seconds, and how far that may be off.

        ``seen_s``: when the profiler says that the marks began. Errors: RuntimeError where it has not seen them all, or
        where they contradict each other by more than a millisecond.
        """
        if len(seen_s) != len(self._read) or not seen_s:
            raise RuntimeError(f"the profiler has {len(seen_s)} of {len(self._read)} marks")
        pairs = list(zip(self._read, sorted(seen_s)))
        least_s = max(before - seen for (before, _), seen in pairs)
        most_s = min(after - seen for (_, after), seen in pairs)
        if least_s - most_s > 1e-3:
            raise RuntimeError(f"the profiler's clock has changed by {least_s - most_s:.6f} s")
        return (least_s + most_s) / 2, abs(most_s - least_s) / 2


KERNEL = "kernel"
"""Cause of spans that a device worked in, from a profiler."""


class Span(NamedTuple):
    """A piece of work ``name`` of a ``lane`` (a thread, a wire), in seconds of the rank's `time.perf_counter`.

    ``cause``: of the rank's time (`hvdtrain.core.timeline.CAUSES`), or where it comes from; "": of what is around it.
    """

    name: str
    lane: str
    begin_s: float
    end_s: float
    cause: str = ""
    args: dict[str, Any] = {}


class Taken:
    """Implements `hvdtrain.core.timeline.Taker`: keeps the first ``most`` spans, and counts the others in
    ``dropped``."""

    def __init__(self, most: int) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self._most = most

    def take(self, name: str, lane: str, begin_s: float, end_s: float, args: dict[str, Any], cause: str = "") -> None:
        """Keep what ``lane`` did. Called from any thread: to append to a list is one operation."""
        if len(self.spans) < self._most:
            self.spans.append(Span(name, lane, begin_s, end_s, cause, args))
        else:
            self.dropped += 1


def longest(spans: list[Span], most: int) -> tuple[list[Span], int]:
    """Return the ``most`` longest of ``spans``, in their order, and how many are left out. Pure."""
    if len(spans) <= most:
        return spans, 0
    kept = sorted(range(len(spans)), key=lambda i: spans[i].begin_s - spans[i].end_s)[:most]
    return [spans[i] for i in sorted(kept)], len(spans) - most
