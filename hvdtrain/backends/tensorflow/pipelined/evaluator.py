"""Loss and metrics of a Keras model that is cut over ranks: counted where its last chunk is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.tensorflow.buffers import Kept, holding
from hvdtrain.backends.tensorflow.graphs import PLAIN
from hvdtrain.backends.tensorflow.pipelined.cargo import Crossing, crossing_of
from hvdtrain.backends.tensorflow.pipelined.ends import Last
from hvdtrain.backends.tensorflow.pipelined.measuring import CALLS
from hvdtrain.backends.tensorflow.pipelined.runs import Runs
from hvdtrain.backends.tensorflow.task import ClassNumbers, Evaluator
from hvdtrain.core.protocols import Batch


class PartEvaluator(Evaluator):
    """`hvdtrain.core.protocols.Evaluator` of a rank that may have the model's last chunk. ``evaluation``: of the
    whole."""

    def __init__(self, spec: Any, evaluation: Evaluation, class_numbers: ClassNumbers, runs: Runs) -> None:
        super().__init__(evaluation, class_numbers)
        self._last = Last(runs.whole, runs.last)
        evaluation._spec = dataclasses.replace(spec, model=self._last)
        self._form = ""
        self._functions: dict[str, Any] = {}

    def add(self, batch: Batch) -> None:
        """Add a batch where this rank has the whole model."""
        self.add_outputs(batch, [], "")

    def add_outputs(self, batch: Batch, came: Sequence[tf.Tensor], form: str) -> None:
        """Add a batch of which ``came`` has come into the last chunk; all of it, or nothing where that fails."""
        with self._class_numbers.checked(tuple(batch)):
            tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
            if self._kept is None:
                self._take(came, form, len(tf.nest.flatten(tensors)[0]))
                self._evaluation.build(tensors)
                self._kept = Kept(self._evaluation.variables())
            try:
                with holding([self._kept]):
                    pairs = self._function_of(form)(tensors, list(came))
                self._evaluation.count(pairs)
            except BaseException:
                self._kept.put_back()
                raise

    def _function_of(self, form: str) -> Any:
        if form not in self._functions:
            def measure(batch: Any, came: list[tf.Tensor]) -> Any:
                self._take(came, form)
                return self._measure(batch)

            self._functions[form] = tf.function(measure, reduce_retracing=True, **PLAIN)
        return self._functions[form]

    def _take(self, came: Sequence[tf.Tensor], form: str, samples: int = 0) -> None:
        """Have the last chunk run on what has come; of so many ``samples`` on the first, where it says how many."""
        value, losses = crossing_of(came, form) if came else Crossing(None, [])
        if samples and came:
            value = tf.nest.map_structure(lambda x: x[:1] if x.shape.rank and x.shape[0] == samples else x, value)
        self._last.take(Crossing(value, losses), CALLS)
