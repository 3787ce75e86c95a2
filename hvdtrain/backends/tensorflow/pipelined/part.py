"""What a rank keeps of a Keras model that is cut over ranks: its own layers as a model, under the names of the whole.

Owns the memory of the other layers, which is given back. The whole model stays as an object that knows how it is put
together (its input, its compiled loss), with variables that hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.pipelined.deferred import forget
from hvdtrain.backends.tensorflow.placement import HOST
from hvdtrain.core.errors import UserError


class Part(keras.Model):
    """A rank's ``layers`` of ``whole``; it has its optimizer's settings, and is not to be called."""

    def __init__(self, whole: keras.Model, layers: Sequence[Any]) -> None:
        super().__init__(name=whole.name)
        object.__setattr__(whole, "call", _refuse_call)
        self.held = list(layers)
        object.__setattr__(self, "whole", whole)  # plainly set, Keras would hold it for a layer of this one
        self.dtype_policy = whole.dtype_policy
        self.built = True

    def call(self, x: Any) -> Any:
        """Refuse: the other ranks have the rest."""
        _refuse_call(x)


def _refuse_call(*given: Any, **named: Any) -> None:
    raise UserError("a call of a model of which this rank of a pipeline has some blocks only", "the whole model",
                    "build the model again and load the weights of the run's folder, or use Trainer.evaluate")


def release(variables: Iterable[keras.Variable]) -> None:
    """Give back the memory of ``variables``, which stay with their names, shapes and types."""
    for variable in variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        forget(variable)
        with tf.init_scope(), tf.device(HOST):
            variable._value = tf.Variable(tf.zeros([0], dtype), shape=tf.TensorShape(None), dtype=dtype,
                                          trainable=variable.trainable, name=variable.name)


def refuse_released(model: keras.Model) -> None:
    """Raise `UserError` for a model that an earlier run has partitioned over ranks: `release` has taken variables."""
    if any(v._value is not None and v._value.shape.rank is None for v in model.weights):
        raise UserError("a model of which an earlier run with a pipeline has left some blocks only on this rank",
                        "the whole model", "build the model again and load the weights of that run's folder")
