"""Loss and metrics of a Keras model over evaluation data, in graphs of TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.evaluation import Evaluation
from hvdtrain.backends.tensorflow.buffers import Kept, holding
from hvdtrain.backends.tensorflow.entered import PLAIN
from hvdtrain.backends.tensorflow.task import ClassNumbers
from hvdtrain.core.protocols import Batch


class Evaluator:
    """Runs the model in inference mode and keeps the totals; one graph per shape of batch.

    Implements `hvdtrain.core.protocols.Evaluator`.
    """

    def __init__(self, evaluation: Evaluation, class_numbers: ClassNumbers) -> None:
        self._evaluation, self._class_numbers = evaluation, class_numbers
        self._function = tf.function(self._measure, reduce_retracing=True, **PLAIN)
        self._kept: Kept | None = None

    def add(self, batch: Batch) -> None:
        """Add one batch of arrays (B, ...); all of it, or nothing where that fails."""
        with self._class_numbers.checked(tuple(batch)):
            tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
            self._evaluation.build(tensors)
            self._kept = kept = self._kept or Kept(self._evaluation.variables())
            try:
                with holding([kept]):
                    pairs = self._function(tensors)
                self._evaluation.count(pairs)
            except BaseException:
                kept.put_back()
                raise

    def _measure(self, batch: Any) -> Any:
        assert self._kept is not None
        with tf.control_dependencies(self._kept.copy()):
            return self._evaluation.measure(batch)

    def once(self, batch: tuple[Any, ...]) -> None:
        """Measure one batch in no graph, and forget it."""
        try:
            self._evaluation.measure(batch)
        finally:
            self._evaluation.take()

    def totals(self) -> dict[str, np.ndarray]:
        """Return float64[k] by name since the last call, "loss" first; empty where no batch was seen. Starts anew."""
        return self._evaluation.take()

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Return each metric from its summed total."""
        return self._evaluation.results(totals)
