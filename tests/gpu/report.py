"""Rows and what came of them: one table and one JSON file. Standard library only."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_TELLING = tuple(map(re.compile, (r"^([\w.]*\.)?[A-Z]\w*(Error|Exception|Failed)\b", "^(hvdtrain|error): ", ".")))

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a row. ``detail``: the finding, or why it failed or was skipped. ``numbers``: measurements."""

    name: str
    status: str
    detail: str
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)


def of_job(name: str, code: int | None, seconds: float, limit_s: float, said: Mapping[str, Any] | None,
           last_lines: Sequence[str]) -> Outcome:
    """Return a job's outcome from its exit status (None: it took too long) and what rank 0 has written, if anything.

    A status that is not 0 fails also a row that has said otherwise.
    """
    if code is None:
        return Outcome(name, FAILED, f"took more than {limit_s:.0f} s" + _told(last_lines), seconds)
    if code != 0:
        return Outcome(name, FAILED, f"exit status {code}" + _told(last_lines), seconds)
    if said is None or said.get("status") not in (PASSED, SKIPPED):
        return Outcome(name, FAILED, "ended without a result" + _told(last_lines), seconds)
    return Outcome(name, str(said["status"]), str(said.get("detail", "")), seconds, dict(said.get("numbers", {})))


def _told(last_lines: Sequence[str]) -> str:
    """Return the line of an output that says most: the first that names an error, else a message, else the last."""
    for pattern in _TELLING:
        if telling := [line for line in last_lines if pattern.search(line)]:
            return f": {telling[0].strip()[:300]}"
    return ""


def read(path: Path) -> dict[str, Any] | None:
    """Return what a job has written, or None where that is missing or no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def table(outcomes: Sequence[Outcome], width: int = 150) -> str:
    """Return the rows as text: name, outcome, seconds, detail; a long detail continues in lines below."""
    names = max((len(o.name) for o in outcomes), default=0)
    room = max(30, width - names - 20)
    lines = []
    for o in outcomes:
        first, *more = _wrapped(o.detail, room)
        lines.append(f"{o.name:<{names}}  {o.status:<7}  {o.seconds:5.1f} s  {first}")
        lines += [" " * (names + 20) + line for line in more]
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, room: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), room, break_long_words=True) or [""]


def closing(outcomes: Sequence[Outcome]) -> str:
    """Return the last line: how many of each."""
    counts = Counter(o.status for o in outcomes)
    return ", ".join(f"{counts[status]} {status}" for status in (PASSED, FAILED, SKIPPED))


def write(path: Path, facts: Mapping[str, Any], outcomes: Sequence[Outcome], seconds: float) -> None:
    """Write all as JSON, whole or not at all."""
    found = {"format": 1, "facts": facts, "rows": [asdict(o) for o in outcomes], "seconds": round(seconds, 1),
             "closing": closing(outcomes)}
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(aside, path)


def status(outcomes: Sequence[Outcome]) -> int:
    """Return the exit status: 1 where a row failed."""
    return int(any(o.status == FAILED for o in outcomes))
