"""``history.jsonl`` in the run's folder: one line per attempt, and the table that is printed at the end.

Owns the fields of a line and their words. A line that cannot be written is told and does not end the supervision.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import count
from hvdtrain.core.table import as_text

NAME = "history.jsonl"


def append(out: Path, record: Mapping[str, Any]) -> str:
    """Add a line to the run's history; return "" or why it could not be written."""
    try:
        with (out / NAME).open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            torn = file.read(1) not in (b"", b"\n")  # a line that was cut off must not swallow this one
            file.write(b"\n" * torn + json.dumps(record).encode() + b"\n")
    except OSError as error:
        return f"{out / NAME} could not be written: {error.strerror}"
    return ""


def read(out: Path) -> list[dict[str, Any]]:
    """Return the records of a run's history; [] without one. A line that was cut off is left out."""
    try:
        lines = (out / NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [one for one in found if isinstance(one, dict)]


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the attempts as a table: number, ranks, steps, lost steps, seconds, cause."""
    rows = [(str(one["attempt"]), str(one["ranks"] or "?"), f"{_step(one['step_start'])}-{_step(one['step_end'])}",
             str(one["steps_lost"]), f"{one['seconds']['ran']:.1f} s", _cause(one)) for one in records]
    return as_text(("attempt", "ranks", "steps", "lost", "ran", "cause"), rows)


def sentence(records: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """Return the cost of the restarts, in a sentence."""
    restarts, steps = len(records) - 1, sum(one["steps_lost"] for one in records[:-1])
    many = count(restarts, "restart") if restarts else "no restart"
    return f"{many}, {count(steps, 'step')} computed again, {seconds:.1f} s in all"


def _step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _cause(one: Mapping[str, Any]) -> str:
    who = f" (rank {one['rank']}" + (f" on host {one['host']})" if one["host"] else ")") if one["rank"] >= 0 else ""
    text = str(one["words"]).strip().splitlines()
    return f"{one['cause']}{who if one['cause'] != 'done' else ''}" + (f": {text[-1][:100]}" if text else "")
