"""Recomputed blocks of PyTorch models: the bits of training with and without, for each kind of layer."""

from __future__ import annotations

import random

import numpy as np
import pytest
from one_step import OneStep, batch

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_tools import one_thread  # noqa: E402, F401


def outcome(make, remat, steps=3, micros=2, **more):
    """Weights, buffers, losses and random states after some steps, and how often blocks were computed again."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    step = OneStep("torch", make(), **more)
    if remat:
        step.parts.remat.choose(step.parts.remat.names)
    pairs = []
    for t in range(steps):
        x, y = batch(t)
        cut = len(x) // micros
        pairs.append(step.run([(x[i * cut:(i + 1) * cut], y[i * cut:(i + 1) * cut]) for i in range(micros)], 1 / 32))
    state = {name: array.tobytes() for name, array in step.parts.stage.generators.state().items()}
    found = {n: t.detach().numpy().tobytes() for n, t in step.model.state_dict().items()}, pairs, state
    step.leave()
    assert not any("forward" in vars(m) for m in step.model.modules())
    return found


def seq(*between, width=16):
    return lambda: nn.Sequential(nn.Linear(12, width), *[make() for make in between], nn.Linear(width, 5))


@pytest.mark.parametrize("make", [
    seq(nn.Tanh),
    seq(nn.ReLU, lambda: nn.Dropout(0.3)),
    seq(lambda: nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.5))),
    seq(lambda: nn.BatchNorm1d(16), lambda: nn.ReLU(inplace=True)),
], ids=["tanh", "dropout", "batchnorm", "in place"])
def test_recomputed_blocks_train_to_the_same_bits(make):
    assert outcome(make, True) == outcome(make, False)
