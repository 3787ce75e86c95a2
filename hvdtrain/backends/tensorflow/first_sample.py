"""Runs samples through a Keras model and its loss or metrics, in no graph, and puts everything back as it was.

Owns what has to be put back: the model's variables (weights, seeded generators, metrics), the generators of Python,
numpy, Keras and TensorFlow. Exchanges nothing: it comes before `Stage.connect`. Eager, so that the graphs of
training are traced once, by its first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.keras.seeds import generator_kept
from hvdtrain.core import rng
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts


def try_samples(parts: ModelParts, batch: Batch, training: bool) -> list[str]:
    """Forward and loss as in training, or metrics as in an evaluation; no backward. Raises what the model raises.

    Returns the variables that this wrote to, BatchNorm's statistics aside.
    """
    tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
    stage: Any = parts.stage
    evaluator: Any = parts.evaluator
    buffers: Any = parts.buffers
    with _untouched(parts.model) as written, generator_kept(), stage.class_numbers.checked(tuple(batch)):
        if training:
            stage.task(parts.model, tensors, True)
        else:
            evaluator.once(tensors)
    names: list[str] = buffers.names_of(written)
    return names


@contextlib.contextmanager
def untouched(parts: ModelParts, batch: Batch) -> Iterator[None]:
    """Put everything back after the body as it was: for `hvdtrain.engine.pipeline_first_sample`."""
    stage: Any = parts.stage
    evaluator: Any = parts.evaluator
    with _untouched(parts.model), generator_kept(), stage.class_numbers.checked(tuple(batch)):
        yield
    evaluator.totals()


@contextlib.contextmanager
def _untouched(model: Any) -> Iterator[list[Any]]:
    """Give a list that holds, afterwards, the variables that were put back."""
    written: list[Any] = []
    states = [v for layer in model._flatten_layers() for v in tf.nest.flatten(getattr(layer, "states", None) or [])
              if isinstance(v, keras.Variable)]  # of a stateful RNN, which Keras counts among no variables
    kept = [(v, tf.identity(v.value)) for v in (*model.variables, *states)]  # copied where one is written to
    random, drawn = rng.capture(), _eager_state()
    try:
        yield written
    finally:
        rng.restore(random)
        _load_eager_state(drawn)
        model._clear_losses()
        for variable, value in kept:
            if not bool(tf.reduce_all(tf.equal(variable.value, value))):
                variable.assign(value)
                written.append(variable)


def _eager_state() -> Any:
    """Where TensorFlow takes the seeds of eager operations from; None where it offers no way to it."""
    from tensorflow.python.eager import context

    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def _load_eager_state(drawn: Any) -> None:
    """Undo `_eager_state`. Kernels that were made meanwhile keep a count of draws, and are dropped."""
    from tensorflow.python.eager import context

    if drawn is not None:
        context.context()._rng.setstate(drawn)
        context.context().clear_kernel_cache()
