"""Workloads of `benchmarks step`: model, batch of a rank, made-up data, and one optimizer for all contenders.

Owns sizes and data: numpy arrays, names of model files, and the model of Horovod's MNIST examples, which is none of
the package's. Imports no framework before a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

LR = 0.01
MOMENTUM = 0.9
BATCHES = 4
"""Batches of a rank, kept in memory and walked over again and again: loading data is not what is timed."""

FILES = {"torch": "torch_models", "tensorflow": "tf_models"}
"""Where the twins live."""


@dataclass(frozen=True)
class Workload:
    """A model with its batch.

    ``file``: of the twins, or ":NAME" for the functions NAME_FRAMEWORK of this module. ``batch``: samples of a rank and
    step. ``shape``: of one sample. ``vocab`` 0: x float32 and one class a sample; above 0: x and y are tokens.
    """

    name: str
    doc: str
    file: str
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    vocab: int = 0
    args: dict[str, Any] = field(default_factory=dict)

    def model(self, framework: str) -> str:
        """Return the model as ``module:callable``."""
        if self.file.startswith(":"):
            return f"{__name__}{self.file}_{framework}"
        return f"{FILES[framework]}.{self.file}:build"

    def arrays(self, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of ``samples`` samples, the same on every rank and in every contender.

        x float32 (n, *shape) uniform in [-1, 1) and y int64 (n,), or both int64 tokens (n, *shape).
        """
        rng = np.random.default_rng(seed)
        if self.vocab:
            x = rng.integers(0, self.vocab, (samples, *self.shape), dtype=np.int64)
            return x, rng.integers(0, self.vocab, (samples, *self.shape), dtype=np.int64)
        x = (2 * rng.random((samples, *self.shape), dtype=np.float32) - 1).astype(np.float32)
        return x, rng.integers(0, self.classes, samples, dtype=np.int64)


def part(arrays: tuple[np.ndarray, ...], batch: int, rank: int, size: int) -> list[tuple[np.ndarray, ...]]:
    """Return this rank's batches of ``arrays``: of each global batch of ``batch * size`` samples the rank's own cut."""
    starts = range(0, len(arrays[0]), batch * size)
    return [tuple(np.ascontiguousarray(a[s + rank * batch:s + (rank + 1) * batch]) for a in arrays) for s in starts]


def mnist_torch() -> Any:
    """Build the layers of Horovod's MNIST examples without their dropout, so that contenders take the same steps."""
    from torch import nn

    return nn.Sequential(nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
                         nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
                         nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))


def mnist_tensorflow() -> Any:
    """Build the layers of `mnist_torch`."""
    from keras import Sequential, layers

    return Sequential([layers.Input((28, 28)), layers.Reshape((28, 28, 1)), layers.Conv2D(10, 5), layers.MaxPooling2D(),
                       layers.ReLU(), layers.Conv2D(20, 5), layers.MaxPooling2D(), layers.ReLU(), layers.Flatten(),
                       layers.Dense(50, "relu"), layers.Dense(10)])


WORKLOADS = {w.name: w for w in (
    Workload("mlp", "1024-2048-2048-1536-10 perceptron, 9.46M parameters", "mlp", 64, (1024,),
             args={"in_features": 1024, "hidden": [2048, 2048, 1536], "classes": 10}),
    Workload("deep", "1024-12x2208-2208-10 perceptron, 60.8M parameters of at most 4.9M a layer", "mlp", 64, (1024,),
             args={"in_features": 1024, "hidden": [2208] * 13, "classes": 10}),
    Workload("mnist", "convolutions of 10 and 20 channels for 28x28 images, 21,840 parameters", ":mnist", 64, (28, 28)),
    Workload("resnet", "small ResNet for 32x32x3 images, 0.27M parameters", "resnet", 32, (32, 32, 3)),
    Workload("gpt", "decoder, 4 blocks of width 256, 64 tokens, 3.22M parameters", "gpt", 8, (64,), vocab=96,
             args={"vocab": 96, "context": 64, "width": 256, "depth": 4}),
    Workload("gpt12", "decoder, 12 blocks of width 128, 128 tokens, 2.42M parameters", "gpt", 16, (128,), vocab=96,
             args={"vocab": 96, "context": 128, "width": 128, "depth": 12}),
    Workload("tiny", "64-32-10 perceptron: the cost of a step apart from its arithmetic", "mlp", 8, (64,),
             args={"in_features": 64, "hidden": [32], "classes": 10}),
)}
