"""The perceptron of two layers that is cut over two devices, 784 -> 512 | 10; twin of `tf_models/device_split.py`.

Owns: the layers, their names, and a demonstration by hand (`python -m torch_models.device_split`) of the two layers on
two devices. Does not own: the loss, the optimizer, anything distributed; `--model_parallel 2` cuts it, as any model of
named blocks, for a run over ranks.
"""
from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from torch_models import is_count, require


class DeviceSplit(nn.Module):
    """A chain of two named blocks; x (B, ...) with `in_features` values a sample -> logits (B, classes)."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in blocks(self):
            x = block(x)
        return x


class Rectified(nn.Linear):
    """Flatten, one linear map, ReLU: x (B, ...) -> (B, out_features)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x.flatten(1)))


def build(*, in_features: int = 784, hidden: int = 512, classes: int = 10) -> DeviceSplit:
    """Build the perceptron with torch's default initialisation (fixed by `torch.manual_seed`).

    in_features: values per sample, after flattening.
    hidden: units of the hidden layer.
    classes: number of logits.
    Raises ValueError for a size below 1.
    """
    for name, value in {"in_features": in_features, "hidden": hidden, "classes": classes}.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    return DeviceSplit(OrderedDict(first=Rectified(in_features, hidden), second=nn.Linear(hidden, classes)))


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: first, second."""
    return list(model.named_children())


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 784) float32 in [0, 1), y (B,) int64 class numbers."""
    rng = np.random.default_rng(0)
    return rng.random((B, 784), dtype=np.float32), rng.integers(0, 10, B, dtype=np.int64)


def main(steps: int = 20, B: int = 256) -> list[float]:
    """Train on one batch, a layer on each of two devices; print where all is, and return the losses."""
    from hvdtrain.backends.torch.pipelined.over_devices import OverDevices

    gpus = torch.cuda.device_count()
    names = ("cuda:0", "cuda:1") if gpus > 1 else ("cpu", "cuda:0") if gpus else ("cpu", "cpu")
    if not gpus:
        print("Two devices need a GPU: without one both layers train on the CPU, one after the other.")
    torch.manual_seed(0)
    model = build()
    devices = [torch.device(name) for name in names]
    OverDevices([[block] for _, block in blocks(model)], devices, micros=8).install(model)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = (torch.from_numpy(array) for array in example(B))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y.to(devices[-1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, parameter in model.named_parameters():
        print(f"{name} {tuple(parameter.shape)} on {parameter.device}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps of {B} samples, each in 8 parts")
    return losses


if __name__ == "__main__":
    main()
