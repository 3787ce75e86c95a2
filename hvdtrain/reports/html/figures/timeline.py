"""One time line of a run: its attempts as bars, what happened as ticks; long pauses between attempts are cut short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.reports.html.figures.scale import clock_words, time_step
from hvdtrain.reports.html.words import duration

LONG = 0.15
"""A pause longer than this part of all attempts' time is drawn as a break of `BREAK` percent."""

BREAK = 5.0
NEAR = 0.7
"""Percent of the width within which ticks of one lane are drawn as one."""


@dataclass(frozen=True)
class Span:
    """A bar from ``left`` on, ``width`` wide in percent, with a CSS class and words."""

    left: float
    width: float
    kind: str
    words: str
    label: str = ""


@dataclass
class Lane:
    """A row of the time line."""

    name: str
    spans: list[Span] = field(default_factory=list)
    ticks: list[Span] = field(default_factory=list)


class TimeAxis:
    """From unix seconds to percent of the width, with breaks where nothing ran for long."""

    def __init__(self, stretches: Sequence[tuple[float, float]]) -> None:
        """``stretches``: (begin, end) during which something ran, in order of time."""
        joined: list[list[float]] = []
        for begin, end in stretches:
            if joined and begin <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, max(begin, end)])
        ran = sum(end - begin for begin, end in joined) or 1.0
        self.begin = joined[0][0] if joined else 0.0
        pieces: list[list[float]] = []
        for begin, end in joined:
            if pieces and begin - pieces[-1][1] <= LONG * ran:
                pieces[-1][1] = end
            else:
                pieces.append([begin, end])
        shown = sum(end - begin for begin, end in pieces) or 1.0
        width = max(20.0, 100.0 - BREAK * (len(pieces) - 1))
        gap = (100.0 - width) / max(1, len(pieces) - 1)
        left = 0.0
        self.pieces: list[tuple[float, float, float, float]] = []
        for begin, end in pieces:
            right = left + width * (end - begin) / shown
            self.pieces.append((begin, end, left, right))
            left = right + gap
        self.per_percent = shown / width

    def at(self, unix_s: float) -> float:
        """Percent of the width; times within a break lie evenly in it, and others at the next end."""
        before = self.pieces[0] if self.pieces else (0.0, 1.0, 0.0, 100.0)
        if not unix_s > before[0]:
            return 0.0
        for piece in self.pieces:
            begin, end, left, right = piece
            if unix_s < begin:
                part = (unix_s - before[1]) / (begin - before[1])
                return before[3] + part * (left - before[3])
            if unix_s <= end:
                return left + (right - left) * (unix_s - begin) / (end - begin) if end > begin else left
            before = piece
        return before[3]

    def breaks(self) -> list[Span]:
        """The pauses that are cut short."""
        return [Span(one[3], two[2] - one[3], "break", f"nothing ran for {duration(two[0] - one[1])}",
                     f"{duration(two[0] - one[1])} later") for one, two in zip(self.pieces, self.pieces[1:])]

    def ticks(self, about: int = 6) -> list[tuple[float, str]]:
        """(percent, time since the begin) at round times while something ran."""
        step = time_step(self.per_percent * 100.0 / about)
        found: list[tuple[float, str]] = []
        for begin, end, _, _ in self.pieces:
            first = math.ceil((begin - self.begin) / step - 1e-6)
            for i in range(first, min(first + 40, math.floor((end - self.begin) / step + 1e-6) + 1)):
                at = self.at(self.begin + i * step)
                if not found or at - found[-1][0] > 7.0:
                    found.append((at, clock_words(i * step)))
        return found


def near_joined(ticks: Sequence[tuple[float, str, str]], many: str) -> list[Span]:
    """Draw (percent, kind, words) as ticks, near ones as one; ``many``: "checkpoints", what several are called."""
    groups: list[list[tuple[float, str, str]]] = []
    for tick in sorted(ticks):
        if groups and tick[0] - groups[-1][-1][0] < NEAR and tick[1] == groups[-1][-1][1]:
            groups[-1].append(tick)
        else:
            groups.append([tick])
    spans = []
    for group in groups:
        words = group[0][2] if len(group) == 1 else f"{len(group)} {many}: {group[0][2]} \N{EN DASH} {group[-1][2]}"
        spans.append(Span(group[0][0], group[-1][0] - group[0][0], group[0][1], words))
    return spans
