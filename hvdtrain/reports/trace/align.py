"""Clocks of several hosts on one axis: a rank's readings as rank 0's, and how far that may be off. Pure.

An offset is measured before and after a window. In between clocks may drift apart: it is taken to change evenly, and
the bound holds for any change from the first measurement to the second that does not turn back on its way, such as a
jump.
"""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """At ``at_s`` of a rank's own clock that was ahead of rank 0's by ``least_s`` at least and ``most_s`` at most."""

    at_s: float
    least_s: float
    most_s: float

    @property
    def offset_s(self) -> float:
        """The middle of what it may be."""
        return (self.least_s + self.most_s) / 2


class Alignment:
    """Turns readings of one rank's clock into those of rank 0's.

    ``within_s``: how far `shared_s` may be off at any time from ``before`` to ``after``.
    """

    def __init__(self, before: Measured, after: Measured) -> None:
        self.before, self.after = before, after
        least_s, most_s = min(before.least_s, after.least_s), max(before.most_s, after.most_s)
        self.within_s = max(max(m.offset_s - least_s, most_s - m.offset_s) for m in (before, after))

    def shared_s(self, own_s: float) -> float:
        """Return rank 0's reading when this rank's was ``own_s``."""
        before, after = self.before, self.after
        span_s = after.at_s - before.at_s
        part = 0.0 if span_s <= 0 else min(max((own_s - before.at_s) / span_s, 0.0), 1.0)
        return own_s - (before.offset_s + part * (after.offset_s - before.offset_s))


SAME = Alignment(Measured(0.0, 0.0, 0.0), Measured(0.0, 0.0, 0.0))
"""Of a rank that reads the same clock as rank 0."""
