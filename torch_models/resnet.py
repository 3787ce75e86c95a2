"""Residual networks for images, channels last; twin of `tf_models/resnet.py`.

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

from collections import OrderedDict
from math import gcd
from typing import Sequence

import numpy as np
import torch
from torch import nn

from torch_models import counts, is_count, require

NORMS = ("group", "batch")
EPSILON = 1e-5  # added to the variance in both twins
GROUPS = 8      # at most; fewer where the channels are not a multiple of it
STAGES = 3      # of the small networks
STEMS = ("auto", "imagenet", "small")
LARGE = 64      # pixels from which an image gets ImageNet's stem


class ResNet(nn.Module):
    """A chain of named blocks; x (B, H, W) or (B, H, W, C) -> logits (B, classes)."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in blocks(self):
            x = block(x)
        return x


class Stem(nn.Module):
    """Channels to torch's place, 3x3 convolution, norm, ReLU: (B, H, W[, C]) -> (B, width, H, W).

    ``kind``: "imagenet" has a 7x7 convolution of stride 2 and a 3x3 maximum of stride 2 behind the ReLU, "bare" the
    convolution alone.
    """

    def __init__(self, shape_HWC: tuple[int, int, int], width: int, norm: str, kind: str = "small"):
        super().__init__()
        self.shape_HWC = shape_HWC
        self.conv = conv(shape_HWC[2], width, 7, 2) if kind == "imagenet" else conv(shape_HWC[2], width, 3)
        self.norm = normed(norm, width) if kind != "bare" else None
        self.pool = nn.MaxPool2d(3, 2, padding=1) if kind == "imagenet" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        H, W, C = self.shape_HWC
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        x = self.conv(x.reshape(x.shape[0], H, W, C).permute(0, 3, 1, 2))
        if self.norm is not None:
            x = torch.relu(self.norm(x))
        return x if self.pool is None else self.pool(x)


class Block(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))): (B, C, H, W) -> (B, width, ceil(H / stride), ceil(W / stride)).

    Where the shape changes, the shortcut takes every `stride`-th pixel and adds channels of zeros.
    """

    def __init__(self, in_channels: int, width: int, stride: int, norm: str):
        super().__init__()
        self.stride, self.added = stride, width - in_channels
        self.conv_1 = conv(in_channels, width, 3, stride)
        self.norm_1 = normed(norm, width)
        self.conv_2 = conv(width, width, 3)
        self.norm_2 = normed(norm, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        if self.stride > 1 or self.added:
            x = nn.functional.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, 0, self.added))
        return torch.relu(x + y)


class Projected(nn.Module):
    """relu(shortcut(x) + y), y by convolutions with their norms: (B, C, H, W) -> (B, out, H / stride, W / stride).

    ``convs``: (channels, size) of each; the first 3x3 one has the stride. The shortcut is a 1x1 convolution and a norm
    where the shape changes. Sizes round up.
    """

    def __init__(self, in_channels: int, convs: Sequence[tuple[int, int]], stride: int, norm: str):
        super().__init__()
        self.parts, channels = len(convs), in_channels
        strided = [size for _, size in convs].index(3)
        for i, (width, size) in enumerate(convs):
            self.add_module(f"conv_{i + 1}", conv(channels, width, size, stride if i == strided else 1))
            self.add_module(f"norm_{i + 1}", normed(norm, width))
            channels = width
        changes = stride > 1 or channels != in_channels
        self.conv_shortcut = conv(in_channels, channels, 1, stride) if changes else None
        self.norm_shortcut = normed(norm, channels) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i in range(1, self.parts + 1):
            y = getattr(self, f"norm_{i}")(getattr(self, f"conv_{i}")(y))
            y = torch.relu(y) if i < self.parts else y
        if self.conv_shortcut is not None and self.norm_shortcut is not None:
            x = self.norm_shortcut(self.conv_shortcut(x))
        return torch.relu(x + y)


class Wide(nn.Module):
    """shortcut(x) + conv(drop(relu(norm(conv(relu(norm(x))))))): (B, C, H, W) -> (B, width, H / stride, W / stride).

    Where the shape changes, the shortcut is a 1x1 convolution of relu(norm(x)).
    """

    def __init__(self, in_channels: int, width: int, stride: int, norm: str, dropout: float):
        super().__init__()
        self.norm_1 = normed(norm, in_channels)
        self.conv_1 = conv(in_channels, width, 3, stride)
        self.norm_2 = normed(norm, width)
        self.dropout = nn.Dropout(dropout)
        self.conv_2 = conv(width, width, 3)
        changes = stride > 1 or width != in_channels
        self.conv_shortcut = conv(in_channels, width, 1, stride) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = torch.relu(self.norm_1(x))
        y = self.conv_2(self.dropout(torch.relu(self.norm_2(self.conv_1(active)))))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(active))


class Head(nn.Module):
    """Mean over the image, then one linear map: (B, C, H, W) -> (B, classes); before it norm and ReLU, if ``norm``."""

    def __init__(self, in_features: int, classes: int, norm: str = ""):
        super().__init__()
        self.norm = normed(norm, in_features) if norm else None
        self.linear = nn.Linear(in_features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.norm is None else torch.relu(self.norm(x))
        return self.linear(x.mean((2, 3)))


def conv(in_channels: int, channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without a bias, zeros around the image, weights as He et al. 2015 draw them."""
    made = nn.Conv2d(in_channels, channels, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, nonlinearity="relu")
    return made


def normed(norm: str, channels: int) -> nn.Module:
    """Return the norm of this name over `channels`."""
    if norm == "group":
        return nn.GroupNorm(gcd(GROUPS, channels), channels, eps=EPSILON)
    return nn.BatchNorm2d(channels, eps=EPSILON, momentum=0.1)


def build(*, in_shape: Sequence[int] = (32, 32, 3), width: int = 16, depth: int = 3, classes: int = 10,
          norm: str = "group") -> ResNet:
    """Build the network with normal weights (fixed by `torch.manual_seed`); the linear map has torch's defaults.

    in_shape: one sample, (H, W) or (H, W, C), in pixels; the last two stages halve H and W, rounding up.
    width: channels of the first stage; the second has twice, the third four times as many.
    depth: blocks of each stage, of two convolutions each: 6 * depth + 2 layers with weights.
    classes: number of logits.
    norm: "group" (8 groups, or their largest common divisor with the channels) or "batch".
    Raises ValueError for a size below 1 or an unknown norm.
    """
    H, W, C = (*counts("in_shape", in_shape, (2, 3)), 1)[:3]
    for name, value in (("width", width), ("depth", depth), ("classes", classes)):
        require(is_count(value), name, value, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    named: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem((H, W, C), width, norm))
    channels = width
    for stage in range(STAGES):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            named[f"stage_{stage}_{index}"] = Block(channels, width * 2**stage, stride, norm)
            channels = width * 2**stage
    named["head"] = Head(channels, classes)
    return ResNet(named)


def deep(kind: str, depths: Sequence[int], in_shape: Sequence[int], classes: int, norm: str, stem: str) -> ResNet:
    """Build a network of He et al.'s table 1; see `resnet18`.

    kind: "plain" (two 3x3 convolutions a block) or "bottleneck" (1x1, 3x3, 1x1 of four times the channels).
    depths: blocks of each of the four stages.
    """
    shape_HWC = (*counts("in_shape", in_shape, (2, 3)), 1)[:3]
    require(is_count(classes), "classes", classes, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    require(stem in STEMS, "stem", stem, f"one of {', '.join(STEMS)}")
    if stem == "auto":
        stem = "imagenet" if min(shape_HWC[:2]) >= LARGE else "small"
    named: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(shape_HWC, 64, norm, stem))
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        convs = [(width, 3)] * 2 if kind == "plain" else [(width, 1), (width, 3), (4 * width, 1)]
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            named[f"stage_{stage}_{index}"] = Projected(channels, convs, stride, norm)
            channels = convs[-1][0]
    named["head"] = Head(channels, classes)
    return ResNet(named)


def resnet18(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
             stem: str = "auto") -> ResNet:
    """Build ResNet-18: 11,689,512 parameters for 1000 classes.

    in_shape: one sample, (H, W) or (H, W, C), in pixels.
    classes: number of logits.
    norm: "batch" or "group" (independent of the number of ranks).
    stem: "imagenet" (a quarter of H and W), "small" (a 3x3 convolution), or "auto": imagenet from 64 pixels on.
    Raises ValueError for a size below 1, an unknown norm or stem.
    """
    return deep("plain", (2, 2, 2, 2), in_shape, classes, norm, stem)


def resnet34(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
             stem: str = "auto") -> ResNet:
    """Build ResNet-34: 21,797,672 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("plain", (3, 4, 6, 3), in_shape, classes, norm, stem)


def resnet50(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
             stem: str = "auto") -> ResNet:
    """Build ResNet-50: 25,557,032 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("bottleneck", (3, 4, 6, 3), in_shape, classes, norm, stem)


def resnet101(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
              stem: str = "auto") -> ResNet:
    """Build ResNet-101: 44,549,160 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("bottleneck", (3, 4, 23, 3), in_shape, classes, norm, stem)


def resnet152(*, in_shape: Sequence[int] = (224, 224, 3), classes: int = 1000, norm: str = "batch",
              stem: str = "auto") -> ResNet:
    """Build ResNet-152: 60,192,808 parameters for 1000 classes. Arguments and errors as of `resnet18`."""
    return deep("bottleneck", (3, 8, 36, 3), in_shape, classes, norm, stem)


def wide_resnet(*, depth: int = 28, widen: int = 10, in_shape: Sequence[int] = (32, 32, 3), classes: int = 100,
                norm: str = "batch", dropout: float = 0.0) -> ResNet:
    """Build WideResNet-depth-widen for small images: 28-10 has 36,536,884 parameters for 100 classes.

    depth: layers with weights, 6 n + 4.
    widen: times 16, 32 and 64 channels in the three stages.
    dropout: share of values dropped between the convolutions of a block, 0 <= dropout < 1. Above 0 a run depends on
        the number of ranks.
    in_shape, classes, norm: as of `resnet18`.
    Raises ValueError for a depth that is not 6 n + 4, a size below 1, an unknown norm, or a dropout outside its range.
    """
    shape_HWC = (*counts("in_shape", in_shape, (2, 3)), 1)[:3]
    require(is_count(depth) and depth >= 10 and depth % 6 == 4, "depth", depth, "6 n + 4, such as 16, 28 or 40")
    for name, value in (("widen", widen), ("classes", classes)):
        require(is_count(value), name, value, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    named: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(shape_HWC, 16, norm, "bare"))
    channels = 16
    for stage in range(STAGES):
        width = 16 * widen * 2**stage
        for index in range((depth - 4) // 6):
            named[f"stage_{stage}_{index}"] = Wide(channels, width, 2 if stage > 0 and index == 0 else 1, norm, dropout)
            channels = width
    named["head"] = Head(channels, classes, norm)
    return ResNet(named)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: stem, stage_0_0, ..., head."""
    return list(model.named_children())


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 32, 32, 3) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
