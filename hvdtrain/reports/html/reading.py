"""Reads a run's log.jsonl, whole or torn, of any version and length.

Owns how lines become records. Steps are kept as columns of numbers, since there may be millions; all else as it stands.
A line that is no record (torn by a crash, or somebody else's) is counted and passed over.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.reports.html.words import number, whole

COLUMNS = ("loss", "grad_norm", "lr", "samples_per_s", "percent_of_solo", "epoch")
"""What is kept of a "step" record, beside its step and time."""


BEFORE_START = ("environment", "clocks", "note", "memory_fit", "compile", "compression", "balance", "pipeline", "wire")
"""Events that a fit may have recorded before its "start"."""


@dataclass(frozen=True)
class Event:
    """One record but a step's: ``order``: how many "start" records came before it, its own included."""

    name: str
    time_s: float
    step: int
    values: dict[str, Any]
    order: int


@dataclass
class Log:
    """A log: ``events`` in order; ``steps``: column -> numbers [N], with "step", "time" and "order" among them.

    ``passed``: lines that were no records.
    """

    events: list[Event] = field(default_factory=list)
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    passed: int = 0
    last_phases: dict[str, Any] = field(default_factory=dict)

    def all(self, name: str) -> list[Event]:
        """Return the events of that name."""
        return [event for event in self.events if event.name == name]

    def last(self, name: str) -> dict[str, Any]:
        """Return the values of the latest event of that name; {} without one."""
        return next((event.values for event in reversed(self.events) if event.name == name), {})


def read(path: Path) -> Log:
    """Read the log at ``path``; an empty one where there is none. OSError where it cannot be read."""
    log, rows, order = Log(), array("d"), 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        file = None
    if file is not None:
        with file:
            for line in file:
                record = _record(line)
                if record is None:
                    log.passed += bool(line.strip())
                    continue
                name, time_s, step = (
                    record.pop("event"),
                    number(record.pop("time", None)),
                    whole(record.pop("step", None), 0),
                )
                if name == "start":
                    order += 1
                    _belongs(log.events, step, order)
                if name != "step":
                    log.events.append(Event(name, time_s, step, record, order))
                    continue
                rows.extend((step, time_s, order))
                rows.extend([one if type(one) is float else number(one) for one in map(record.get, COLUMNS)])
                phases = record.get("phases_s")
                log.last_phases = phases if isinstance(phases, dict) else log.last_phases
    table = np.frombuffer(rows, dtype=float).reshape(-1, 3 + len(COLUMNS)) if rows else np.zeros((0, 3 + len(COLUMNS)))
    table = np.where(np.isfinite(table), table, np.nan)
    log.steps = {name: table[:, i] for i, name in enumerate(("step", "time", "order", *COLUMNS))}
    return log


def _belongs(events: list[Event], step: int, order: int) -> None:
    """Give what a new process has recorded before its "start", at the step it goes on from, to its own attempt."""
    for i in range(len(events) - 1, -1, -1):
        if events[i].name not in BEFORE_START or events[i].step != step:
            return
        events[i] = replace(events[i], order=order)


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None where there is none."""
    try:
        record = json.loads(str(line, "utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None
