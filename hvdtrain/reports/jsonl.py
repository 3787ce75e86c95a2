"""JSON lines in a run's directory: every record in log.jsonl, every attempt of a supervised job in history.jsonl.

A file never ends a run: a record that cannot be written is kept and tried again with the next one.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.checkpoint.files import write_all
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.core.errors import count
from hvdtrain.core.protocols import Record
from hvdtrain.core.terminal import as_text

if TYPE_CHECKING:
    from hvdtrain.reports import ReportedRun

MOST_WAITING = 1000
"""Records kept while they cannot be written; beyond these the oldest are lost."""


class Jsonl:
    """Appends to ``log.jsonl`` in the run's directory: ``event``, ``time`` (unix seconds), ``step``, and the values."""

    at_once = False

    def __init__(self, run: ReportedRun) -> None:
        self.every = f"{run.config.log_every} step"
        self._run = run
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._failed, self._told = False, {"failed": False, "again": False}

    def write(self, record: Record) -> None:
        fields = {"event": record.event, "time": round(record.time_s, 3), "step": record.step, **record.values}
        try:
            line = json.dumps(_finite(fields), default=str)
        except Exception as error:  # a callback's own objects and keys: any of their methods may fail
            self._lost += 1
            self._tell("failed", f"a {record.event} record is not JSON ({error}); training continues without it")
            return
        self._waiting.append(line.encode() + b"\n")
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._append()

    def close(self) -> None:
        self._append()
        missing, self._lost = self._lost + len(self._waiting), 0
        self._waiting.clear()
        if missing:
            self._run.note(f"{count(missing, 'record')} of {RunDirectory.LOG} could not be written and are lost")

    def _append(self) -> None:
        if not self._waiting:
            return
        try:
            append_lines(self._run.out / RunDirectory.LOG, self._waiting)
        except OSError as error:
            self._failed = True
            self._tell("failed", f"{RunDirectory.LOG} cannot be written ({error}); training "
                       "continues, and the last "
                       f"{MOST_WAITING} records are written later")
            return
        if self._failed:
            self._failed = False
            self._tell("again", f"{RunDirectory.LOG} is written again")

    def _tell(self, what: str, text: str) -> None:
        """Say each kind of news once in a run."""
        if not self._told[what]:
            self._told[what] = True
            self._run.note(text)


def append_lines(path: Path, lines: deque[bytes]) -> None:
    """Move ``lines`` to the end of the file, each whole or not at all; OSError leaves the rest in ``lines``.

    A line that a crash has torn is left as it is, and the first of ``lines`` starts on a fresh one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = os.fstat(descriptor).st_size
        fresh = b"" if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n" else b"\n"
        while lines:
            line = fresh + lines[0]
            try:
                write_all(descriptor, memoryview(line))
            except OSError:
                os.ftruncate(descriptor, end)  # no half line
                raise
            end, fresh = end + len(line), b""
            lines.popleft()
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them. A framework's own number is one."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


HISTORY = "history.jsonl"


def append_attempt(out: Path, record: Mapping[str, Any]) -> str:
    """Add a line to the run's history; return "" or why it could not be written."""
    try:
        append_lines(out / HISTORY, deque([json.dumps(record).encode() + b"\n"]))
    except OSError as error:
        return f"{out / HISTORY} could not be written: {error.strerror}"
    return ""


def read_attempts(out: Path) -> list[dict[str, Any]]:
    """Return the records of a run's history; [] without one. A line that was cut off is left out."""
    try:
        lines = (out / HISTORY).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [one for one in found if isinstance(one, dict)]


def attempts_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the attempts as a table: number, ranks, steps, lost steps, seconds, cause."""
    rows = [(str(one["attempt"]), str(one["ranks"] or "?"), f"{_step(one['step_start'])}-{_step(one['step_end'])}",
             str(one["steps_lost"]), f"{one['seconds']['ran']:.1f} s", _cause(one)) for one in records]
    return as_text(("attempt", "ranks", "steps", "lost", "ran", "cause"), rows)


def restarts_sentence(records: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """Return the cost of the restarts, in a sentence."""
    restarts, steps = len(records) - 1, sum(one["steps_lost"] for one in records[:-1])
    many = count(restarts, "restart") if restarts else "no restart"
    return f"{many}, {count(steps, 'step')} repeated, {seconds:.1f} s in total"


def _step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _cause(one: Mapping[str, Any]) -> str:
    who = f" (rank {one['rank']}" + (f" on host {one['host']})" if one["host"] else ")") if one["rank"] >= 0 else ""
    text = str(one["words"]).strip().splitlines()
    return f"{one['cause']}{who if one['cause'] != 'done' else ''}" + (f": {text[-1][:100]}" if text else "")
