"""A multi-layer perceptron for flat or flattened samples; twin of `tf_models/mlp.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.
"""
from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Sequence

import numpy as np
import torch
from torch import nn

from torch_models import counts, is_count, require

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU,
               "gelu": partial(nn.GELU, approximate="tanh")}


class MLP(nn.Module):
    """A chain of named blocks; x (B, ...) with `in_features` values a sample -> logits (B, classes)."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in blocks(self):
            x = block(x)
        return x


class Dense(nn.Module):
    """Flatten, one linear map, one activation: x (B, ...) -> (B, width)."""

    def __init__(self, in_features: int, width: int, activation: nn.Module):
        super().__init__()
        self.linear = nn.Linear(in_features, width)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x.flatten(1)))


def build(*, in_features: int = 64, hidden: Sequence[int] = (128, 128), classes: int = 10,
          activation: str = "relu") -> MLP:
    """Build the perceptron with torch's default initialisation (fixed by `torch.manual_seed`).

    in_features: values per sample, after flattening.
    hidden: units of each hidden layer.
    classes: number of logits.
    activation: relu, tanh, silu or gelu (tanh form).
    Raises ValueError for a size below 1 or an unknown activation.
    """
    require(is_count(in_features), "in_features", in_features, "a whole number of at least 1")
    require(is_count(classes), "classes", classes, "a whole number of at least 1")
    require(activation in ACTIVATIONS, "activation", activation, f"one of {', '.join(ACTIVATIONS)}")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for index, width in enumerate(counts("hidden", hidden)):
        named[f"dense_{index}"] = Dense(in_features, width, ACTIVATIONS[activation]())
        in_features = width
    named["head"] = Dense(in_features, classes, nn.Identity())
    return MLP(named)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: dense_0, ..., head."""
    return list(model.named_children())


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 64) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 64), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
