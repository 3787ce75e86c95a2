"""Decide after which steps and epochs a run evaluates, and remember the last evaluation over a resume."""

from __future__ import annotations

import math
from typing import Any

from hvdtrain.config import Config
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


def evaluates_epoch(config: Config, epoch: int) -> bool:
    """Return whether the evaluation data is evaluated after ``epoch`` epochs. Pure."""
    return epoch == config.epochs or config.eval_every > 0 and epoch % config.eval_every == 0


def evaluates_step(config: Config, step: int) -> bool:
    """Return whether the evaluation data is evaluated after step ``step``, by ``eval_steps``. Pure."""
    return config.eval_steps > 0 and step % config.eval_steps == 0


def is_due(config: Config, at: Cursor) -> bool:
    """Return whether a longer run evaluates at ``at``, too, and not only one that a stop has cut short. Pure."""
    return evaluates_step(config, at.step) or not at.epoch_step and evaluates_epoch(config, at.epoch)


def left_to_epoch(run: Run) -> bool:
    """Return whether the step was the epoch's last and its evaluation follows at the epoch's end.

    Of a stream nobody knows: such a step is evaluated at once, and the epoch's end does not repeat it.
    """
    left, epoch = run.feed.steps_left(run.state.cursor), run.state.cursor.epoch + 1
    return left == 0 and evaluates_epoch(run.config, epoch)


def metric_name(of_set: str, metric: str) -> str:
    """Return the name of a metric of the evaluation set ``of_set``; "": of the run's own evaluation data."""
    return f"{of_set}/{metric}" if of_set else metric


class EvalSteps(Callback):
    """Keeps in checkpoints the last evaluation, and whether the run that ends for a requeue owes one.

    A run that resumes at the step of an evaluation has its metrics and does not repeat it.
    """

    where = "all"
    setting = "eval_steps"

    def __init__(self, eval_steps: int) -> None:
        self._last: dict[str, Any] = {}
        self._owed = False

    def fit_start(self, run: Run) -> None:
        """Take up what a checkpoint of this step tells."""
        findings = run.state.findings
        if self._last.get("step") == run.state.cursor.step and findings.metrics_at < 0:
            run.state.metrics = {name: math.nan if value is None else value
                                 for name, value in self._last["metrics"].items()}
            findings.metrics_at = run.state.cursor.step
        findings.eval_owed, self._owed = findings.eval_owed or self._owed, False

    def eval_end(self, run: Run) -> None:
        metrics = {name: value if math.isfinite(value) else None for name, value in run.state.metrics.items()}
        self._last = {"step": run.state.cursor.step, "metrics": metrics}

    def saving(self, run: Run) -> None:
        self._owed = run.state.findings.eval_owed

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "owed": self._owed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._owed = state["last"], bool(state["owed"])
