"""A small residual network for 32x32 images, channels last; twin of `torch_models/resnet.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

The form that K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2, give for
CIFAR-10: a 3x3 stem, three stages of equal blocks whose widths double and whose images halve, the mean over the
image, one linear map. Shortcuts have no weights (their option A).

The norm decides whether a run is independent of the number of ranks: "group" looks at one sample at a time;
"batch" looks at the samples of one micro-batch of one rank.
"""
from __future__ import annotations

from math import gcd
from typing import Any, Sequence

import keras
import numpy as np
from keras import ops

from tf_models import counts, is_count, require

NORMS = ("group", "batch")
EPSILON = 1e-5  # added to the variance in both twins
GROUPS = 8      # at most; fewer where the channels are not a multiple of it
STAGES = 3


@keras.saving.register_keras_serializable(package="tf_models")
class ResNet(keras.Model):
    """A chain of named blocks; x (B, H, W) or (B, H, W, C) -> logits (B, classes)."""

    def __init__(self, in_shape: Sequence[int], width: int, depth: int, classes: int, norm: str, **kwargs: Any):
        super().__init__(**{"name": "resnet", **kwargs})
        self.settings = {"in_shape": list(in_shape), "width": width, "depth": depth, "classes": classes,
                         "norm": norm}
        self.chain = [Stem((*in_shape, 1)[:3], width, norm, name="stem")]
        for stage in range(STAGES):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                self.chain.append(Block(width * 2**stage, stride, norm, name=f"stage_{stage}_{index}"))
        self.chain.append(Head(classes, name="head"))
        self(keras.Input(tuple(in_shape)))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class Stem(keras.layers.Layer):
    """3x3 convolution, norm, ReLU: (B, H, W[, C]) -> (B, H, W, width)."""

    def __init__(self, shape_HWC: Sequence[int], width: int, norm: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.shape_HWC = tuple(shape_HWC)
        self.conv = Conv3x3(width, name="conv")
        self.norm = normed(norm, width, name="norm")

    def build(self, input_shape) -> None:
        self.conv.build((None, *self.shape_HWC))
        self.norm.build(self.conv.compute_output_shape((None, *self.shape_HWC)))

    def call(self, x):
        H, W, C = self.shape_HWC
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        return ops.relu(self.norm(self.conv(ops.reshape(x, (ops.shape(x)[0], H, W, C)))))


class Block(keras.layers.Layer):
    """relu(x + norm(conv(relu(norm(conv(x)))))): (B, H, W, C) -> (B, ceil(H / stride), ceil(W / stride), width).

    Where the shape changes, the shortcut takes every `stride`-th pixel and adds channels of zeros.
    """

    def __init__(self, width: int, stride: int, norm: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.stride, self.added = width, stride, 0
        self.conv_1 = Conv3x3(width, stride, name="conv_1")
        self.norm_1 = normed(norm, width, name="norm_1")
        self.conv_2 = Conv3x3(width, name="conv_2")
        self.norm_2 = normed(norm, width, name="norm_2")

    def build(self, input_shape) -> None:
        self.added = self.width - input_shape[-1]
        self.conv_1.build(input_shape)
        shape = self.conv_1.compute_output_shape(input_shape)
        for layer in (self.norm_1, self.conv_2, self.norm_2):
            layer.build(shape)

    def call(self, x):
        y = ops.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        if self.stride > 1 or self.added:
            x = ops.pad(x[:, ::self.stride, ::self.stride], ((0, 0), (0, 0), (0, 0), (0, self.added)))
        return ops.relu(x + y)


class Head(keras.layers.Layer):
    """Mean over the image, then one linear map: (B, H, W, C) -> (B, classes)."""

    def __init__(self, classes: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.linear = keras.layers.Dense(classes, name="linear")

    def build(self, input_shape) -> None:
        self.linear.build((None, input_shape[-1]))

    def call(self, x):
        return self.linear(ops.mean(x, axis=(1, 2)))


class Conv3x3(keras.layers.Conv2D):
    """A 3x3 convolution without a bias, one pixel of zeros around the image, weights as He et al. 2015 draw them.

    The zeros are added here: with a stride of 2, TensorFlow's "same" would add them at two sides only.
    """

    def __init__(self, channels: int, stride: int = 1, **kwargs: Any):
        draw = keras.initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal")
        padding = "same" if stride == 1 else "valid"
        super().__init__(channels, 3, stride, padding=padding, use_bias=False, kernel_initializer=draw, **kwargs)
        self.zeros = int(stride > 1)

    def compute_output_shape(self, input_shape):
        B, H, W, C = input_shape
        return super().compute_output_shape((B, H + 2 * self.zeros, W + 2 * self.zeros, C))

    def call(self, x):
        return super().call(ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))) if self.zeros else x)


def normed(norm: str, channels: int, name: str) -> keras.layers.Layer:
    """The norm of this name over `channels`."""
    if norm == "group":
        return keras.layers.GroupNormalization(gcd(GROUPS, channels), epsilon=EPSILON, name=name)
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=EPSILON, name=name)


def build(*, in_shape: Sequence[int] = (32, 32, 3), width: int = 16, depth: int = 3, classes: int = 10,
          norm: str = "group") -> ResNet:
    """Build the network with normal weights (fixed by `keras.utils.set_random_seed`); the linear map has Keras'
    defaults.

    in_shape: one sample, (H, W) or (H, W, C), in pixels; the last two stages halve H and W, rounding up.
    width: channels of the first stage; the second has twice, the third four times as many.
    depth: blocks of each stage, of two convolutions each: 6 * depth + 2 layers with weights.
    classes: number of logits.
    norm: "group" (8 groups, or their largest common divisor with the channels) or "batch".
    Raises ValueError for a size below 1 or an unknown norm.
    """
    in_shape = counts("in_shape", in_shape, (2, 3))
    for name, value in (("width", width), ("depth", depth), ("classes", classes)):
        require(is_count(value), name, value, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    return ResNet(in_shape, width, depth, classes, norm)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: stem, stage_0_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 32, 32, 3) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
