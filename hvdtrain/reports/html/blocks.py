"""Blocks of a section of the page: charts, bars, tables, each drawn by the template's macro of its ``kind``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdtrain.reports.html.curves import Chart
from hvdtrain.reports.html.shapes import Areas, Lane, StackedBar, TimelineSpan, WaitMatrix


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
    """Stacked areas over time."""

    kind: ClassVar[str] = "stacked"
    title: str
    areas: Areas
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Shades:
    """A matrix."""

    kind: ClassVar[str] = "shades"
    title: str
    matrix: WaitMatrix
    down: str
    across: str
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
