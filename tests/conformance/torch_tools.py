"""What the tests of the PyTorch step share: a small model, batches, and a step over a reducer with several buckets.

Imports PyTorch: a test asks for it first (pytest.importorskip).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hvdtrain.backends.torch import Ops, create_step
from hvdtrain.collectives.null import NullCollectives
from hvdtrain.config import Config, Named
from hvdtrain.exchange.buckets import plan_buckets
from hvdtrain.exchange.compressors.none import NoCompression
from hvdtrain.exchange.reducer import Reducer

SGD = Config(optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 12)).astype(np.float32)
Y = RNG.integers(0, 5, 64)


@pytest.fixture(autouse=True)
def one_thread():
    """Lockstep ranks are threads of this process; torch's own threads would only get in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mlp(start=3, extra=()):
    """A small perceptron on (B, 12) with 5 outputs, the same for the same ``start``."""
    torch.manual_seed(start)
    return nn.Sequential(nn.Linear(12, 16), *extra, nn.Tanh(), nn.Linear(16, 5))


def spec(model, **parts):
    return SimpleNamespace(
        **{
            "name": "m",
            "model": model,
            "task": None,
            "weight": None,
            "blocks": None,
            "example": None,
            "metrics": None,
            **parts,
        }
    )


class TwoRanksInOne(NullCollectives):
    """A world of two whose other rank has no sample: the buckets and hooks of several ranks, the sums of one."""

    def __init__(self):
        super().__init__(0, 2)


def attached(model, config=SGD, wire=None, rank=0, compressor=None, bucket_mb=0.0005, **parts):
    """A step whose reducer has several small buckets."""
    step = create_step(spec(model, **parts), config, SimpleNamespace(rank=rank), 10)
    step.attach(
        Reducer(
            plan_buckets(step.params(), bucket_mb),
            compressor or NoCompression(),
            wire or NullCollectives(),
            Ops(),
        )
    )
    step.share_initial()
    return step


def run(step, micros, scale, clip=0.0, check=False):
    """One step over this rank's micro-batches."""
    step.zero()
    pairs = [step.forward_backward(m, scale, i + 1 == len(micros)) for i, m in enumerate(micros)]
    assert step.exchange() >= 0
    return step.apply(clip, check), [(float(a), float(b)) for a, b in pairs]


def batch(t, n=32):
    """Global batch t."""
    index = np.random.default_rng(t).permutation(64)[:n]
    return X[index], Y[index]


def cut(whole, *sizes):
    """The first ``sizes`` of a batch as parts; empty ones are left out."""
    ends = np.cumsum((0, *sizes))
    return [tuple(a[i:j] for a in whole) for i, j in zip(ends, ends[1:]) if j > i]


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
    """What a PyTorch user writes by hand."""
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
