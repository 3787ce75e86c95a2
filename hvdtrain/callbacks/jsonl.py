"""The run's log as JSON lines: one record per interval, evaluation and end, for tools to read.

A log never ends a run: what cannot be written (a full or read-only disk, a directory that is gone) is kept and tried
again with the next record.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from hvdtrain.callbacks.base import Callback
from hvdtrain.checkpoint.files import write_all

NAME = "log.jsonl"
MOST_WAITING = 1000
"""Records kept while they cannot be written; beyond these the oldest are lost."""


class Jsonl(Callback):
    """Appends to ``log.jsonl`` in the run's directory; a record has ``event``, ``time`` (unix seconds), ``step``.

    What comes before the run has begun (`Run.begun`) is written when it has.
    """

    def __init__(self, every_steps: int) -> None:
        self.every = f"{every_steps} step"
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._failed, self._told = False, {"failed": False, "again": False}

    def fit_start(self, run: Any) -> None:
        """Configuration, world and notes."""
        self.record(run, "start", world_size=run.control.size, hosts=run.topology.describe(), notes=run.notes,
                    framework=run.spec.framework, wire=run.collectives.name, memory=run.memory,
                    config=run.config.to_dict())

    def epoch_start(self, run: Any) -> None:
        """Write what has waited for the run to begin."""
        self._write(run)

    def step_end(self, run: Any) -> None:
        """Loss, rate, speed and phase seconds so far."""
        s = run.state
        self.record(run, "step", epoch=s.cursor.epoch, samples=s.cursor.samples, loss=s.loss, grad_norm=s.grad_norm,
                    lr=run.parts.optimizer.learning_rate(), samples_per_s=s.samples_per_s, phases_s=run.phases.seconds,
                    percent_of_solo=None if run.reading is None else run.reading.percent)

    def non_finite(self, run: Any) -> None:
        """A step without an update."""
        self.record(run, "non_finite", ranks=run.state.bad_ranks)

    def eval_end(self, run: Any) -> None:
        """Metrics."""
        self.record(run, "eval", epoch=run.state.cursor.epoch, metrics=run.state.metrics)

    def checkpoint(self, run: Any) -> None:
        """A checkpoint was due here."""
        self.record(run, "checkpoint")

    def fit_end(self, run: Any) -> None:
        """Where the time went, why and where it ended."""
        self._meter(run)
        self.record(run, "end", epoch=run.state.cursor.epoch, stop=run.state.stop, metrics=run.state.metrics,
                    ledger=run.ledger, memory=run.memory)

    def _meter(self, run: Any) -> None:
        """The ranks' times over the run."""
        if run.reading is not None:
            self.record(run, "meter", percent_of_solo=run.reading.percent, lost_percent=run.reading.lost,
                        ranks=[vars(row) for row in run.reading.rows], advice=run.reading.sentence)

    def close(self, run: Any) -> None:
        """Write what still waits; say what is lost."""
        self._write(run)
        missing, self._lost = self._lost + len(self._waiting), 0
        self._waiting.clear()
        if run.begun and missing:
            run.note(f"{missing} records of {NAME} could not be written and are lost")

    def record(self, run: Any, event: str, **fields: Any) -> None:
        """Append one record, now or when it can be; other callbacks may."""
        if run.out == Path():  # an evaluation without a fit has no directory, and leaves no file
            return
        record = {"event": event, "time": round(time.time(), 3), "step": run.state.cursor.step, **fields}
        try:
            line = json.dumps(_finite(record), default=str)
        except Exception as error:  # noqa: BLE001  (a callback's own objects and keys: any of their methods may fail)
            self._lost += 1
            self._tell(run, "failed", f"a {event} record is not JSON ({error}); training goes on without it")
            return
        self._waiting.append(line.encode() + b"\n")
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._write(run)

    def _write(self, run: Any) -> None:
        """Append the records that wait, oldest first, and keep those that do not go."""
        if not run.begun or not self._waiting:
            return
        try:
            append(run.out / NAME, self._waiting)
        except OSError as error:
            self._failed = True
            self._tell(run, "failed", f"{NAME} cannot be written ({error}); training goes on, and the last "
                       f"{MOST_WAITING} records are written when it can")
            return
        if self._failed:
            self._failed = False
            self._tell(run, "again", f"{NAME} is written again")

    def _tell(self, run: Any, what: str, text: str) -> None:
        """Say each kind of news once in a run."""
        if not self._told[what]:
            self._told[what] = True
            run.note(text)


def append(path: Path, lines: deque[bytes]) -> None:
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
    """NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value
