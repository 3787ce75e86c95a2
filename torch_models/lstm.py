"""A stack of LSTM layers over feature sequences, classified by the last state; twin of `tf_models/lstm.py`.

Owns: the layers and their names. Does not own: the loss, the optimizer, anything distributed.

Each layer is one map of the inputs and one of the state before, with one bias between them, as Keras has it; gates lie
as input, forget, cell, output (Hochreiter and Schmidhuber 1997).
"""
from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from torch_models import is_count, require


class LSTM(nn.Module):
    """A chain of named blocks; x (B, T, features) -> logits (B, classes)."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in blocks(self):
            x = block(x)
        return x


class Layer(nn.Module):
    """An LSTM over time, from a state of zeros: (B, T, features) -> (B, T, width)."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.width = width
        self.inputs = nn.Linear(features, 4 * width)
        self.state = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped = self.inputs(x)
        h = c = mapped.new_zeros(mapped.shape[0], self.width)
        found = []
        for at_t in mapped.unbind(1):
            i, f, g, o = (at_t + self.state(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            found.append(h)
        return torch.stack(found, 1)


class Head(nn.Module):
    """The last state, then one linear map: (B, T, width) -> (B, classes)."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, -1])


def build(*, features: int = 8, width: int = 64, depth: int = 2, classes: int = 10) -> LSTM:
    """Build the stack with torch's default initialisation (fixed by `torch.manual_seed`).

    features: values of one moment. width: cells of each layer. depth: layers. classes: number of logits.
    Raises ValueError for a size below 1.
    """
    for name, value in (("features", features), ("width", width), ("depth", depth), ("classes", classes)):
        require(is_count(value), name, value, "a whole number of at least 1")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for index in range(depth):
        named[f"lstm_{index}"] = Layer(features if index == 0 else width, width)
    named["head"] = Head(width, classes)
    return LSTM(named)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: lstm_0, ..., head."""
    return list(model.named_children())


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 8, 8) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 8, 8), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)
