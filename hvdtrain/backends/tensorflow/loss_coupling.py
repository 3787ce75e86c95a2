"""Evaluate the loss of a Keras model on a few samples, in no graph, for `hvdtrain.backends.loss_coupling`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras.neutral import added_losses, computing_eps, neutral_layers
from hvdtrain.backends.keras.seeds import generator_kept
from hvdtrain.backends.loss_coupling import Evaluate, LossValue, per_row
from hvdtrain.backends.tensorflow.first_sample import _untouched
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts


def loss_evaluator(parts: ModelParts, pool: Batch) -> contextlib.AbstractContextManager[Evaluate]:
    """Return a context that gives what evaluates the loss of samples of ``pool``, and leaves everything as it was."""
    stage: Any = parts.stage

    def of_samples(numbers: Sequence[int], training: bool) -> tuple[Any, Any]:
        batch = tuple(tf.convert_to_tensor(array[list(numbers)]) for array in pool)
        return stage.task(parts.model, batch, training)  # type: ignore[no-any-return]
    return evaluator_of(parts.model, of_samples, stage.task.of_layers)


@contextlib.contextmanager
def evaluator_of(model: Any, of_samples: Callable[[Sequence[int], bool], tuple[Any, Any]],
                 of_layers: bool = True) -> Iterator[Evaluate]:
    """Yield a function that evaluates ``of_samples(numbers, training) -> (loss_sum, weight)``; restore ``model``.

    ``of_layers``: what layers add to the loss is part of it.
    """
    def evaluate(numbers: Sequence[int], training: bool) -> LossValue:
        outputs: list[Any] = []

        def keep(called: Any, inputs: Any, found: Any) -> None:
            outputs.extend(() if outputs else tf.nest.flatten(found))

        with neutral_layers(model, keep):
            total, weight = map(float, of_samples(numbers, training))
            eps = computing_eps(model)
        leaves = [np.asarray(tf.cast(t, tf.float64)) for t in outputs if tf.is_tensor(t) and t.dtype.is_floating]
        return LossValue(total, weight, added_losses(model) * weight if of_layers else 0.0, eps,
                         per_row(leaves, len(numbers)))

    with _untouched(model), generator_kept(), _without_tf32():
        yield evaluate


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Have GPUs multiply float32 in float32."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    wanted = before and not tf.config.list_physical_devices("GPU")
    try:
        tf.config.experimental.enable_tensor_float_32_execution(wanted)
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
