"""The perceptron of two layers that is cut over two devices, 784 -> 512 | 10; twin of `torch_models/device_split.py`.

Owns: the layers, their names, and a demonstration by hand (`python -m tf_models.device_split`, also under mpirun) that
trains it on two GPUs, or on two logical devices of the CPU, and shows where each variable is. Does not own: the loss,
the optimizer, anything distributed: `--model_parallel 2` cuts it, as it cuts any model of named blocks.
"""
from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_models import is_count, require


@keras.saving.register_keras_serializable(package="tf_models")
class DeviceSplit(keras.Model):
    """A chain of two named blocks; x (B, ...) with `in_features` values a sample -> logits (B, classes)."""

    def __init__(self, in_features: int, hidden: int, classes: int, **kwargs: Any):
        super().__init__(**{"name": "device_split", **kwargs})
        self.settings = {"in_features": in_features, "hidden": hidden, "classes": classes}
        self.first = Rectified(in_features, hidden, name="first")
        self.second = keras.layers.Dense(classes, name="second")
        self(keras.Input((in_features,)))  # creates the variables, without running anything

    def call(self, x, training=None):
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Rectified(keras.layers.Dense):
    """Flatten, one linear map, ReLU: x (B, ...) -> (B, hidden)."""

    def __init__(self, in_features: int, hidden: int, **kwargs: Any):
        super().__init__(hidden, activation="relu", **kwargs)
        self.in_features = in_features

    def build(self, input_shape) -> None:
        super().build((None, self.in_features))
        self.input_spec = None  # images are welcome: they are flattened first

    def call(self, x, training=None):
        return super().call(ops.reshape(x, (ops.shape(x)[0], self.in_features)))


def build(*, in_features: int = 784, hidden: int = 512, classes: int = 10) -> DeviceSplit:
    """Build the perceptron with Keras' default initialisation (fixed by `keras.utils.set_random_seed`).

    in_features: values per sample, after flattening.
    hidden: units of the hidden layer.
    classes: number of logits.
    Raises ValueError for a size below 1.
    """
    for name, value in {"in_features": in_features, "hidden": hidden, "classes": classes}.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    return DeviceSplit(in_features, hidden, classes)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: first, second."""
    return [("first", model.first), ("second", model.second)]


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 784) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 784), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)


def digits_like(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n noisy copies of ten blurred shapes: x (n, 28, 28) float32 in [0, 1], y (n,) int64."""
    shapes = np.kron(np.random.default_rng(0).random((10, 7, 7)), np.ones((4, 4)))
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, n)
    return np.clip(shapes[y] + 0.5 * rng.standard_normal((n, 28, 28)), 0, 1).astype(np.float32), y


def main() -> None:
    """Train for three epochs and show every variable's device."""
    from hvdtrain import Config, Trainer

    trainer = Trainer(Config(model="tf_models.device_split:build", model_parallel=2, epochs=3))
    trainer.fit(data=(digits_like(2048), digits_like(512, seed=1)))
    if trainer.run.control.rank == 0:
        for variable in trainer.run.spec.model.weights:
            print(variable.path, tuple(variable.shape), "on", variable.value.device.rpartition("device:")[2])


if __name__ == "__main__":
    main()
