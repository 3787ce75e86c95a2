"""Buffers that a PyTorch model writes to in its forward passes, over ranks: named, and one value for all ranks."""

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, apart, fitted, lockstep, solo, weights

from hvdtrain.config import CheckpointConfig, DataConfig, DataParallelConfig
from hvdtrain.core.errors import UserError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402
from writing_torch import DATA, RIGHT, Counting, ranks, short  # noqa: E402


@pytest.mark.parametrize("zero", [False, True])
def test_declared_buffers_are_those_of_one_process(zero):
    changes = {"data_parallel": DataParallelConfig("zero")} if zero else {}
    alone = fitted(solo(short(), Counting(RIGHT), DATA)).spec.model
    got = ranks(short(**changes), reductions=RIGHT)[0]
    for name in ("count", "seen", "flag", "at"):
        assert torch.equal(getattr(got.spec.model, name), getattr(alone, name)), name
    assert sorted(got.spec.model.queue.tolist()) == sorted(alone.queue.tolist()) and alone.queue.any(1).all()
    assert any("count: sum" in note and "not independent" in note for note in got.notes)


def test_by_default_ranks_take_rank_0s_and_the_note_names_them():
    run = ranks(short())[0]
    assert int(run.spec.model.count) == 16, "4 steps of rank 0's share"
    note = next(note for note in run.notes if "write to" in note)
    assert all(name in note for name in ("at", "count", "queue", "seen")) and "late" not in note
    assert any("late" in note for note in run.notes), "first written in the third step"


@pytest.mark.parametrize("reductions", [None, RIGHT], ids=["default", "declared"])
def test_saves_and_evaluations_change_no_bit(reductions, tmp_path):
    quiet = weights(ranks(short(), reductions=reductions)[0])
    saving = short(eval_every=1, epochs=9, checkpoint=CheckpointConfig(every_steps=1), out=str(tmp_path / "run"))
    noisy = weights(ranks(saving, reductions=reductions)[0])
    assert all(np.array_equal(a, b) for a, b in zip(quiet, noisy))


def test_a_rank_without_a_sample_takes_the_others():
    run = ranks(short(shares=[0, 1]))[0]
    assert int(run.spec.model.count) == 24
    assert int(ranks(short(shares=[0, 1]), reductions=RIGHT)[0].spec.model.count) == 24


def test_a_placeholder_is_no_sample():
    run = ranks(short(shares=[0, 1], sync_batchnorm=True), reductions=RIGHT)[0]
    assert int(run.spec.model.count) == 24


class Poisoned(Counting):
    """Gives a loss that is not finite in the second step, on the rank that has sample 6."""

    def forward(self, x):
        bad = self.training and torch.is_grad_enabled() and bool((x == torch.from_numpy(DATA[0][6])).all(1).any())
        return super().forward(x) * (float("nan") if bad else 1.0)


@pytest.mark.parametrize("reductions", [None, RIGHT], ids=["default", "declared"])
def test_a_step_without_an_update_writes_nothing(reductions):
    run = ranks(short(nan_guard="skip", data=DataConfig(prefetch=0, shuffle=False)), reductions=reductions,
                model=Poisoned)[0]
    assert int(run.spec.model.count) == (18 if reductions else 12)


@pytest.mark.parametrize("name", ["replicate", "zero"])
def test_an_update_that_is_left_out_gives_back_what_was_combined(name):
    def one(run):
        update = run.dp.update
        run.dp.update = lambda step, *rest: (False, float("nan")) if step == 1 else update(step, *rest)
        return fitted(run)

    settings = short(nan_guard="skip", data_parallel=DataParallelConfig(name),
                     data=DataConfig(prefetch=0, shuffle=False))
    for run in lockstep(2, settings, lambda rank: Counting(RIGHT), DATA, one):
        kept = torch.from_numpy(np.delete(DATA[0], range(6, 12), 0))
        assert int(run.spec.model.count) == 18 and int(run.spec.model.at) == 18 % 16
        assert run.spec.model.seen.tolist() == [1 + int((kept > 1).sum()), 1 + int((kept < -1).sum())]


class Writing(nn.Module):
    """Writes to an untrained parameter, a half-precision buffer, a replaced one, and behind PyTorch's count."""

    def __init__(self, reductions=None):
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.slow = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.embedding = nn.Embedding(4, FEATURES, max_norm=0.5)
        self.register_buffer("narrow", torch.zeros(FEATURES, dtype=torch.bfloat16))
        self.register_buffer("replaced", torch.zeros(FEATURES), persistent=False)
        self.register_buffer("data", torch.zeros(FEATURES))
        self.passes = 0
        self.register_buffer("untouched", torch.full((70000,), 0.1))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.slow.weight.mul_(0.9).add_(self.linear.weight * 0.1 + x.mean())
                self.narrow += x.mean(0)
                self.replaced = x.mean(0)
                self.data.data.add_(x.sum(0))
                self.passes += 1
                if self.passes == 2:
                    self.register_buffer("lazy", torch.zeros(FEATURES))
                elif self.passes > 2:
                    self.lazy += x.mean(0)
        return self.linear(x) + self.slow(x) + self.linear(self.embedding((x[:, 0] > 0).long()))


def test_whatever_is_written_becomes_one_value():
    def after(run):
        fitted(run)
        return run, {n: t.clone() for n, t in (*run.spec.model.named_buffers(), *run.spec.model.named_parameters())}

    (run, want), (_, got) = lockstep(2, short(), lambda rank: Writing(), DATA, after)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    note = next(note for note in run.notes if "write to" in note)
    assert all(name in note for name in ("slow.weight", "narrow", "replaced", "data", "embedding.weight"))
    assert "untouched" not in note and "linear" not in note


class Centred(nn.Module):
    """Writes a mean of its samples to a trainable parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.shift = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.shift.data.copy_(x.mean(0))
        return self.linear(x - self.shift)


def test_an_update_starts_from_what_was_written_to_a_parameter():
    """ZeRO's owner of a parameter may be another rank than the one whose value all take."""
    replicate, *zero = [weights(lockstep(2, short(data_parallel=DataParallelConfig(*how)), lambda rank: Centred(), DATA,
                                         fitted)[0]) for how in (("replicate",), ("zero", 1), ("zero", 2))]
    assert all(apart(one, replicate) < 1e-6 for one in zero)


def test_a_model_without_such_buffers_sends_nothing():
    def one(run):
        sent = []
        run.parts.buffers.combine = lambda *args, **more: sent.append(args)
        fitted(run)
        return sent, run.notes

    class Normalised(nn.Sequential):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    for sent, notes in lockstep(2, short(), lambda rank: Normalised(), DATA, one):
        assert sent == [] and not any("write to" in note for note in notes)


class Shared(nn.Module):
    """Two modules have one counter; the second has its own from the third pass on, if ``parting``."""

    def __init__(self, reductions=None, parting=False):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(FEATURES, CLASSES), nn.Linear(1, 1).requires_grad_(False)
        self.a.register_buffer("count", torch.zeros(2))
        self.b.register_buffer("count", self.a.count)
        self.reductions, self.parting, self.passes = reductions, parting, 0

    def buffer_reduction(self):
        return self.reductions

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            if self.parting and self.passes == 3:
                self.b.count = torch.zeros(2)
            self.a.count[0] += len(x)
            self.b.count[1] += len(x)
        return self.a(x)


@pytest.mark.parametrize("name", ["a.count", "b.count"])
def test_a_buffer_of_two_modules_is_reduced_once(name):
    run = ranks(short(), reductions={name: "sum"}, model=Shared)[0]
    assert run.spec.model.a.count.tolist() == [24, 24] and run.spec.model.b.count is run.spec.model.a.count
    assert not any("b.count" in note for note in run.notes)


def test_a_buffer_that_is_no_longer_shared_is_state_of_its_own():
    run = ranks(short(), reductions={}, model=lambda reductions: Shared(reductions, parting=True))[0]
    assert any("b.count" in note for note in run.notes)


def test_two_reductions_of_one_buffer_are_refused():
    with pytest.raises(UserError, match="same buffer"):
        ranks(short(), reductions={"a.count": "sum", "b.count": "max"}, model=Shared)


class Renormalised(nn.BatchNorm1d):
    """Reads its running mean in training."""

    def forward(self, x):
        out = x - self.running_mean
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean(0), 0.3)
        return out


def test_statistics_that_enter_training_are_written_state(tmp_path):
    def model(rank):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), Renormalised(4), nn.Linear(4, CLASSES), nn.BatchNorm1d(CLASSES))

    run = lockstep(2, short(), model, DATA, fitted)[0]
    noted = next(note for note in run.notes if "write to" in note)
    assert "1.running_mean" in noted and "3." not in noted
    saving = lockstep(2, short(checkpoint=CheckpointConfig(every_steps=1), out=str(tmp_path / "run")), model, DATA,
                      fitted)[0]
    trained = [[p.detach() for p in each.spec.model.parameters()] for each in (run, saving)]
    assert all(map(torch.equal, *trained))
