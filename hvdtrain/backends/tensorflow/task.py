"""A Keras model's loss and metrics in TensorFlow, and a check of class numbers on which TensorFlow itself fails.

Owns graphs of evaluations. Loss and metrics themselves are `hvdtrain.backends.keras`'.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras import compiled, losses, task
from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.pairs import Pair
from hvdtrain.backends.tensorflow.buffers import VariableCopies, holding
from hvdtrain.backends.tensorflow.graphs import PLAIN
from hvdtrain.config import Config
from hvdtrain.core.protocols import Batch
from hvdtrain.data.layout import named_outputs


class Task(task.Task):
    """`hvdtrain.backends.keras.task.Task` that returns tensors, float64 if they come in it, else float32."""

    def __call__(self, model: Any, batch: Any, training: bool) -> Pair:
        loss_sum, weight = (tf.cast(v, _wide(v)) for v in map(tf.convert_to_tensor, super().__call__(
            model, batch, training)))
        return loss_sum, weight


class ClassNumbers:
    """Checks integer targets on the host: TensorFlow fails on those out of range, or gives NaN on a GPU.

    Only for categorical cross entropies, and if the model knows the number of its outputs beforehand; other models'
    targets are checked when an operation has failed.
    """

    def __init__(self, spec: Any, config: Config) -> None:
        self._model = spec.model
        loss = task.compiled_loss(spec.model)
        name = "auto" if loss is None else task.name_of(loss)
        self._name = name if config.loss.name == "auto" else config.loss.name
        by_name = config.loss.name != "auto" and losses.of_shares(self._name)
        self._looks = spec.task is None and (self._name == "auto" or losses.sparse(self._name) or by_name)
        self._ignored = config.loss.args.get("ignore_class", getattr(loss, "ignore_class", None))
        axis = config.loss.args.get("axis", getattr(loss, "axis", -1))
        shape = _output_shape(spec.model) if axis == -1 else None
        self._classes = shape[-1] if shape and len(shape) > 1 and isinstance(shape[-1], int) else None

    def check(self, batch: tuple[Any, ...], classes: int | None = None) -> None:
        """Raise `UserError` for targets outside 0..C-1, C being the model's outputs or ``classes``."""
        classes = classes or self._classes
        if not (self._looks and classes and len(batch) > 1):
            return
        targets = compiled.split(self._model, batch)[1]
        if not isinstance(targets, np.ndarray):
            return
        if targets.dtype.kind not in "iu" or not targets.size or classes < 2:
            return
        low, high, kind = int(targets.min()), int(targets.max()), losses.kind(targets)
        if 0 <= low and high < classes:
            return
        if self._ignored is not None:
            targets = targets[targets != self._ignored]
            low, high = (int(targets.min()), int(targets.max())) if targets.size else (0, 0)
            if 0 <= low and high < classes:
                return
        raise losses.out_of_range(self._name, f"the targets are {kind}", low, high, classes)

    @contextlib.contextmanager
    def checked(self, batch: tuple[Any, ...]) -> Iterator[None]:
        """Run `check` before the body, and after a failed operation with the range that this names."""
        self.check(batch)
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            found = re.search(r"label value.*outside the valid range of \[0, (\d+)\)", error.message, re.DOTALL)
            if found:
                self.check(batch, int(found[1]))
            raise


def _output_shape(model: keras.Model) -> tuple[Any, ...] | None:
    try:
        shape = model.output_shape
    except (AttributeError, ValueError):
        return None
    return shape if isinstance(shape, tuple) else None


def _wide(x: Any) -> tf.DType:
    return tf.float64 if getattr(x, "dtype", None) == tf.float64 else tf.float32


class Evaluator:
    """Implements `hvdtrain.core.protocols.Evaluator`: runs the model in inference, one graph per shape of batch."""

    def __init__(self, evaluation: Evaluation, class_numbers: ClassNumbers) -> None:
        self._evaluation, self._class_numbers = evaluation, class_numbers
        self._function = tf.function(self._measure, reduce_retracing=True, **PLAIN)
        self._outputs = tf.function(evaluation.outputs, reduce_retracing=True, **PLAIN)
        self._kept: VariableCopies | None = None

    def add(self, batch: Batch) -> None:
        self._add(batch, self._function)

    def _add(self, batch: Batch, function: Callable[..., Any], *inputs: Any,
             first: Callable[[int], None] = lambda samples: None) -> None:
        """Add ``function(batch, *inputs)``; all of it, or nothing after a failure. ``first``: called before `build`."""
        with self._class_numbers.checked(tuple(batch)):
            tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
            if self._kept is None:
                first(len(tf.nest.flatten(tensors)[0]))
                self._evaluation.build(tensors)
                self._kept = VariableCopies(self._evaluation.variables())
            try:
                with holding([self._kept]):
                    pairs = function(tensors, *inputs)
                self._evaluation.count(pairs)
            except BaseException:
                self._kept.put_back()
                raise

    def _measure(self, batch: Any) -> Any:
        assert self._kept is not None
        with tf.control_dependencies(self._kept.copy()):
            return self._evaluation.measure(batch)

    def once(self, batch: tuple[Any, ...]) -> None:
        """Measure one batch in no graph; all of it, or nothing after a failure."""
        try:
            self._evaluation.count(self._evaluation.measure(batch))
        except BaseException:
            self._evaluation.take()
            raise

    def totals(self) -> dict[str, np.ndarray]:
        return self._evaluation.take()

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        return self._evaluation.results(totals)

    def undirected(self, name: str) -> bool:
        return self._evaluation.undirected(name)

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        found = self._outputs(tf.nest.map_structure(tf.convert_to_tensor, tuple(batch)))
        return named_outputs(found, lambda tensor: np.asarray(tensor.numpy()))
