"""The run's log as JSON lines: one record per interval, evaluation and end, for tools to read."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from hvdtrain.callbacks.base import Callback


class Jsonl(Callback):
    """Appends to ``log.jsonl`` in the run's directory; a record has ``event``, ``time`` (unix seconds), ``step``."""

    def __init__(self, every_steps: int) -> None:
        self.every = f"{every_steps} step"

    def fit_start(self, run: Any) -> None:
        """Configuration, world and notes."""
        self.record(run, "start", world_size=run.control.size, hosts=run.topology.describe(), notes=run.notes,
                    framework=run.spec.framework, wire=run.collectives.name, config=run.config.to_dict())

    def step_end(self, run: Any) -> None:
        """Loss, rate, speed and phase seconds so far."""
        s = run.state
        self.record(run, "step", epoch=s.cursor.epoch, samples=s.cursor.samples, loss=s.loss, grad_norm=s.grad_norm,
                    lr=run.step.learning_rate(), samples_per_s=s.samples_per_s, phases_s=run.phases.seconds,
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
        self.record(run, "end", epoch=run.state.cursor.epoch, stop=run.state.stop, metrics=run.state.metrics)

    def _meter(self, run: Any) -> None:
        """The ranks' times over the run."""
        if run.reading is not None:
            self.record(run, "meter", percent_of_solo=run.reading.percent, lost_percent=run.reading.lost,
                        ranks=[vars(row) for row in run.reading.rows], advice=run.reading.sentence)

    def record(self, run: Any, event: str, **fields: Any) -> None:
        """Append one record; other callbacks may."""
        if run.out == Path():  # an evaluation without a fit has no directory, and leaves no file
            return
        record = {"event": event, "time": round(time.time(), 3), "step": run.state.cursor.step, **fields}
        with (run.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record), default=str) + "\n")


def _finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value
