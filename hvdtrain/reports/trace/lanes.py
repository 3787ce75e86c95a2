"""Rows of a trace: events of one row may only be apart or within each other, or viewers draw them wrongly. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.timeline.taken import Span

ORDER = ("step", "main", "queue", "wire", "input", "save")
"""Lanes from top to bottom; others come after these by name."""


def rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Return (name, spans) of each row: a lane whose spans overlap is given rows "wire", "wire 2" and so on."""
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    found = []
    for lane in sorted(lanes, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
        for i, row in enumerate(_nesting(lanes[lane])):
            found.append((f"{lane} {i + 1}" if i else lane, row))
    return found


def _nesting(spans: Sequence[Span]) -> list[list[Span]]:
    """Deal ``spans`` to as few rows as the first that takes each, so that those of a row are apart or nested."""
    dealt: list[tuple[list[Span], list[float]]] = []  # a row, and the ends of those of it that are open
    for span in sorted(spans, key=lambda s: (s.begin_s, -s.end_s)):
        for row, open_ends in dealt:
            while open_ends and open_ends[-1] <= span.begin_s:
                open_ends.pop()
            if not open_ends or span.end_s <= open_ends[-1]:
                break
        else:
            row, open_ends = [], []
            dealt.append((row, open_ends))
        row.append(span)
        open_ends.append(span.end_s)
    return [row for row, _ in dealt]
