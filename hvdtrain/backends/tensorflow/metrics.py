"""Exact metrics over uneven shards: Keras' own metrics, whose state is summed over ranks before the result is taken.

Owns the totals of an evaluation: "loss" and what a model file or a ``module:callable`` returns are (sum, weight), those
of Keras' metrics are their states (`hvdtrain.keras.states`), from `model.compile` and from the configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.task import (ClassNumbers, Phase, Task, by_compile, default_pair, layers_pair,
                                               resolve_loss)
from hvdtrain.config import Config
from hvdtrain.errors import UserError, nearest
from hvdtrain.keras import compiled, states
from hvdtrain.protocols import Batch, ModelSpec
from hvdtrain.resolve import load_callable

SHAPES = states.SHAPES


class Evaluator:
    """Runs the model in inference mode and keeps the totals; one graph per shape of batch.

    Implements `hvdtrain.protocols.Evaluator`.
    """

    def __init__(self, spec: ModelSpec, config: Config, task: Task, class_numbers: ClassNumbers) -> None:
        self._model, self._task, self._spec, self._class_numbers = spec.model, task, spec, class_numbers
        self._own = spec.task is not None
        self._loss: Any = None if self._own or by_compile(spec, config) else resolve_loss(config.loss, spec.model)
        self._pairs: dict[str, Callable[[Any, Any], Any]] = {}
        named: dict[str, Any] = {}
        for name in [] if self._own else config.metrics:
            if ":" in name:
                self._pairs[name.rpartition(":")[2]] = load_callable(name, "metrics")
            else:
                named[name] = _known(name)
        self._objects: Any = None
        if not self._own:
            self._objects = states.CompiledMetrics(spec.model, named, taken=("loss", *self._pairs))
            compiled.setup_of(spec.model).metrics = self._objects
        self._totals: dict[str, np.ndarray] = {}
        self._function = tf.function(self._graph, reduce_retracing=True, jit_compile=False, autograph=False)

    def add(self, batch: Batch) -> None:
        """Add one batch of arrays (B, ...)."""
        with self._class_numbers.checked(tuple(batch)):
            tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
            if self._objects and not self._objects.built:
                self._build(tensors)
            pairs = self._function(tensors)
        for name, (total, weight) in pairs.items():
            self._totals[name] = self._totals.get(name, 0.0) + np.array([float(total), float(weight)])

    def once(self, batch: tuple[Any, ...]) -> None:
        """Measure one batch in no graph, and forget it."""
        try:
            if self._objects and not self._objects.built:
                self._build(batch)
            self._graph(batch)
        finally:
            if self._objects:
                self._objects.take()

    def _graph(self, batch: tuple[Any, ...]) -> dict[str, Any]:
        """Loss and user metrics as pairs; Keras' metrics are updated in place."""
        if self._own:
            pairs = {"loss": self._task(self._model, batch, False)}
            if self._spec.metrics is not None:
                pairs.update(Phase(self._spec.metrics, self._model)(batch, training=False))
            return pairs
        x, y, weight = compiled.split(self._model, batch)
        outputs = self._model(x, training=False)
        pairs = self._loss_pairs(outputs, batch)
        for name, metric in self._pairs.items():
            pairs[name] = metric(compiled.widened(outputs), y)
        if self._objects:
            self._objects.update(y, compiled.widened(outputs), weight)
        return pairs

    def _loss_pairs(self, outputs: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
        """"loss" and, of several outputs, each one's own."""
        if self._loss is None:
            return self._task.pairs(self._model, outputs, batch)  # type: ignore[attr-defined]
        _, y, weight = compiled.split(self._model, batch)
        if y is None and getattr(self._model, "compiled", False) and self._model.losses:
            return {"loss": layers_pair(self._model, outputs)}
        parts = batch[:1] if y is None else (batch[0], y) if weight is None else (batch[0], y, weight)
        return {"loss": default_pair(self._loss, self._model, outputs, parts)}

    def _build(self, batch: tuple[Any, ...]) -> None:
        """Metric objects with all their variables, made by one sample of zeros."""
        x, y, weight = states.zeros_like_one(compiled.split(self._model, batch))
        self._objects.build(y, compiled.widened(self._model(x, training=False)), weight)

    def totals(self) -> dict[str, np.ndarray]:
        """Return float64[k] by name since the last call, "loss" first; empty where no batch was seen. Starts anew."""
        if not self._totals:
            return {}
        totals, self._totals = self._totals, {}
        return {"loss": totals.pop("loss"), **totals, **(self._objects.take() if self._objects else {})}

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Return each metric from its summed total; a metric of several numbers (one per class) gives their mean."""
        return (self._objects or states.CompiledMetrics(None)).results(totals)


def _known(name: str) -> str:
    """``name`` as Keras spells it; `UserError` if keras.metrics lacks it."""
    if name.lower() in ("accuracy", "acc"):
        return "accuracy"
    states.refuse_batch_statistics(name)
    known = {n.lower().replace("_", ""): n for n, c in vars(keras.metrics).items()
             if _is_metric(c) or _is_function(n, c)}
    key = name.lower().replace("_", "")
    if key not in known:
        with contextlib.suppress(ValueError):  # Keras' short names, such as mse
            keras.metrics.get(name.lower())
            return name.lower()
        raise UserError(f"metric {name!r} is not in keras.metrics",
                        nearest(name, ["accuracy", *(n for n in known.values() if n[0].isupper() and n != "Accuracy")])
                        + " or module:callable", "correct metrics")
    return str(known[key])


def _is_metric(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, keras.metrics.Metric) and found is not keras.metrics.Metric


def _is_function(name: str, found: Any) -> bool:
    return callable(found) and not isinstance(found, type) and name not in ("get", "serialize", "deserialize")
