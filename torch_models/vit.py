"""Vision transformers for images, channels last; twin of `tf_models/vit.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

A. Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, table 1: patches through one linear map, a class
token in front, learned positions, pre-LayerNorm blocks, one linear map of the class token. Tiny and Small are those of
H. Touvron et al., "Training data-efficient image transformers", ICML 2021.
"""
from __future__ import annotations

from collections import OrderedDict
from typing import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from torch_models import counts, is_count, require
from torch_models.attention import Attention, linear

EPSILON = 1e-6   # of every LayerNorm, in both twins
INIT_STD = 0.02  # of linear and embedding weights


class ViT(nn.Module):
    """A chain of named blocks; x (B, H, W) or (B, H, W, C) -> logits (B, classes)."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in blocks(self):
            x = block(x)
        return x


class Embed(nn.Module):
    """Patches, class token and positions: (B, H, W[, C]) -> (B, 1 + H / patch * W / patch, width)."""

    def __init__(self, shape_HWC: tuple[int, int, int], patch: int, width: int, dropout: float):
        super().__init__()
        H, W, C = self.shape_HWC = shape_HWC
        self.patch = patch
        self.patches = linear(patch * patch * C, width, INIT_STD)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + H // patch * (W // patch), width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.positions, std=INIT_STD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        H, W, C = self.shape_HWC
        got = tuple(x.shape[1:])
        require(got == (H, W, C) or (got, C) == ((H, W), 1), "images", got,
                f"{(H, W, C)} a sample, channels last")
        B, P = x.shape[0], self.patch
        x = x.reshape(B, H // P, P, W // P, P, C).transpose(2, 3).reshape(B, -1, P * P * C)
        x = torch.cat([self.token.expand(B, -1, -1), self.patches(x)], 1)
        return self.dropout(x + self.positions)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, eps=EPSILON)
        self.attention = Attention(width, heads, dropout, INIT_STD, INIT_STD)
        self.norm_mlp = nn.LayerNorm(width, eps=EPSILON)
        self.mlp_in = linear(width, 4 * width, INIT_STD)
        self.mlp_out = linear(4 * width, width, INIT_STD)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x)))))


class Head(nn.Module):
    """Last LayerNorm, and one linear map of the class token: (B, T, width) -> (B, classes)."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.linear = linear(width, classes, INIT_STD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x[:, 0]))


def build(*, in_shape: Sequence[int] = (32, 32, 3), patch: int = 4, width: int = 64, depth: int = 4, heads: int = 4,
          classes: int = 10, dropout: float = 0.0) -> ViT:
    """Build the network with normal weights (fixed by `torch.manual_seed`).

    in_shape: one sample, (H, W) or (H, W, C), in pixels; H and W multiples of `patch`.
    patch: side of a patch, in pixels.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    classes: number of logits.
    dropout: share of values dropped in training, 0 <= dropout < 1, after the embedding, on attention weights
        and on each residual branch. Above 0 a run depends on the number of ranks.
    Raises ValueError for a size below 1, a width that heads do not divide, an image that patches do not, or a dropout
    outside its range.
    """
    H, W, C = (*counts("in_shape", in_shape, (2, 3)), 1)[:3]
    sizes = {"patch": patch, "width": width, "depth": depth, "heads": heads, "classes": classes}
    for name, value in sizes.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    require(H % patch == 0 and W % patch == 0, "in_shape", in_shape, f"H and W multiples of patch ({patch})")
    require(width % heads == 0, "width", width, f"a multiple of heads ({heads})")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    named: OrderedDict[str, nn.Module] = OrderedDict(embed=Embed((H, W, C), patch, width, dropout))
    for index in range(depth):
        named[f"block_{index}"] = Block(width, heads, dropout)
    named["head"] = Head(width, classes)
    return ViT(named)


def vit_tiny(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
             dropout: float = 0.0) -> ViT:
    """Build ViT-Ti: 5,717,416 parameters as Ti/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=192, depth=12, heads=3, classes=classes, dropout=dropout)


def vit_small(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
              dropout: float = 0.0) -> ViT:
    """Build ViT-S: 22,050,664 parameters as S/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=384, depth=12, heads=6, classes=classes, dropout=dropout)


def vit_base(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
             dropout: float = 0.0) -> ViT:
    """Build ViT-B: 86,567,656 parameters as B/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=768, depth=12, heads=12, classes=classes, dropout=dropout)


def vit_large(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 16, classes: int = 1000,
              dropout: float = 0.0) -> ViT:
    """Build ViT-L: 304,326,632 parameters as L/16 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=1024, depth=24, heads=16, classes=classes, dropout=dropout)


def vit_huge(*, in_shape: Sequence[int] = (224, 224, 3), patch: int = 14, classes: int = 1000,
             dropout: float = 0.0) -> ViT:
    """Build ViT-H: 632,045,800 parameters as H/14 for 1000 classes. Arguments and errors as of `build`."""
    return build(in_shape=in_shape, patch=patch, width=1280, depth=32, heads=16, classes=classes, dropout=dropout)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: embed, block_0, ..., head."""
    return list(model.named_children())


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 32, 32, 3) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
