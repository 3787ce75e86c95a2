"""Schedules that keras.optimizers.schedules lacks: a sequence of schedules, and a rate that follows evaluations.

Owns their formulas, with keras.ops only. When an evaluation counts is left to `hvdtrain.engine.callbacks.plateau`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras.optimizers import schedules


@keras.saving.register_keras_serializable(package="hvdtrain")
class SequentialLR(schedules.LearningRateSchedule):
    """Schedules one after the other: number i holds from update ``milestones[i - 1]``, which it counts as its first.

    Errors: `ValueError` for milestones that are not one fewer than the schedules, or do not rise.
    """

    def __init__(self, schedulers: Sequence[Any], milestones: Sequence[int]) -> None:
        super().__init__()
        if len(milestones) != len(schedulers) - 1 or list(milestones) != sorted(set(milestones)):
            raise ValueError(f"{len(schedulers)} schedulers and milestones {list(milestones)}; wanted: one milestone "
                             "fewer than schedulers, each later than the one before")
        self.schedulers, self.milestones = list(schedulers), [int(step) for step in milestones]

    def __call__(self, step: Any) -> Any:
        """Return the rate of update ``step``, counted from 0."""
        ops = keras.ops
        step = ops.cast(step, "float32")
        rate = ops.cast(self.schedulers[0](step), "float32")
        for begin, schedule in zip(self.milestones, self.schedulers[1:]):
            since = ops.maximum(step - begin, 0.0)  # a schedule need not have rates before its first update
            rate = ops.where(step >= begin, ops.cast(schedule(since), "float32"), rate)
        return rate

    def get_config(self) -> dict[str, Any]:
        return {"schedulers": [schedules.serialize(one) for one in self.schedulers], "milestones": self.milestones}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SequentialLR:
        return cls([schedules.deserialize(one) for one in config["schedulers"]], config["milestones"])


@keras.saving.register_keras_serializable(package="hvdtrain")
class ReduceLROnPlateau(schedules.LearningRateSchedule):
    """A rate that is multiplied by ``factor`` after ``patience`` evaluations without improvement by ``min_delta``.

    The rule is that of `keras.callbacks.ReduceLROnPlateau`, with its defaults. ``mode``: min or max. Errors:
    `ValueError` for a factor that is not below 1 and for other modes.
    """

    def __init__(self, initial_learning_rate: float, factor: float = 0.1, patience: int = 10, mode: str = "min",
                 min_delta: float = 1e-4, cooldown: int = 0, min_lr: float = 0.0) -> None:
        super().__init__()
        if not 0 < factor < 1 or mode not in ("min", "max"):
            raise ValueError(f"factor is {factor} and mode {mode!r}; wanted: between 0 and 1, and min, max or auto")
        self.initial_learning_rate, self.factor, self.patience = float(initial_learning_rate), factor, patience
        self.mode, self.min_delta, self.cooldown, self.min_lr = mode, min_delta, cooldown, min_lr
        self.best, self.waited, self.rests = math.nan, 0, 0
        self._rate = keras.Variable(self.initial_learning_rate, dtype="float32", trainable=False, name="rate")
        self._exact = self.initial_learning_rate

    def __call__(self, step: Any) -> Any:
        return keras.ops.convert_to_tensor(self._rate)

    def evaluated(self, value: float) -> None:
        """Follow one evaluation."""
        if self.rests > 0:
            self.rests, self.waited = self.rests - 1, 0
        sign = 1.0 if self.mode == "max" else -1.0
        if sign * (value - self.best) > self.min_delta or math.isnan(self.best) and not math.isnan(value):
            self.best, self.waited = value, 0
        elif self.rests <= 0:
            self.waited += 1
            if self.waited >= self.patience and self._exact > self.min_lr:
                self._set(max(self._exact * self.factor, self.min_lr))
                self.rests, self.waited = self.cooldown, 0

    def _set(self, rate: float) -> None:
        self._exact = rate
        self._rate.assign(rate)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, JSON-able: the rate as its part of the first one."""
        return {"best": None if math.isnan(self.best) else self.best, "waited": self.waited, "rests": self.rests,
                "part": self._exact / self.initial_learning_rate if self.initial_learning_rate else 1.0}

    def load(self, state: Mapping[str, Any]) -> None:
        """Undo `state`; with {} begin again."""
        best = state.get("best")
        self.best, self.waited, self.rests = math.nan if best is None else best, state.get("waited", 0), \
            state.get("rests", 0)
        self._set(self.initial_learning_rate * state.get("part", 1.0))

    def get_config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (
            "initial_learning_rate", "factor", "patience", "mode", "min_delta", "cooldown", "min_lr")}
