"""A multi-layer perceptron for flat or flattened samples; twin of `torch_models/mlp.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.
"""
from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import keras
import numpy as np
from keras import ops

from tf_models import counts, is_count, require

ACTIVATIONS = {"relu": ops.relu, "tanh": ops.tanh, "silu": ops.silu,
               "gelu": partial(ops.gelu, approximate=True)}


@keras.saving.register_keras_serializable(package="tf_models")
class MLP(keras.Model):
    """A chain of named blocks; x (B, ...) with `in_features` values a sample -> logits (B, classes)."""

    def __init__(self, in_features: int, hidden: Sequence[int], classes: int, activation: str, **kwargs: Any):
        super().__init__(**{"name": "mlp", **kwargs})
        self.settings = {"in_features": in_features, "hidden": list(hidden), "classes": classes,
                         "activation": activation}
        widths = [in_features, *hidden]
        self.chain = [Dense(*sizes, ACTIVATIONS[activation], name=f"dense_{index}")
                      for index, sizes in enumerate(zip(widths, widths[1:]))]
        self.chain.append(Dense(widths[-1], classes, name="head"))
        self(keras.Input((in_features,)))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Dense(keras.layers.Layer):
    """Flatten, one linear map, one activation: x (B, ...) -> (B, width)."""

    def __init__(self, in_features: int, width: int, activation=None, **kwargs: Any):
        super().__init__(**kwargs)
        self.in_features = in_features
        self.linear = keras.layers.Dense(width, name="linear")
        self.activation = activation or (lambda x: x)

    def build(self, input_shape) -> None:
        self.linear.build((None, self.in_features))

    def call(self, x):
        # The batch is given by its size: -1 would be ambiguous for an empty one.
        return self.activation(self.linear(ops.reshape(x, (ops.shape(x)[0], self.in_features))))


def build(*, in_features: int = 64, hidden: Sequence[int] = (128, 128), classes: int = 10,
          activation: str = "relu") -> MLP:
    """Build the perceptron with Keras' default initialisation (fixed by `keras.utils.set_random_seed`).

    in_features: values per sample, after flattening.
    hidden: units of each hidden layer.
    classes: number of logits.
    activation: relu, tanh, silu or gelu (tanh form).
    Raises ValueError for a size below 1 or an unknown activation.
    """
    require(is_count(in_features), "in_features", in_features, "a whole number of at least 1")
    require(is_count(classes), "classes", classes, "a whole number of at least 1")
    require(activation in ACTIVATIONS, "activation", activation, f"one of {', '.join(ACTIVATIONS)}")
    return MLP(in_features, counts("hidden", hidden), classes, activation)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: dense_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 64) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 64), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
