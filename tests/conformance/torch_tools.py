"""Tools of the tests of the PyTorch step: a small model, batches, and a step over a reducer with several buckets.

Imports PyTorch: a test asks for it first (pytest.importorskip).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_step import SGD, OneStep, TwoRanksInOne, X, Y, batch, cut, run, spec  # noqa: F401
from step_kit import Kit, given
from torch import nn
from torch.nn import functional as F

from hvdtrain.config import ScheduleConfig


@pytest.fixture(autouse=True)
def one_thread():
    """Lockstep ranks are threads of this process; torch's own threads would only get in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mlp(start=3, extra=()):
    """Return a small perceptron on (B, 12) with 5 outputs, the same for the same ``start``."""
    torch.manual_seed(start)
    return nn.Sequential(nn.Linear(12, 16), *extra, nn.Tanh(), nn.Linear(16, 5))


def attached(model, *given, **more):
    """Return a step over ``model``; see `OneStep`."""
    return OneStep("torch", model, *given, **more)


def weights(step_or_model):
    model = getattr(step_or_model, "model", step_or_model)
    return {n: t.detach().numpy().copy() for n, t in model.state_dict().items()}


def close(got, want, rtol):
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=rtol * np.abs(want[name]).max(), err_msg=name)


class Tied(nn.Module):
    """Input and output share one matrix; a part is never used, another only for some samples."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        h = torch.tanh(self.middle(self.table(x)))
        if (x == 0).any():
            h = h + self.sometimes(h) * (x == 0).unsqueeze(1)
        return self.out(h)


def tied(start=1):
    torch.manual_seed(start)
    return Tied()


def plain(model, optimizer, steps=20, clip=0.0, schedule=None, rate=None, micros=1):
    """Return what a PyTorch user writes by hand."""
    for t in range(steps):
        optimizer.zero_grad()
        for x, y in cut(batch(t), *[32 // micros] * micros):
            (F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y), reduction="sum") / 32).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(t)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model


class TorchKit(Kit):
    """PyTorch's half of the cases of every backend's step."""

    framework = "torch"
    epsilon = "eps"
    halving = ScheduleConfig("exponentiallr", {"gamma": 0.5})

    def model(self, start=3, hidden=16, noisy=False):
        between = [nn.BatchNorm1d(hidden), nn.Dropout(0.3)] if noisy else []
        model = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), *between, nn.Linear(hidden, 5))
        with torch.no_grad():
            for own, array in zip((*model[0].parameters(), *model[-1].parameters()), given(start, hidden)):
                own.copy_(torch.from_numpy(array.T))
        return model

    def chain(self):
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Sequential(nn.Linear(*sizes), nn.Tanh()) for sizes in ((12, 16), (16, 14), (14, 12))),
                             nn.Linear(12, 5))

    def plain(self, model):
        return [p.detach().numpy().T.copy() for p in (*model[0].parameters(), *model[-1].parameters())]

    def statistics(self, model):
        return [model[2].running_mean.numpy().copy(), model[2].running_var.numpy().copy()]
