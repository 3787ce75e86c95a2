"""Loss and metrics of a Keras model over evaluation data, in graphs of TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.task import ClassNumbers
from hvdtrain.keras.evaluation import Evaluation
from hvdtrain.protocols import Batch


class Evaluator:
    """Runs the model in inference mode and keeps the totals; one graph per shape of batch.

    Implements `hvdtrain.protocols.Evaluator`.
    """

    def __init__(self, evaluation: Evaluation, class_numbers: ClassNumbers) -> None:
        self._evaluation, self._class_numbers = evaluation, class_numbers
        self._function = tf.function(evaluation.measure, reduce_retracing=True, jit_compile=False, autograph=False)

    def add(self, batch: Batch) -> None:
        """Add one batch of arrays (B, ...)."""
        with self._class_numbers.checked(tuple(batch)):
            tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
            self._evaluation.build(tensors)
            self._evaluation.count(self._function(tensors))

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
