"""Residual networks for images, channels last; twin of `torch_models/resnet.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

`build`: the form that K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2, give for
CIFAR-10: a 3x3 stem, three stages of equal blocks whose widths double and whose images halve, the mean over the
image, one linear map. Shortcuts have no weights (their option A).
`resnet18` to `resnet152`: their table 1, with a 1x1 convolution as shortcut where shapes change (option B), and the
stride of a bottleneck in its 3x3 convolution, as has become usual. `wide_resnet`: S. Zagoruyko, N. Komodakis, "Wide
Residual Networks", BMVC 2016, whose blocks begin with their norms.

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
STAGES = 3      # of the small networks
STEMS = ("auto", "imagenet", "small")
LARGE = 64      # pixels from which an image gets ImageNet's stem


class Chain(keras.Model):
    """A chain of named blocks; x (B, H, W) or (B, H, W, C) -> logits (B, classes)."""

    def __init__(self, chain: Sequence[keras.layers.Layer], settings: dict[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.settings = {**settings, "in_shape": list(settings["in_shape"])}
        self.chain = list(chain)
        self(keras.Input(tuple(settings["in_shape"])))  # creates the variables, without running anything

    def call(self, x, training=None):  # Keras hands `training` on to the blocks
        for _, block in blocks(self):
            x = block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


@keras.saving.register_keras_serializable(package="tf_models")
class ResNet(Chain):
    """The small network of `build`."""

    def __init__(self, in_shape: Sequence[int], width: int, depth: int, classes: int, norm: str, **kwargs: Any):
        chain = [Stem((*in_shape, 1)[:3], width, norm, name="stem")]
        for stage in range(STAGES):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                chain.append(Block(width * 2**stage, stride, norm, name=f"stage_{stage}_{index}"))
        settings = {"in_shape": in_shape, "width": width, "depth": depth, "classes": classes, "norm": norm}
        super().__init__([*chain, Head(classes, name="head")], settings, **{"name": "resnet", **kwargs})


@keras.saving.register_keras_serializable(package="tf_models")
class Deep(Chain):
    """A network of `deep`."""

    def __init__(self, kind: str, depths: Sequence[int], in_shape: Sequence[int], classes: int, norm: str, stem: str,
                 **kwargs: Any):
        chain = [Stem((*in_shape, 1)[:3], 64, norm, stem, name="stem")]
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            convs = [(width, 3)] * 2 if kind == "plain" else [(width, 1), (width, 3), (4 * width, 1)]
            chain += [Projected(convs, 2 if stage > 0 and index == 0 else 1, norm, name=f"stage_{stage}_{index}")
                      for index in range(depth)]
        settings = {"kind": kind, "depths": list(depths), "in_shape": in_shape, "classes": classes, "norm": norm,
                    "stem": stem}
        super().__init__([*chain, Head(classes, name="head")], settings, **{"name": "resnet", **kwargs})


@keras.saving.register_keras_serializable(package="tf_models")
class WideResNet(Chain):
    """The network of `wide_resnet`."""

    def __init__(self, depth: int, widen: int, in_shape: Sequence[int], classes: int, norm: str, dropout: float,
                 **kwargs: Any):
        chain = [Stem((*in_shape, 1)[:3], 16, norm, "bare", name="stem")]
        for stage in range(STAGES):
            chain += [Wide(16 * widen * 2**stage, 2 if stage > 0 and index == 0 else 1, norm, dropout,
                           name=f"stage_{stage}_{index}") for index in range((depth - 4) // 6)]
        settings = {"depth": depth, "widen": widen, "in_shape": in_shape, "classes": classes, "norm": norm,
                    "dropout": dropout}
        super().__init__([*chain, Head(classes, norm, name="head")], settings, **{"name": "wide_resnet", **kwargs})


class Stem(keras.layers.Layer):
    """3x3 convolution, norm, ReLU: (B, H, W[, C]) -> (B, H, W, width).

    ``kind``: "imagenet" has a 7x7 convolution of stride 2 and a 3x3 maximum of stride 2 behind the ReLU, "bare" the
    convolution alone.
    """

    def __init__(self, shape_HWC: Sequence[int], width: int, norm: str, kind: str = "small", **kwargs: Any):
        super().__init__(**kwargs)
        self.shape_HWC = tuple(shape_HWC)
        self.conv = Conv(width, 7, 2, name="conv") if kind == "imagenet" else Conv(width, 3, name="conv")
        self.norm = normed(norm, width, name="norm") if kind != "bare" else None
        self.pool = keras.layers.MaxPooling2D(3, 2, name="pool") if kind == "imagenet" else None

    def build(self, input_shape) -> None:
        self.conv.build((None, *self.shape_HWC))
        if self.norm is not None:
            self.norm.build(self.conv.compute_output_shape((None, *self.shape_HWC)))

    def call(self, x):
        H, W, C = self.shape_HWC
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        x = self.conv(ops.reshape(x, (ops.shape(x)[0], H, W, C)))
        if self.norm is not None:
            x = ops.relu(self.norm(x))
        # Zeros around the image are no maximum but of zeros: nothing is below them here.
        return x if self.pool is None else self.pool(around(x, 1))


class Block(keras.layers.Layer):
    """relu(x + norm(conv(relu(norm(conv(x)))))): (B, H, W, C) -> (B, ceil(H / stride), ceil(W / stride), width).

    Where the shape changes, the shortcut takes every `stride`-th pixel and adds channels of zeros.
    """

    def __init__(self, width: int, stride: int, norm: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.stride, self.added = width, stride, 0
        self.conv_1 = Conv(width, 3, stride, name="conv_1")
        self.norm_1 = normed(norm, width, name="norm_1")
        self.conv_2 = Conv(width, 3, name="conv_2")
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


class Projected(keras.layers.Layer):
    """relu(shortcut(x) + y), y by convolutions with their norms: (B, H, W, C) -> (B, H / stride, W / stride, out).

    ``convs``: (channels, size) of each; the first 3x3 one has the stride. The shortcut is a 1x1 convolution and a norm
    where the shape changes. Sizes round up.
    """

    def __init__(self, convs: Sequence[tuple[int, int]], stride: int, norm: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.stride, self.out, self.norm_name = stride, convs[-1][0], norm
        strided = [size for _, size in convs].index(3)
        self.convs = [Conv(width, size, stride if i == strided else 1, name=f"conv_{i + 1}")
                      for i, (width, size) in enumerate(convs)]
        self.norms = [normed(norm, width, name=f"norm_{i + 1}") for i, (width, _) in enumerate(convs)]
        self.conv_shortcut = self.norm_shortcut = None

    def build(self, input_shape) -> None:
        if self.stride > 1 or input_shape[-1] != self.out:
            self.conv_shortcut = Conv(self.out, 1, self.stride, name="conv_shortcut")
            self.norm_shortcut = normed(self.norm_name, self.out, name="norm_shortcut")
            self.conv_shortcut.build(input_shape)
            self.norm_shortcut.build(self.conv_shortcut.compute_output_shape(input_shape))
        for conv, norm in zip(self.convs, self.norms):
            conv.build(input_shape)
            input_shape = conv.compute_output_shape(input_shape)
            norm.build(input_shape)

    def call(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(y))
            y = ops.relu(y) if i + 1 < len(self.convs) else y
        if self.conv_shortcut is not None:
            x = self.norm_shortcut(self.conv_shortcut(x))
        return ops.relu(x + y)


class Wide(keras.layers.Layer):
    """shortcut(x) + conv(drop(relu(norm(conv(relu(norm(x))))))): (B, H, W, C) -> (B, H / stride, W / stride, width).

    Where the shape changes, the shortcut is a 1x1 convolution of relu(norm(x)).
    """

    def __init__(self, width: int, stride: int, norm: str, dropout: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.stride, self.norm_name = width, stride, norm
        self.norm_1 = self.conv_shortcut = None
        self.conv_1 = Conv(width, 3, stride, name="conv_1")
        self.norm_2 = normed(norm, width, name="norm_2")
        self.dropout = keras.layers.Dropout(dropout)
        self.conv_2 = Conv(width, 3, name="conv_2")

    def build(self, input_shape) -> None:
        self.norm_1 = normed(self.norm_name, input_shape[-1], name="norm_1")
        self.norm_1.build(input_shape)
        self.conv_1.build(input_shape)
        shape = self.conv_1.compute_output_shape(input_shape)
        self.norm_2.build(shape)
        self.conv_2.build(shape)
        if self.stride > 1 or input_shape[-1] != self.width:
            self.conv_shortcut = Conv(self.width, 1, self.stride, name="conv_shortcut")
            self.conv_shortcut.build(input_shape)

    def call(self, x):
        active = ops.relu(self.norm_1(x))
        y = self.conv_2(self.dropout(ops.relu(self.norm_2(self.conv_1(active)))))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(active))


class Head(keras.layers.Layer):
    """Mean over the image, then one linear map: (B, H, W, C) -> (B, classes); before it norm and ReLU, if ``norm``."""

    def __init__(self, classes: int, norm: str = "", **kwargs: Any):
        super().__init__(**kwargs)
        self.norm_name, self.norm = norm, None
        self.linear = keras.layers.Dense(classes, name="linear")

    def build(self, input_shape) -> None:
        if self.norm_name:
            self.norm = normed(self.norm_name, input_shape[-1], name="norm")
            self.norm.build(input_shape)
        self.linear.build((None, input_shape[-1]))

    def call(self, x):
        x = x if self.norm is None else ops.relu(self.norm(x))
        return self.linear(ops.mean(x, axis=(1, 2)))


class Conv(keras.layers.Conv2D):
    """A convolution without a bias, zeros around the image, weights as He et al. 2015 draw them.

    The zeros are added here: with a stride of 2, TensorFlow's "same" would add them at two sides only.
    """

    def __init__(self, channels: int, size: int, stride: int = 1, **kwargs: Any):
        draw = keras.initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal")
        padding = "same" if stride == 1 else "valid"
        super().__init__(channels, size, stride, padding=padding, use_bias=False, kernel_initializer=draw, **kwargs)
        self.zeros = size // 2 if stride > 1 else 0

    def compute_output_shape(self, input_shape):
        B, H, W, C = input_shape
        return super().compute_output_shape((B, H + 2 * self.zeros, W + 2 * self.zeros, C))

    def call(self, x):
        return super().call(around(x, self.zeros) if self.zeros else x)


def around(x, zeros: int):
    """Images (B, H, W, C) with so many pixels of zeros on each side."""
    return ops.pad(x, ((0, 0), (zeros, zeros), (zeros, zeros), (0, 0)))


def normed(norm: str, channels: int, name: str) -> keras.layers.Layer:
    """Return the norm of this name over `channels`."""
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


def deep(kind: str, depths: Sequence[int], in_shape: Sequence[int], classes: int, norm: str, stem: str) -> Chain:
    """Build a network of He et al.'s table 1; see `resnet18`.

    kind: "plain" (two 3x3 convolutions a block) or "bottleneck" (1x1, 3x3, 1x1 of four times the channels).
    depths: blocks of each of the four stages.
    """
    in_shape = counts("in_shape", in_shape, (2, 3))
    require(is_count(classes), "classes", classes, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    require(stem in STEMS, "stem", stem, f"one of {', '.join(STEMS)}")
    if stem == "auto":
        stem = "imagenet" if min(in_shape[:2]) >= LARGE else "small"
    return Deep(kind, depths, in_shape, classes, norm, stem)


def resnet18(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
             stem: str = "auto") -> Chain:
    """Build ResNet-18: 11,689,512 parameters for 1000 classes.

    in_shape: one sample, (H, W) or (H, W, C), in pixels.
    classes: number of logits.
    norm: "batch" or "group" (independent of the number of ranks).
    stem: "imagenet" (a quarter of H and W), "small" (a 3x3 convolution), or "auto": imagenet from 64 pixels on.
    Raises ValueError for a size below 1, an unknown norm or stem.
    """
    return deep("plain", (2, 2, 2, 2), in_shape, classes, norm, stem)


def resnet34(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
             stem: str = "auto") -> Chain:
    """Build ResNet-34: 21,797,672 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("plain", (3, 4, 6, 3), in_shape, classes, norm, stem)


def resnet50(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
             stem: str = "auto") -> Chain:
    """Build ResNet-50: 25,557,032 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("bottleneck", (3, 4, 6, 3), in_shape, classes, norm, stem)


def resnet101(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
              stem: str = "auto") -> Chain:
    """Build ResNet-101: 44,549,160 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("bottleneck", (3, 4, 23, 3), in_shape, classes, norm, stem)


def resnet152(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
              stem: str = "auto") -> Chain:
    """Build ResNet-152: 60,192,808 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("bottleneck", (3, 8, 36, 3), in_shape, classes, norm, stem)


def wide_resnet(*, depth: int = 28, widen: int = 10, in_shape: Sequence[int] = (32, 32, 3), classes: int = 100,
                norm: str = "batch", dropout: float = 0.0) -> Chain:
    """Build WideResNet-depth-widen for small images: 28-10 has 36,536,884 parameters for 100 classes.

    depth: layers with weights, 6 n + 4.
    widen: times 16, 32 and 64 channels in the three stages.
    dropout: share of values dropped between the convolutions of a block, 0 <= dropout < 1. Above 0 a run depends on
        the number of ranks.
    in_shape, classes, norm: as of `resnet18`.
    Raises ValueError for a depth that is not 6 n + 4, a size below 1, an unknown norm, or a dropout outside its range.
    """
    in_shape = counts("in_shape", in_shape, (2, 3))
    require(is_count(depth) and depth >= 10 and depth % 6 == 4, "depth", depth, "6 n + 4, such as 16, 28 or 40")
    for name, value in (("widen", widen), ("classes", classes)):
        require(is_count(value), name, value, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    return WideResNet(depth, widen, in_shape, classes, norm, dropout)


def blocks(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the blocks in the order of the forward pass, each with its name: stem, stage_0_0, ..., head."""
    return [(block.name, block) for block in model.chain]


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 32, 32, 3) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
