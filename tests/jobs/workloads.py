"""Workloads of these tests' jobs: tiny models with dropout, and data that can end its own process.

Named on a command line as ``path/workloads.py:function``. Owns no expectation. Imports a framework only where a model
of it is built.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, CLASSES = 12, 5
DIE = "TEST_DIE_AT"
"""Environment variable "RANK:N:DIRECTORY": that rank's process is killed when it fetches its Nth batch of training
data and the directory holds two checkpoints, which are written in the background."""


def torch_model(dropout: float = 0.2) -> Any:
    """Return a perceptron with dropout, in PyTorch."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout),
                               torch.nn.Linear(16, CLASSES))


def keras_model(dropout: float = 0.2) -> Any:
    """Return a perceptron with dropout, in Keras."""
    import keras

    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(16, activation="tanh"),
                             keras.layers.Dropout(dropout), keras.layers.Dense(CLASSES)])


def torch_breaks(rank: int, marker: str) -> Any:
    """Build a model whose forward raises on one rank at its third call, after writing the time to ``marker``."""
    import torch

    class Broken(torch.nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3 and my_rank() == rank:
                Path(marker).write_text(repr(time.time()))
                raise RuntimeError("the third forward is broken")
            return super().forward(x)

    return Broken(FEATURES, CLASSES)


def my_rank() -> int:
    """Return this process's rank as mpirun tells it; 0 alone."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


class Samples:
    """``n`` made-up samples, read by index; may end its process as `DIE` says."""

    def __init__(self, n: int, seed: int, mortal: bool) -> None:
        draw = np.random.default_rng([n, seed])
        self.x, self.y = draw.standard_normal((n, FEATURES)).astype(np.float32), draw.integers(0, CLASSES, n)
        told = os.environ.get(DIE, "") if mortal else ""
        rank, count, self.saves = told.split(":", 2) if told else ("", "", "")
        self.left = int(count) if rank and int(rank) == my_rank() else -1

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, indices_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples ``indices_n``."""
        self.left -= len(indices_n) > 1  # single rows are read for a comparison of ranks
        if self.left == 0 and len(indices_n) > 1:
            bound = time.monotonic() + 30
            while len(list(Path(self.saves).glob("step-*"))) < 2 and time.monotonic() < bound:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[indices_n], self.y[indices_n]


def data(split: str, n: int = 90) -> Samples:
    """Training and test samples."""
    return Samples(n, 0, True) if split == "train" else Samples(20, 1, False)
