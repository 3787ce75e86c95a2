"""A small convolutional classifier for images, channels last; twin of `tf_models/cnn.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

The norm decides whether a run is independent of the number of ranks: "group" and "none" look at one sample at
a time; "batch" looks at the samples of one micro-batch of one rank.
"""
from __future__ import annotations

from collections import OrderedDict
from math import gcd
from typing import Sequence

import numpy as np
import torch
from torch import nn

from torch_models import counts, is_count, require

NORMS = ("group", "batch", "none")
EPSILON = 1e-5  # added to the variance in both twins
GROUPS = 8      # at most; fewer where the channels are not a multiple of it


class CNN(nn.Module):
    """A chain of named blocks; x (B, H, W) or (B, H, W, C) -> logits (B, classes)."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in blocks(self):
            x = block(x)
        return x


class Entry(nn.Module):
    """Turn x (B, H, W) or (B, H, W, C) into torch's (B, C, H, W)."""

    def __init__(self, shape_HWC: tuple[int, int, int]):
        super().__init__()
        self.shape_HWC = shape_HWC

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        H, W, C = self.shape_HWC
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        return x.reshape(x.shape[0], H, W, C).permute(0, 3, 1, 2)


class Conv(nn.Module):
    """3x3 convolution, norm, ReLU, 2x2 max pooling: (B, C, H, W) -> (B, channels, H // 2, W // 2)."""

    def __init__(self, in_channels: int, channels: int, norm: str, entry: nn.Module):
        super().__init__()
        self.entry = entry
        self.conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=norm == "none")
        self.norm = {"group": lambda: nn.GroupNorm(gcd(GROUPS, channels), channels, eps=EPSILON),
                     "batch": lambda: nn.BatchNorm2d(channels, eps=EPSILON, momentum=0.1),
                     "none": nn.Identity}[norm]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(self.norm(self.conv(self.entry(x)))), 2)


class Head(nn.Module):
    """Flatten in channels-last order, so that the weights are the twin's transposed, then one linear map."""

    def __init__(self, in_features: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(in_features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.permute(0, 2, 3, 1).flatten(1))


def build(*, in_shape: Sequence[int] = (8, 8), channels: Sequence[int] = (32, 64), classes: int = 10,
          norm: str = "group") -> CNN:
    """Build the classifier with torch's default initialisation (fixed by `torch.manual_seed`).

    in_shape: one sample, (H, W) or (H, W, C), in pixels; every block halves H and W, rounding down.
    channels: output channels of each convolution block.
    classes: number of logits.
    norm: "group" (8 groups, or their largest common divisor with the channels), "batch" or "none".
    Raises ValueError for a size below 1, an image too small for the blocks, or an unknown norm.
    """
    H, W, C = (*counts("in_shape", in_shape, (2, 3)), 1)[:3]
    channels = counts("channels", channels)
    shrink = 2 ** len(channels)
    require(min(H, W) >= shrink, "in_shape", in_shape,
            f"at least {shrink} pixels a side for {len(channels)} blocks")
    require(is_count(classes), "classes", classes, "a whole number of at least 1")
    require(norm in NORMS, "norm", norm, f"one of {', '.join(NORMS)}")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    entry: nn.Module = Entry((H, W, C))
    for index, width in enumerate(channels):
        named[f"conv_{index}"] = Conv(C, width, norm, entry)
        C, entry = width, nn.Identity()
    named["head"] = Head((H // shrink) * (W // shrink) * C, classes)
    return CNN(named)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: conv_0, ..., head."""
    return list(model.named_children())


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 8, 8) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 8, 8), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
