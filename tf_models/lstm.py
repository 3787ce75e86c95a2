"""A stack of LSTM layers over feature sequences, classified by the last state; twin of `torch_models/lstm.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

Each layer is one map of the inputs and one of the state before, with one bias between them; gates lie as input,
forget, cell, output (Hochreiter and Schmidhuber 1997).
"""
from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_models import is_count, require


@keras.saving.register_keras_serializable(package="tf_models")
class LSTM(keras.Model):
    """A chain of named blocks; x (B, T, features) -> logits (B, classes)."""

    def __init__(self, features: int, width: int, depth: int, classes: int, **kwargs: Any):
        super().__init__(**{"name": "lstm", **kwargs})
        self.settings = {"features": features, "width": width, "depth": depth, "classes": classes}
        self.chain = [Layer(features if index == 0 else width, width, name=f"lstm_{index}") for index in range(depth)]
        self.chain.append(Head(width, classes, name="head"))
        self(keras.Input((8, features)))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Layer(keras.layers.Layer):
    """An LSTM over time, from a state of zeros: (B, T, features) -> (B, T, width)."""

    def __init__(self, features: int, width: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.features, self.width = features, width
        self.inputs = keras.layers.Dense(4 * width, name="inputs")
        self.state = keras.layers.Dense(4 * width, use_bias=False, name="state")

    def build(self, input_shape) -> None:
        self.inputs.build((None, None, self.features))
        self.state.build((None, self.width))

    def call(self, x):
        mapped = self.inputs(x)
        h = c = ops.zeros((ops.shape(x)[0], self.width), mapped.dtype)
        found = []
        for at_t in ops.unstack(mapped, x.shape[1], axis=1):
            i, f, g, o = ops.split(at_t + self.state(h), 4, axis=1)
            c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
            h = ops.sigmoid(o) * ops.tanh(c)
            found.append(h)
        return ops.stack(found, axis=1)


class Head(keras.layers.Layer):
    """The last state, then one linear map: (B, T, width) -> (B, classes)."""

    def __init__(self, width: int, classes: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.width = width
        self.linear = keras.layers.Dense(classes, name="linear")

    def build(self, input_shape) -> None:
        self.linear.build((None, self.width))

    def call(self, x):
        return self.linear(x[:, -1])


def build(*, features: int = 8, width: int = 64, depth: int = 2, classes: int = 10) -> LSTM:
    """Build the stack with Keras' default initialisation (fixed by `keras.utils.set_random_seed`).

    features: values of one moment. width: cells of each layer. depth: layers. classes: number of logits.
    Raises ValueError for a size below 1.
    """
    for name, value in (("features", features), ("width", width), ("depth", depth), ("classes", classes)):
        require(is_count(value), name, value, "a whole number of at least 1")
    return LSTM(features, width, depth, classes)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: lstm_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 8, 8) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 8, 8), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
