"""Blocks of a section (charts, bars, tables; the template has a macro for each ``kind``) and their figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdtrain.reports.html.curves import Chart, clock_words, path, time_step
from hvdtrain.reports.html.words import duration

SEEN = 0.5
"""Percent of a bar's width, about 3 pixels, below which a part cannot be seen."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar: from ``left`` on, ``width`` wide, in percent; ``words`` tell it."""

    name: str
    left: float
    width: float
    words: str


@dataclass(frozen=True)
class StackedBar:
    """A row: a label, its parts, and what stands behind it. ``mark``: percent at which a limit or a plan lies."""

    label: str
    segments: tuple[Segment, ...]
    total: str
    small: str = ""
    mark: float = -1.0


def bar(label: str, parts: Mapping[str, float], full: float, words: Mapping[str, str], total: str,
        small: str = "", mark: float = -1.0) -> StackedBar:
    """Return a bar whose whole width is ``full``, of ``parts`` in their order; those that are 0 are left out.

    A part too narrow to be seen is drawn `SEEN` wide, at the cost of the widest one.
    """
    widths = {name: 100.0 * value / full for name, value in parts.items() if value > 0 and full > 0}
    widest = max(widths, key=widths.__getitem__, default="")
    added = sum(max(0.0, SEEN - width) for name, width in widths.items() if name != widest)
    left, segments = 0.0, []
    for name, width in widths.items():
        if widths[widest] > added + SEEN:
            width = width - added if name == widest else max(SEEN, width)
        segments.append(Segment(name, left, width, words.get(name, name)))
        left += width
    return StackedBar(label, tuple(segments), total, small, 100.0 * mark / full if mark >= 0 and full > 0 else -1.0)


def areas(edges: Sequence[tuple[float, float]], rows: Sequence[Mapping[str, float]], names: Sequence[str],
          full: float) -> list[tuple[str, str]]:
    """Return (name, SVG path) of stacked steps: row i from edges[i][0] to edges[i][1], in percent of the width."""
    floors = [0.0] * len(rows)
    layers = []
    for name in names:
        tops = [floor + row.get(name, 0.0) for floor, row in zip(floors, rows)]
        if any(top > floor for top, floor in zip(tops, floors)):
            words = []
            for (left, right), low, high in zip(edges, floors, tops):
                if high > low:
                    y0, y1 = 1000 - 1000 * low / full, 1000 - 1000 * high / full
                    words.append(path([(10 * left, y0), (10 * left, y1), (10 * right, y1), (10 * right, y0)]) + "Z")
            layers.append((name, "".join(words)))
        floors = tops
    return layers


def gather(rows: Sequence[tuple[float, float, Mapping[str, float]]], most: int
           ) -> list[tuple[float, float, dict[str, float]]]:
    """Join neighbouring (begin, end, parts) so that at most ``most`` are left; parts are added up."""
    if len(rows) <= most:
        return [(begin, end, dict(parts)) for begin, end, parts in rows]
    joined = []
    for i in range(most):
        some = rows[i * len(rows) // most:(i + 1) * len(rows) // most]
        parts: dict[str, float] = {}
        for _, _, row in some:
            for name, value in row.items():
                parts[name] = parts.get(name, 0.0) + value
        joined.append((some[0][0], some[-1][1], parts))
    return joined


MOST = 12
"""Ranks that get a row and a column of their own."""

OTHERS = -1
"""Stands for all ranks without one."""


@dataclass(frozen=True)
class MatrixCell:
    """Words, and a shade of 0 to 100 percent."""

    words: str
    shade: float
    tip: str = ""


@dataclass(frozen=True)
class Shades:
    """Matrix of waiting. ``heads``: of the columns; ``rows``: (head, cells, sum); ``sums``: of the columns."""

    kind: ClassVar[str] = "shades"
    heads: list[str]
    rows: list[tuple[str, list[MatrixCell], str]]
    sums: list[MatrixCell]
    down: str = "waited"
    across: str = "for rank"
    note: str = "A column of strong colour is a straggler."


def matrix(waits: Mapping[tuple[int, int], float], ranks: int) -> Shades:
    """Seconds that a row's rank waited for a column's; beyond `MOST` ranks the least important are one row."""
    weight = dict.fromkeys(range(ranks), 0.0)
    for (waiter, awaited), seconds in waits.items():
        weight[awaited] = weight.get(awaited, 0.0) + seconds
        weight[waiter] = weight.get(waiter, 0.0) + 1e-3 * seconds
    order = sorted(weight, key=lambda r: -weight[r])
    shown = sorted(order[:MOST]) if len(order) > MOST else sorted(order)
    keep = set(shown)
    heads = shown + ([OTHERS] if len(order) > MOST else [])
    sums: dict[tuple[int, int], float] = {}
    for (waiter, awaited), seconds in waits.items():
        pair = (waiter if waiter in keep else OTHERS, awaited if awaited in keep else OTHERS)
        sums[pair] = sums.get(pair, 0.0) + seconds
    top = max(sums.values(), default=0.0) or 1.0
    columns = {k: sum(sums.get((r, k), 0.0) for r in heads) for k in heads}
    most = max(columns.values(), default=0.0) or 1.0

    def name(rank: int) -> str:
        return "others" if rank == OTHERS else str(rank)

    def cell(r: int, k: int) -> MatrixCell:
        seconds = sums.get((r, k), 0.0)
        if r == k and r != OTHERS:
            return MatrixCell("", -1.0)
        return MatrixCell(duration(seconds) if seconds >= 5e-4 else "\N{MIDDLE DOT}", 100.0 * seconds / top,
                    f"{name(r)} waited {duration(seconds)} for {name(k)}")

    rows = [(name(r), [cell(r, k) for k in heads], duration(sum(sums.get((r, k), 0.0) for k in heads)))
            for r in heads]
    return Shades([name(k) for k in heads], rows,
                  [MatrixCell(duration(columns[k]), 100.0 * columns[k] / most) for k in heads])


LONG = 0.15
"""A pause longer than this part of all attempts' time is drawn as a break of `BREAK` percent."""

BREAK = 5.0
NEAR = 0.7
"""Percent of the width within which ticks of one lane are drawn as one."""


@dataclass(frozen=True)
class TimelineSpan:
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
    spans: list[TimelineSpan] = field(default_factory=list)
    ticks: list[TimelineSpan] = field(default_factory=list)


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

    def breaks(self) -> list[TimelineSpan]:
        """Return the pauses that are cut short."""
        return [TimelineSpan(one[3], two[2] - one[3], "break", f"nothing ran for {duration(two[0] - one[1])}",
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


def near_joined(ticks: Sequence[tuple[float, str, str]], many: str) -> list[TimelineSpan]:
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
        spans.append(TimelineSpan(group[0][0], group[-1][0] - group[0][0], group[0][1], words))
    return spans


@dataclass(frozen=True)
class Charts:
    """Small charts beside one another."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Bars:
    """Stacked bars; ``legend``: (CSS class, words, amount)."""

    kind: ClassVar[str] = "bars"
    title: str
    rows: Sequence[StackedBar]
    legend: Sequence[tuple[str, str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Stacked:
    """Stacked percentages over time: ``layers`` (name, path) in a square of 1000, the lowest first."""

    kind: ClassVar[str] = "stacked"
    y_ticks: ClassVar[Sequence[tuple[float, str]]] = ((0.0, "0"), (50.0, "50 %"), (100.0, "100 %"))
    title: str
    layers: Sequence[tuple[str, str]]
    x_ticks: Sequence[tuple[float, str]]
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Lanes:
    """A time line."""

    kind: ClassVar[str] = "lanes"
    lanes: Sequence[Lane]
    breaks: Sequence[TimelineSpan]
    ticks: Sequence[tuple[float, str]]
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table; ``folded``: behind a line to open it. ``marked``: rows that stand out, ``words``: columns of prose."""

    kind: ClassVar[str] = "table"
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    marked: frozenset[int] = frozenset()
    words: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Prose:
    """Lines of prose."""

    kind: ClassVar[str] = "lines"
    lines: Sequence[str]
    title: str = ""


@dataclass
class Section:
    """A part of the page: ``lead`` says in a sentence what is to be seen in its blocks."""

    name: str
    title: str
    lead: str = ""
    blocks: list[Any] = field(default_factory=list)
