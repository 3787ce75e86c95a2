"""A small residual network for 32x32 images, channels last; twin of `tf_models/resnet.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

The form that K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2, give for
CIFAR-10: a 3x3 stem, three stages of equal blocks whose widths double and whose images halve, the mean over the
image, one linear map. Shortcuts have no weights (their option A).

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
STAGES = 3


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
    """Channels to torch's place, 3x3 convolution, norm, ReLU: (B, H, W[, C]) -> (B, width, H, W)."""

    def __init__(self, shape_HWC: tuple[int, int, int], width: int, norm: str):
        super().__init__()
        self.shape_HWC = shape_HWC
        self.conv = conv3x3(shape_HWC[2], width)
        self.norm = normed(norm, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        H, W, C = self.shape_HWC
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        x = x.reshape(x.shape[0], H, W, C).permute(0, 3, 1, 2)
        return torch.relu(self.norm(self.conv(x)))


class Block(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))): (B, C, H, W) -> (B, width, ceil(H / stride), ceil(W / stride)).

    Where the shape changes, the shortcut takes every `stride`-th pixel and adds channels of zeros.
    """

    def __init__(self, in_channels: int, width: int, stride: int, norm: str):
        super().__init__()
        self.stride, self.added = stride, width - in_channels
        self.conv_1 = conv3x3(in_channels, width, stride)
        self.norm_1 = normed(norm, width)
        self.conv_2 = conv3x3(width, width)
        self.norm_2 = normed(norm, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        if self.stride > 1 or self.added:
            x = nn.functional.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, 0, self.added))
        return torch.relu(x + y)


class Head(nn.Module):
    """Mean over the image, then one linear map: (B, C, H, W) -> (B, classes)."""

    def __init__(self, in_features: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(in_features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean((2, 3)))


def conv3x3(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution without a bias, one pixel of zeros around the image, weights as He et al. 2015 draw them."""
    conv = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


def normed(norm: str, channels: int) -> nn.Module:
    """The norm of this name over `channels`."""
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


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: stem, stage_0_0, ..., head."""
    return list(model.named_children())


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 32, 32, 3) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
