"""Tables in the run's directory: ``csv/train.csv``, ``csv/test.csv`` and so on, and ``csv/settings.csv``.

Columns: time (unix seconds), step, the numbers. A resumed run continues in them; steps it repeats are there twice.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from hvdtrain.core.protocols import Record, RecordedRun
from hvdtrain.core.records import numbers, settings

MODULE = PACKAGE = ARGUMENT = MEANS = ""
APART_S = 0.0  # a step costs 31 us of CPU


class Csv:
    """Appends a row for each record to the table of its kind."""

    def __init__(self, run: RecordedRun, argument: str) -> None:
        self._run = run
        self._columns: dict[Path, list[str]] = {}

    def write(self, record: Record) -> None:
        (folder := self._run.out / "csv").mkdir(exist_ok=True)
        if words := settings(record):
            path = folder / ("settings.csv" if record.event == "start" else f"{record.event}.csv")
            _write(path, [{"setting": name, "value": value} for name, value in words.items()])
        if found := numbers(record):
            path = folder / f"{next(iter(found)).partition('/')[0]}.csv"
            row = {name.partition("/")[2]: value for name, value in found.items()}
            self._append(path, {"time": f"{record.time_s:.3f}", "step": record.step, **row})

    def close(self) -> None:
        """Hold nothing."""

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        """Append ``row``; a table that lacks a column is written anew, as it is when first met: a crash tears lines."""
        if set(row) <= set(self._columns.get(path, ())):
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns[path]).writerow(row)
            return
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before = list(csv.DictReader(text[:text.rfind("\n") + 1].splitlines()))
        self._columns[path] = _write(path, [*before, row])


def _write(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Replace the file by one with these rows; return its columns, those of all rows in the order they came."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    beside = path.with_name(f".{path.name}")
    with beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(path)
    return columns
