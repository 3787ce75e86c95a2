"""Tables of measurements on a terminal, in a log and in Markdown; the spread of repeats, and a number for a table."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.core.terminal import say

Rows = Sequence[Sequence[str]]


def show(title: str, headers: Sequence[str], rows: Rows, markdown: bool = False, launched: bool = False) -> None:
    """Print one table; on rank 0. ``launched``: under mpirun, whose pseudo-terminals are none."""
    if markdown:
        say(f"\n{title}\n\n{as_markdown(headers, rows)}\n")
    elif launched or not sys.stdout.isatty():
        say(f"\n{title}\n{as_text(headers, rows)}")
    else:
        _rich(title, headers, rows)


def note(text: str) -> None:
    """Print a remark on one line."""
    say(f"note: {text}")


def as_text(headers: Sequence[str], rows: Rows) -> str:
    """Columns set apart by two spaces, numbers to the right, under a rule. Pure."""
    whole = [list(headers), *map(list, rows)]
    widths = [max(len(row[i]) for row in whole) for i in range(len(headers))]
    right = numeric(headers, rows)

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right)).rstrip()

    return "\n".join([line(headers), "  ".join("-" * w for w in widths), *map(line, rows)])


def as_markdown(headers: Sequence[str], rows: Rows) -> str:
    """A Markdown table, numbers to the right; | in a cell is escaped. Pure."""
    marks = ["---:" if right else "---" for right in numeric(headers, rows)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headers), "|" + "|".join(marks) + "|", *map(line, rows)])


def numeric(headers: Sequence[str], rows: Rows) -> list[bool]:
    """Which columns hold numbers (also N/A and -) and nothing else. Pure."""
    number = re.compile(r"(-?[\d,]*\.?\d+(e[+-]?\d+)?[x%]?|N/A|-|)")
    return [all(number.fullmatch(row[i]) for row in rows) for i in range(len(headers))]


def _rich(title: str, headers: Sequence[str], rows: Rows) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.ROUNDED, title=Text(title), title_justify="left")
    for header, right in zip(headers, numeric(headers, rows)):
        table.add_column(Text(header), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: rich would read [brackets] as markup
    with console.capture() as text:
        console.print(table)
    say(text.get().rstrip())


def spread(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median, quartiles, smallest and largest of at least one sample, in the samples' own unit."""
    low, p25, median, p75, high = np.percentile(np.asarray(samples, np.float64), [0, 25, 50, 75, 100])
    return {"median": float(median), "p25": float(p25), "p75": float(p75), "min": float(low), "max": float(high)}


def shown(value: Any) -> str:
    """A number for a table: about four digits, never an exponent above one thousandth."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000 or value == 0:
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.4f}"
