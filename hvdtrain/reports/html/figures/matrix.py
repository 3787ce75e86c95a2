"""A table of numbers as shades: who waited for whom. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.reports.html.words import duration

MOST = 12
"""Ranks that get a row and a column of their own."""

OTHERS = -1
"""Stands for all ranks without one."""


@dataclass(frozen=True)
class Cell:
    """Words, and a shade of 0 to 100 percent."""

    words: str
    shade: float
    tip: str = ""


@dataclass(frozen=True)
class Matrix:
    """``heads``: of the columns; ``rows``: (head, cells, sum); ``sums``: of the columns."""

    heads: list[str]
    rows: list[tuple[str, list[Cell], str]]
    sums: list[Cell]


def matrix(waits: Mapping[tuple[int, int], float], ranks: int, labels: Mapping[int, str]) -> Matrix:
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
        return "others" if rank == OTHERS else labels.get(rank, str(rank))

    def cell(r: int, k: int) -> Cell:
        seconds = sums.get((r, k), 0.0)
        if r == k and r != OTHERS:
            return Cell("", -1.0)
        return Cell(duration(seconds) if seconds >= 5e-4 else "\N{MIDDLE DOT}", 100.0 * seconds / top,
                    f"{name(r)} waited {duration(seconds)} for {name(k)}")

    rows = [(name(r), [cell(r, k) for k in heads], duration(sum(sums.get((r, k), 0.0) for k in heads)))
            for r in heads]
    return Matrix([name(k) for k in heads], rows,
                  [Cell(duration(columns[k]), 100.0 * columns[k] / most) for k in heads])
