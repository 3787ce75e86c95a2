"""Exact metrics over uneven shards: Keras' own metrics, whose state is summed over ranks before the result is taken.

Owns the totals of an evaluation, on any backend of Keras: "loss" and what a model file or a ``module:callable`` returns
are (sum, weight), those of Keras' metrics are their states (`hvdtrain.backends.keras.states`), from `model.compile` and
from the configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.keras import compiled, states
from hvdtrain.backends.keras.task import Phase, Task
from hvdtrain.backends.pairs import Pair, Totals, checked_pair, of_model_file
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import load_callable


class Evaluation:
    """Measures batches of a spec whose model is a `keras.Model`, and keeps the totals."""

    def __init__(self, spec: Any, config: Config, task: Task) -> None:
        self._spec, self._task, self._own = spec, task, spec.task is not None
        self._users: dict[str, Callable[[Any, Any], Any]] = {}
        named: dict[str, Any] = {}
        for name in [] if self._own else config.metrics:
            if ":" in name:
                self._users[name.rpartition(":")[2]] = load_callable(name, "metrics")
            else:
                named[name] = _known(name)
        self._states = states.CompiledMetrics(None if self._own else spec.model, named, taken=("loss", *self._users),
                                              ignored=task.ignored)
        compiled.setup_of(spec.model).metrics = None if self._own else self._states
        self._totals = Totals()

    def build(self, batch: Sequence[Any]) -> None:
        """Make Keras' metrics with all their variables, by one sample of zeros like ``batch``, before `measure` is
        traced: no graph can make variables."""
        if self._states and not self._states.built:
            x, y, weight = states.zeros_like_one(compiled.split(self._spec.model, batch))
            self._states.build(y, compiled.widened(self._spec.model(x, training=False)), weight)

    def variables(self) -> list[Any]:
        """Return what holds the totals of Keras' metrics, once `build` has made it."""
        return [v for metric in self._states.named.values() for v in metric.variables]

    def measure(self, batch: Sequence[Any]) -> dict[str, Pair]:
        """Run the model in inference, add a batch to Keras' metrics, and return what is (sum, weight) for `count`."""
        model = self._spec.model
        if self._own:
            measured = self._spec.metrics
            return of_model_file(lambda batch: self._task(model, batch, False),
                                 measured and (lambda batch: Phase(measured, model)(batch, training=False)), batch)
        x, y, weight = compiled.split(model, batch)
        outputs = model(x, training=False)
        pairs = self._task.pairs(model, outputs, batch)
        outputs = compiled.widened(outputs)
        for name, metric in self._users.items():
            pairs[name] = checked_pair(metric(outputs, y), f"metric {name!r}", "(sum, weight)")
        if self._states:
            self._states.build(*states.zeros_like_one((y, outputs, weight)))
            self._states.update(y, outputs, weight)
        return pairs

    def count(self, pairs: dict[str, Pair]) -> None:
        """Add what `measure` returned."""
        self._totals.add(pairs)

    def take(self) -> dict[str, np.ndarray]:
        """Return float64[k] by name since the last call, "loss" first; empty where no batch was seen. Starts anew."""
        totals, of_keras = self._totals.take(), self._states.take()
        return {**totals, **of_keras} if totals else {}

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Return each metric from its summed total; a metric of several numbers (one per class) gives their mean."""
        return self._states.results(totals)


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
