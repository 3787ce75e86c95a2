"""What one rank has done while a trace is being taken: its spans, as many as there is room for."""

from __future__ import annotations

from typing import Any, NamedTuple

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
