"""Stacked figures: bars of parts side by side, and areas over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain.reports.html.figures.curve import path


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
class Bar:
    """A row: a label, its parts, and what stands behind it. ``mark``: percent at which a limit or a plan lies."""

    label: str
    segments: tuple[Segment, ...]
    total: str
    small: str = ""
    mark: float = -1.0


@dataclass
class Areas:
    """Stacked areas over ``x`` in a square of 1000: (name, path), the lowest first."""

    layers: list[tuple[str, str]] = field(default_factory=list)
    x_ticks: Sequence[tuple[float, str]] = ()
    y_ticks: Sequence[tuple[float, str]] = ()


def bar(label: str, parts: Mapping[str, float], full: float, words: Mapping[str, str], total: str,
        small: str = "", mark: float = -1.0) -> Bar:
    """A bar whose whole width is ``full``, of ``parts`` in their order; those that are 0 are left out.

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
    return Bar(label, tuple(segments), total, small, 100.0 * mark / full if mark >= 0 and full > 0 else -1.0)


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
