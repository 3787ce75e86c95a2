"""Exact metrics over uneven shards: Keras' own metrics, whose state is summed over ranks before the result is taken.

Owns the totals of an evaluation. A total is a metric's variables end to end, as float64; "loss" and what a model file
or a ``module:callable`` returns are (sum, weight). One more total, `SHAPES`, tells ranks that saw no sample what
the metrics were made for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import amp
from hvdtrain.backends.tensorflow.task import Phase, Task, default_pair, resolve_loss
from hvdtrain.config import Config
from hvdtrain.errors import UserError, nearest
from hvdtrain.resolve import load_callable

NOT_ADDITIVE = ("PearsonCorrelation", "ConcordanceCorrelation")
"""Metrics that take statistics of one batch, so that their sums depend on how the samples were cut."""


SHAPES = "shapes of targets and outputs"
"""Name of the total [1, then per tensor: dtype, rank, dimensions]: over c ranks its sum is c times that."""


class Evaluator:
    """Runs the model in inference mode and keeps the totals; one graph per shape of batch."""

    def __init__(self, spec: Any, config: Config, task: Task) -> None:
        self._model, self._task, self._spec = spec.model, task, spec
        self._loss: Any = resolve_loss(config.loss, spec.model) if spec.task is None else None
        self._pairs: dict[str, Callable[[Any, Any], Any]] = {}
        self._named: dict[str, tuple[Any, bool]] = {}
        if spec.task is None:
            self._choose(config.metrics)
        self._objects: dict[str, tuple[keras.metrics.Metric, bool]] | None = None
        self._shapes_k: np.ndarray | None = None
        self._totals: dict[str, np.ndarray] = {}
        self._function = tf.function(self._graph, reduce_retracing=True, jit_compile=False, autograph=False)

    def _choose(self, names: list[str]) -> None:
        """Sort configured and compiled metrics into callables and Keras' own (with: takes sample weights?)."""
        for name in names:
            if ":" in name:
                self._pairs[name.rpartition(":")[2]] = load_callable(name, "metrics")
            else:
                self._named[name] = (_known(name), False)
        if getattr(self._model, "compiled", False):
            own = getattr(self._model, "_compile_metrics", None)
            for metrics, weighted in ((getattr(own, "_user_metrics", None), False),
                                      (getattr(own, "_user_weighted_metrics", None), True)):
                for metric in keras.tree.flatten(metrics or []):
                    if metric is not None:
                        name = metric if isinstance(metric, str) else self._free(_name_of(metric))
                        _refuse_batch_statistics(type(metric).__name__)
                        self._named[name] = (metric, weighted)

    def _free(self, name: str) -> str:
        """``name``, numbered if another metric has it."""
        taken, n, stem = {"loss", *self._pairs, *self._named}, 0, name
        while name in taken:
            n, name = n + 1, f"{stem}_{n + 1}"
        return name

    def add(self, batch: tuple[Any, ...]) -> None:
        """Add one batch of tensors (B, ...)."""
        if self._objects is None:
            self._objects = self._build(batch)
        for name, (total, weight) in self._function(batch).items():
            self._totals[name] = self._totals.get(name, 0.0) + np.array([float(total), float(weight)])

    def _graph(self, batch: tuple[Any, ...]) -> dict[str, Any]:
        """Loss and user metrics as pairs; Keras' metrics are updated in place."""
        if self._spec.task is not None:
            pairs = {"loss": self._task(self._model, batch, False)}
            if self._spec.metrics is not None:
                pairs.update(Phase(self._spec.metrics, self._model)(batch, training=False))
            return pairs
        outputs = amp.widened(self._model(batch[0], training=False))
        pairs = {"loss": default_pair(self._loss, self._model, outputs, batch)}
        for name, metric in self._pairs.items():
            pairs[name] = metric(outputs, batch[1])
        for metric, weighted in (self._objects or {}).values():
            metric.update_state(batch[1], outputs, *(batch[2:3] if weighted else ()))
        return pairs

    def _build(self, batch: tuple[Any, ...]) -> dict[str, tuple[keras.metrics.Metric, bool]]:
        """Metric objects with all their variables, made by one sample of zeros and then reset."""
        if not self._named:
            return {}
        x, y = keras.tree.map_structure(lambda t: tf.zeros([1, *t.shape[1:]], t.dtype), tuple(batch[:2]))
        outputs = amp.widened(self._model(x, training=False))
        if not tf.is_tensor(outputs):
            raise UserError(f"the model returns a {type(outputs).__name__}", "one tensor, where metrics are by name",
                            "give the model file a task(model, batch) and metrics(model, batch)")
        self._shapes_k = _written([y, outputs])
        return self._made(y, outputs)

    def _made(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tuple[keras.metrics.Metric, bool]]:
        objects = {}
        for name, (metric, weighted) in self._named.items():
            made = _accuracy(y, outputs) if metric in ("accuracy", "acc") else _object(metric, name)
            made.update_state(y, outputs)
            made.reset_state()
            objects[name] = (made, weighted)
        return objects

    def take(self) -> dict[str, np.ndarray]:
        """float64[k] by name since the last call, "loss" first; empty where no batch was seen. Starts anew."""
        if not self._totals:
            return {}
        totals, self._totals = self._totals, {}
        for name, (metric, _) in (self._objects or {}).items():
            totals[name] = np.concatenate([np.asarray(v.numpy(), np.float64).reshape(-1) for v in metric.variables])
            metric.reset_state()
        if self._shapes_k is not None:
            totals[SHAPES] = self._shapes_k
        return {"loss": totals.pop("loss"), **totals}

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Each metric from its summed total; a metric of several numbers (one per class) gives their mean."""
        if self._objects is None and SHAPES in totals:
            self._shapes_k = totals[SHAPES] / totals[SHAPES][0]
            self._objects = self._made(*_read(self._shapes_k))
        return {name: self._result(name, total_k) for name, total_k in totals.items() if name != SHAPES}

    def _result(self, name: str, total_k: np.ndarray) -> float:
        metric = (self._objects or {}).get(name, (None, False))[0]
        if metric is None or type(metric).result is keras.metrics.Mean.result:
            assert len(total_k) == 2, f"a total of {len(total_k)} numbers for {name}"
            # (sum, weight), divided in float64: Keras would divide in float32.
            return float(total_k[0] / total_k[1]) if total_k[1] else math.nan
        saved = [v.numpy() for v in metric.variables]
        ends = np.cumsum([v.size for v in saved])
        for variable, part, like in zip(metric.variables, np.split(total_k, ends[:-1]), saved):
            variable.assign(part.reshape(like.shape).astype(like.dtype))
        result = float(np.mean(keras.tree.flatten(metric.result())[0]))
        for variable, value in zip(metric.variables, saved):
            variable.assign(value)
        return result


def _written(tensors: list[tf.Tensor]) -> np.ndarray:
    """Types and shapes as one vector, `SHAPES`."""
    return np.array([1, *(n for t in tensors for n in (t.dtype.as_datatype_enum, t.shape.rank, *t.shape))], np.float64)


def _read(shapes_k: np.ndarray) -> list[tf.Tensor]:
    """Undo `_written`: tensors of zeros. Where ranks had sequences of other lengths, those are near their mean."""
    numbers, tensors = [round(n) for n in shapes_k[1:].tolist()], []
    while numbers:
        (dtype, rank), numbers = numbers[:2], numbers[2:]
        tensors.append(tf.zeros(numbers[:rank], tf.as_dtype(dtype)))
        numbers = numbers[rank:]
    return tensors


def _name_of(metric: Any) -> str:
    """Its name, without Keras' counter (auc_3), which is not the same in every process."""
    name = str(getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__))
    stem, _, counter = name.rpartition("_")
    return stem if counter.isdigit() and stem.replace("_", "") == type(metric).__name__.lower() else name


def _refuse_batch_statistics(name: str) -> None:
    if name.lower().replace("_", "") in {n.lower() for n in NOT_ADDITIVE}:
        raise UserError(f"metric {name} takes its statistics of one batch",
                        "a metric whose state is a sum over samples",
                        "name another, or give module:callable(outputs, targets) -> (sum, weight)")


def _known(name: str) -> str:
    """``name`` as Keras spells it; `UserError` if keras.metrics lacks it."""
    if name.lower() in ("accuracy", "acc"):
        return "accuracy"
    _refuse_batch_statistics(name)
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


def _object(metric: Any, name: str) -> keras.metrics.Metric:
    """A fresh metric for a name, class instance or function."""
    if isinstance(metric, keras.metrics.Metric):
        return metric
    try:
        found = keras.metrics.get(metric)
    except (TypeError, ValueError) as error:  # a class whose constructor wants arguments
        raise UserError(f"metric {name} cannot be made from its name alone: {error}",
                        "a metric without required arguments",
                        "compile the model with the metric object, or give module:callable(outputs, targets)") from None
    return found if isinstance(found, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(found, name=name)


def _accuracy(y: Any, outputs: Any) -> keras.metrics.Metric:
    """Keras' reading of "accuracy": binary for one output, sparse for class numbers, else categorical."""
    if outputs.shape[-1] == 1:
        return keras.metrics.BinaryAccuracy(name="accuracy")
    if y.shape.rank < outputs.shape.rank or y.shape[-1] == 1:
        return keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    return keras.metrics.CategoricalAccuracy(name="accuracy")
