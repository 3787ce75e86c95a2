"""Ends a run whose watched metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hvdtrain.backends.pairs import metric_of
from hvdtrain.config import EarlyStopConfig as Settings
from hvdtrain.core.errors import UserError, count, nearest
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run


class EarlyStop(Callback):
    """Runs on all ranks over metrics that are equal on all; the wish to stop still waits for an agreement (law 6)."""

    where = "all"
    steers = True
    state_key = "EarlyStop"

    @classmethod
    def wanted(cls, run: Run) -> bool:
        return bool(run.config.early_stop.metric)

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(run.config.early_stop)

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.best: float | None = None
        self.waited = 0

    def fit_start(self, run: Run) -> None:
        """Refuse a run that evaluates nothing; a run that is resumed after it was stopped stays stopped."""
        if run.eval_feed is None:
            raise UserError("early_stop.metric is set and there is no evaluation data", "a test split",
                            "give one, or leave early_stop.metric empty")
        if self.waited >= self._settings.patience:
            run.want_stop(f"early stop: {self._settings.metric} had not got better for "
                          f"{count(self.waited, 'evaluation')}")

    def eval_end(self, run: Run) -> None:
        s = self._settings
        if s.metric not in run.state.metrics:
            raise UserError(f"early_stop.metric {s.metric!r} is not evaluated", nearest(s.metric, run.state.metrics),
                            "correct early_stop.metric")
        if run.state.cursor.epoch_step:
            return  # a stop cut the epoch short: a resumed run evaluates again, at its end
        value = run.state.metrics[s.metric]
        better = metric_of(s.metric).better if s.mode == "auto" else s.mode
        sign = 1.0 if better == "max" else -1.0
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > s.min_delta):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= s.patience:
            best = "never finite" if self.best is None else f"not better than {self.best:.6g}"
            run.want_stop(f"early stop: {s.metric} {best} for {count(self.waited, 'evaluation')}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], int(state["waited"])
