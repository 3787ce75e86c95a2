"""A small convolutional classifier for images, channels last; twin of `torch_models/cnn.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

The norm decides whether a run is independent of the number of ranks: "group" and "none" look at one sample at
a time; "batch" looks at the samples of one micro-batch of one rank.
"""
from __future__ import annotations

from math import gcd
from typing import Any, Sequence

import keras
import numpy as np
from keras import ops

from tf_models import counts, is_count, require

NORMS = ("group", "batch", "none")
EPSILON = 1e-5  # added to the variance in both twins
GROUPS = 8      # at most; fewer where the channels are not a multiple of it


@keras.saving.register_keras_serializable(package="tf_models")
class CNN(keras.Model):
    """A chain of named blocks; x (B, H, W) or (B, H, W, C) -> logits (B, classes)."""

    def __init__(self, in_shape: Sequence[int], channels: Sequence[int], classes: int, norm: str,
                 **kwargs: Any):
        super().__init__(**{"name": "cnn", **kwargs})
        self.settings = {"in_shape": list(in_shape), "channels": list(channels), "classes": classes,
                         "norm": norm}
        self.chain = [Conv(width, norm, in_shape if index == 0 else None, name=f"conv_{index}")
                      for index, width in enumerate(channels)]
        self.chain.append(Head(classes, name="head"))
        self(keras.Input(tuple(in_shape)))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Conv(keras.layers.Layer):
    """3x3 convolution, norm, ReLU, 2x2 max pooling: (B, H, W, C) -> (B, H // 2, W // 2, channels)."""

    def __init__(self, channels: int, norm: str, entry_shape: Sequence[int] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.shape_HWC = entry_shape and (*entry_shape, 1)[:3]
        self.conv = keras.layers.Conv2D(channels, 3, padding="same", use_bias=norm == "none", name="conv")
        layers, named = keras.layers, {"name": "norm", "epsilon": EPSILON}
        self.norm = {"group": lambda: layers.GroupNormalization(gcd(GROUPS, channels), **named),
                     "batch": lambda: layers.BatchNormalization(momentum=0.9, **named),
                     "none": lambda: layers.Identity(name="norm")}[norm]()

    def build(self, input_shape) -> None:
        shape_HWC = self.shape_HWC or input_shape[1:]
        self.conv.build((None, *shape_HWC))
        self.norm.build(self.conv.compute_output_shape((None, *shape_HWC)))

    def call(self, x):
        x = self.norm(self.conv(self.with_channels(x)))
        return ops.max_pool(ops.relu(x), 2, strides=2, padding="valid")

    def with_channels(self, x):
        """In the first block give x (B, H, W) its channel axis; raise ValueError for another shape."""
        if self.shape_HWC is None:
            return x
        H, W, C = self.shape_HWC
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        return ops.reshape(x, (ops.shape(x)[0], H, W, C))


class Head(keras.layers.Layer):
    """Flatten in channels-last order, then one linear map."""

    def __init__(self, classes: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.linear = keras.layers.Dense(classes, name="linear")

    def build(self, input_shape) -> None:
        self.in_features = int(np.prod(input_shape[1:]))
        self.linear.build((None, self.in_features))

    def call(self, x):
        return self.linear(ops.reshape(x, (ops.shape(x)[0], self.in_features)))


def build(*, in_shape: Sequence[int] = (8, 8), channels: Sequence[int] = (32, 64), classes: int = 10,
          norm: str = "group") -> CNN:
    """Build the classifier with Keras' default initialisation (fixed by `keras.utils.set_random_seed`).

    in_shape: one sample, (H, W) or (H, W, C), in pixels; every block halves H and W, rounding down.
    channels: output channels of each convolution block.
    classes: number of logits.
    norm: "group" (8 groups, or their largest common divisor with the channels), "batch" or "none".
    Raises ValueError for a size below 1, an image too small for the blocks, or an unknown norm.
    """
    H, W = counts("in_shape", in_shape, (2, 3))[:2]
    channels = counts("channels", channels)
    shrink = 2 ** len(channels)
    require(min(H, W) >= shrink, "in_shape", in_shape,
            f"at least {shrink} pixels a side for {len(channels)} blocks")
    require(is_count(classes), "classes", classes, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    return CNN(tuple(in_shape), channels, classes, norm)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: conv_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 8, 8) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 8, 8), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
