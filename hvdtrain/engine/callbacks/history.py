"""Results of every epoch, by name, the same on every rank; `hvdtrain.trainer.Result.history`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


class History(Callback):
    """Keeps, for each epoch that this process trained, its mean loss per sample and what was evaluated after it.

    ``history``: "loss", and each metric as "val_" and its name, to a value per epoch, NaN where an epoch lacks it. An
    epoch that a stop cut short counts as one, unless the run stopped for a requeue: then another fit continues it.
    Skipped steps do not count. Where losses arrive a step late (GPUs), an epoch's last is left out. ``renamed``: gives
    metrics their names in the history.
    """

    where = "all"
    state_key = "History"

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.epoch = 0
        self._begun = self._unfinished = False
        self._resumed: list[Any] = []
        self._sum = self._weight = 0.0
        self._late_n = 0
        self.renamed: Callable[[dict[str, float]], dict[str, float]] = dict

    def epoch_start(self, run: Run) -> None:
        """Begin at nothing, at what a checkpoint inside this epoch holds, or continue what a requeue interrupted."""
        if self._begun and self.epoch == run.state.cursor.epoch:
            return
        self._begun, self.epoch = True, run.state.cursor.epoch
        self._sum, self._weight, self._late_n = 0.0, 0.0, 0
        if self._resumed and self._resumed[0] == self.epoch and run.state.cursor.epoch_step:
            _, self._sum, self._weight = self._resumed
        self._resumed, self._unfinished = [], True

    def step_end(self, run: Run) -> None:
        """Add the step's loss, which is a mean over its samples; a skipped step has none."""
        assert run.batch is not None
        n = run.batch.n_global if run.batch.weight else 0
        if run.parts.stage.asynchronous and n:
            n, self._late_n = self._late_n, n
        if n and not math.isnan(run.state.loss):
            self._sum += run.state.loss * n
            self._weight += n

    def epoch_end(self, run: Run) -> None:
        self._unfinished = False
        self._close(run)

    def fit_end(self, run: Run) -> None:
        if self._begun and self._weight and not run.state.requeue:
            self._close(run)

    def loss(self) -> float:
        """Mean loss per sample of the epoch so far."""
        return self._sum / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        kept = self._unfinished and math.isfinite(self._sum)
        return {"mean": [self.epoch, self._sum, self._weight]} if kept else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = list(state.get("mean", ()))

    def _close(self, run: Run) -> None:
        self._begun = False
        logs = self.logs(run)
        closed = max((len(values) for values in self.history.values()), default=0)
        for name, value in logs.items():
            values = self.history.setdefault(name, [])
            values += [math.nan] * (closed - len(values))
            values.append(float(value))
        self.closed(run, logs)

    def logs(self, run: Run) -> dict[str, float]:
        """Return the epoch in numbers, under Keras' names."""
        at_end = run.state.findings.metrics_at == run.state.cursor.step  # an earlier evaluation is none of the epoch
        evaluated = self.renamed(run.state.metrics) if at_end else {}
        return {"loss": self.loss(), **{f"val_{name}": value for name, value in evaluated.items()}}

    def closed(self, run: Run, logs: dict[str, float]) -> None:
        """For those who tell others."""
