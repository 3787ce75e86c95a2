"""Buffers that PyTorch models write, over first samples, skipped steps, resumption, evaluation and pipelines."""

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, config, fitted, lockstep, solo, weights

from hvdtrain.config import CheckpointConfig, DataConfig, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402
from writing_torch import DATA, RIGHT, Counting, ranks, short  # noqa: E402


class Bounded(nn.Module):
    """Has an embedding that its forward passes renormalise, and a parameter that they write."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.linear = nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, CLASSES)
        self.slow = nn.Linear(4, CLASSES).requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.slow.weight.mul_(0.9).add_(self.linear.weight * 0.1)
        features = self.embedding((x[:, 0] * 2).long().clamp(-4, 3) + 4)
        return self.linear(features) + self.slow(features)


def test_an_audit_changes_no_parameter():
    plain, audited = (weights(lockstep(2, short(shares=[], audit=audit), lambda rank: Bounded(), DATA, fitted)[0])
                      for audit in (0, 1))
    assert all(map(np.array_equal, plain, audited))


class Lazy(nn.Module):
    """Has state that its first training pass makes: a buffer that was None, an empty and a new one, and attributes."""

    def __init__(self, reductions=None):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("total", None)
        self.register_buffer("least", torch.tensor([]))
        self.register_buffer("centre", torch.zeros(FEATURES))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.ready, self.sizes, self.reductions = False, [], reductions

    def buffer_reduction(self):
        return self.reductions or {}

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.sizes.append(len(x))
                self.total = x.sum(0) if self.total is None else self.total + x.sum(0)
                self.least = x.amin(0) if self.least.numel() == 0 else torch.minimum(self.least, x.amin(0))
                if not self.ready:
                    self.register_buffer("first", x.mean(0))
                    self.centre.copy_(x.mean(0))
                    self.ready = True
        if len(self.cache) < len(x):
            self.cache = torch.zeros(len(x))
        return self.linear(x - self.centre)


LAZY = {"total": "sum", "least": "min", "first": "mean", "centre": "mean"}


@pytest.mark.parametrize("shares", [[2, 1], [0, 1]], ids=str)
def test_the_first_samples_leave_no_state_behind(shares):
    settings = short(max_steps=1, data=DataConfig(prefetch=0, shuffle=False))
    x = torch.from_numpy(DATA[0][:6])
    want = {"total": x.sum(0), "least": x.amin(0), "first": x.mean(0), "centre": x.mean(0)}
    alone = fitted(solo(settings, Lazy(), DATA)).spec.model
    assert alone.sizes == [6]
    for run in (*ranks(short(max_steps=1, data=settings.data, shares=shares), reductions=LAZY, model=Lazy),
                fitted(solo(settings, Lazy(LAZY), DATA))):
        for name, value in want.items():
            torch.testing.assert_close(getattr(run.spec.model, name), value, msg=name)
    for name, value in want.items():
        torch.testing.assert_close(getattr(alone, name), value, msg=name)


def test_state_that_the_first_step_makes_is_one_value_after_it():
    note = next(note for note in ranks(short(max_steps=1), model=Lazy)[0].notes if "write to" in note)
    assert all(name in note for name in ("total", "least", "first", "centre")) and "cache" not in note


def test_a_skipped_first_step_makes_no_buffer():
    def one(run):
        run.dp.update = lambda *rest: (False, float("nan"))
        return fitted(run).spec.model

    for model in lockstep(2, short(max_steps=1, nan_guard="skip"), lambda rank: Lazy(LAZY), DATA, one):
        assert model.total is None


@pytest.mark.parametrize("reductions", [None, RIGHT], ids=["default", "declared"])
def test_a_resumed_run_goes_on_with_the_same_values(reductions, tmp_path):
    out = str(tmp_path / "run")
    saved = short(max_steps=2, checkpoint=CheckpointConfig(every_steps=1), out=out)
    ranks(saved, reductions=reductions)
    rest = ranks(short(max_steps=4, resume=out, out=str(tmp_path / "rest")), reductions=reductions)[0]
    assert all(np.array_equal(a, b) for a, b in zip(weights(rest), weights(ranks(short(), reductions=reductions)[0])))


class Evaluated(Counting):
    """Counts in evaluation too."""

    def forward(self, x):
        with torch.no_grad():
            self.count += len(x)
        return self.linear(x)


def test_what_an_evaluation_writes_is_reduced_too():
    def one(run):
        fitted(run)
        before = int(run.spec.model.count)
        loop.measure(run, run.feed)
        return before, int(run.spec.model.count)

    assert lockstep(2, short(), lambda rank: Evaluated({"count": "sum"}), DATA, one) == [(24, 48)] * 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("given, said", [({"cuont": "sum"}, "cuont"), ({"count": "mean"}, "int64"), ([1], "a dict")],
                         ids=str)
def test_a_wrong_declaration_is_refused_on_all_ranks(size, given, said):
    with pytest.raises(UserError, match=said):
        lockstep(size, short(shares=[]), lambda rank: Counting(given), DATA, fitted)


class Tallied(nn.Module):
    """Counts samples, and keeps the last ones' mean."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(FEATURES))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.count += len(x)
                self.last.copy_(x.mean(0))
        return torch.tanh(self.linear(x))


class Staged(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(Tallied(), Tallied(), nn.Linear(FEATURES, CLASSES))

    def buffer_reduction(self):
        return {"0.count": "sum", "1.count": "sum"}


@pytest.mark.parametrize("size", [2, 4])
def test_a_pipeline_reduces_over_the_replicas_of_each_block(size):
    settings = config(global_batch=8, max_steps=3, pipeline=PipelineConfig(2, cut=["1"], micro_batches=2))
    runs = lockstep(size, settings, lambda rank: Staged(), DATA, fitted)
    held = [dict(run.parts.model.named_buffers()) for run in runs]
    for name in ("0.count", "1.count", "0.last", "1.last"):
        values = [buffers[name] for buffers in held if name in buffers]
        assert len(values) == size // 2 and all(torch.equal(v, values[0]) for v in values), name
        assert "last" in name or float(values[0]) == 24
    notes = [note for note in runs[0].notes if "not independent" in note]
    assert len(notes) == (2 if size == 4 else 0)
    assert size == 2 or "0.last, 1.last" in notes[0]
