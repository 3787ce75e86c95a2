"""Changes that callbacks make to a PyTorch model during training: as in plain PyTorch, through checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import unfreezing  # noqa: E402
from small_runs import apart, fitted, lockstep, solo  # noqa: E402
from torch import nn  # noqa: E402
from unfreezing import BASE, WAYS, Net, arrays, data, model, plain, work  # noqa: E402

from hvdtrain.config import CheckpointConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine.callbacks.base import Callback  # noqa: E402


def parameter_groups(model):
    """Return a rate of its own for the backbone, also while it is frozen."""
    return [{"params": model.backbone.parameters(), "lr": 0.01, "weight_decay": 0.3}]


def unaffine(net):
    """``net`` whose norm has buffers only."""
    net.norm = nn.BatchNorm1d(8, affine=False)
    return net


class Normed(Net):
    def forward(self, x):
        return super().forward(self.norm(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_unfreezing_and_freezing_are_plain_pytorchs(tmp_path, monkeypatch, ranks, way):
    setting = replace(BASE, out=str(tmp_path), **WAYS[way])
    if way == "groups":
        monkeypatch.setattr(unfreezing, "parameter_groups", parameter_groups, raising=False)
    want = plain(way == "groups")
    found = [work(solo(setting, model(), data()))] if ranks == 1 else lockstep(
        ranks, setting, lambda rank: model(), data(), work)
    for got, notes in found:
        assert apart(got, want) < (2e-2 if way == "fp16" else 1e-5)
        assert [n[:7] for n in notes if "join training" in n] == ["step 4:", "step 8:"]


@pytest.mark.parametrize("stop", (6, 11))
@pytest.mark.parametrize("way", ("replicate", "zero 2", "ema"))
def test_a_checkpoint_holds_what_is_trained(tmp_path, way, stop):
    """Also of a run that continues with another number of ranks, whose callback changes nothing at its begin."""
    setting = replace(BASE, out=str(tmp_path), checkpoint=CheckpointConfig(at_end=True), **WAYS[way])
    lockstep(2, replace(setting, max_steps=stop), lambda rank: model(), data(), work)
    for ranks in (3, 2):
        again = replace(setting, resume=str(tmp_path), out=str(tmp_path / f"on{ranks}"))
        for got, _ in lockstep(ranks, again, lambda rank: model(), data(), work):
            assert apart(got, plain()) < 1e-5


def refused(tmp_path, change, where="all", ranks=2, built=model) -> str:
    class Change(Callback):
        def __init__(self):
            self.where = where

        def step_end(self, run):
            if run.state.cursor.step == 2:
                change(run)

    said = []

    def one(run):
        try:
            work(run, Change())
        except UserError as error:
            said.append(str(error))

    lockstep(ranks, replace(BASE, out=str(tmp_path)), lambda rank: built(), data(), one)
    assert len(said) == ranks and len(set(said)) == 1, said
    return said[0]


def test_what_a_run_cannot_follow_is_refused_on_all_ranks(tmp_path):
    def replaced(run):
        run.spec.model.middle = nn.Linear(8, 8)

    def added(run):
        run.spec.model.more = nn.Linear(2, 2)

    def given(run):
        run.parts.optimizer.optimizer.add_param_group({"params": list(run.spec.model.backbone.parameters())})

    def root(run):
        run.spec.model.middle.requires_grad_(True)

    def norm(run):
        run.spec.model.norm.eval()

    def mean(run):
        run.spec.model.norm = nn.BatchNorm1d(8, affine=False)

    assert "a buffer of module norm was replaced" in refused(tmp_path / "f", mean, built=lambda: unaffine(model()))
    assert "parameter middle.weight was replaced" in refused(tmp_path / "a", replaced)
    assert "parameter more.weight was added" in refused(tmp_path / "b", added)
    said = refused(tmp_path / "c", given)
    assert "optimizer was given 6 parameters instead of 4" in said and "in parameter_groups(model)" in said
    said = refused(tmp_path / "d", root, "root")
    assert "on some ranks only" in said and "middle.weight is now trained" in said
    assert "module norm is in evaluation mode" in refused(tmp_path / "e", norm, "root", built=lambda: model(Normed))


def test_a_module_without_parameters_may_be_replaced(tmp_path):
    class Relu(Callback):
        where = "all"

        def epoch_start(self, run):
            if run.state.cursor.epoch == 1:
                run.spec.model.act = nn.ReLU()

    one = work(solo(replace(BASE, out=str(tmp_path / "1")), model(), data()), Relu())[0]
    two = lockstep(2, replace(BASE, out=str(tmp_path / "2")), lambda rank: model(), data(), lambda r: work(r, Relu()))
    assert apart(two[0][0], one) < 1e-5


def test_modes_that_callbacks_set_come_back_with_a_checkpoint(tmp_path):
    class Freeze(Callback):
        where = "all"

        def step_end(self, run):
            if run.state.cursor.step == 2:
                run.spec.model.norm.eval()

    setting = replace(BASE, out=str(tmp_path / "whole"))
    want = work(solo(setting, model(Normed), data()), Freeze())[0]
    setting = replace(BASE, out=str(tmp_path / "cut"), max_steps=5, checkpoint=CheckpointConfig(at_end=True))
    work(solo(setting, model(Normed), data()), Freeze())
    run = solo(replace(BASE, out=str(tmp_path / "on"), resume=str(tmp_path / "cut")), model(Normed), data())
    assert not run.spec.model.norm.training
    assert apart(work(run, Freeze())[0], want) < 1e-6


def test_a_buffer_that_a_forward_pass_registers_is_no_change_of_a_callbacks(tmp_path):
    class Caching(Net):
        def forward(self, x):
            if not hasattr(self, "cache") and self.training:
                self.register_buffer("cache", torch.ones(3), persistent=False)
            return super().forward(x)

    run = solo(replace(BASE, out=str(tmp_path)), model(Caching), data())
    work(run, Before())
    assert run.state.cursor.step == 16 and run.spec.model.cache.shape == (3,)


class Before(Callback):
    where = "all"

    def fit_start(self, run):
        run.spec.model.middle.requires_grad_(True)
        run.spec.model.head.bias.requires_grad_(False)


def test_what_changes_between_assembling_and_the_first_step_counts(tmp_path):
    """By a callback, or by the user between `Trainer.evaluate` and `Trainer.fit`, without any callback."""
    def changed(run):
        run.spec.model.middle.requires_grad_(True)
        run.spec.model.head.bias.requires_grad_(False)
        fitted(run)
        return arrays(run.spec.model), run.notes

    net = model()
    net.middle.requires_grad_(True)
    net.head.bias.requires_grad_(False)
    want = fitted(solo(replace(BASE, out=str(tmp_path / "plain")), net, data())).spec.model
    for name, how in (("callback", lambda run: work(run, Before())), ("user", changed)):
        for got, notes in lockstep(2, replace(BASE, out=str(tmp_path / name)), lambda rank: model(), data(), how):
            assert apart(got, arrays(want)) < 1e-5
            assert not [note for note in notes if "no step so far" in note and "head" in note], "frozen on purpose"


def test_unfreezing_within_a_step_is_refused(tmp_path):
    class Late(Net):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls > 8:
                self.middle.requires_grad_(True)
            return super().forward(x)

    assert "middle.weight was unfrozen in the model's forward pass or task" in refused(
        tmp_path, lambda run: None, built=lambda: model(Late))


def test_another_type_or_shape_is_refused(tmp_path):
    assert "backbone.weight was changed from float32[8, 8] to float64[8, 8]" in refused(
        tmp_path, lambda run: run.spec.model.double())


@pytest.mark.parametrize("saves", (0, 1))
def test_statistics_that_a_mode_brings_in_are_equal_on_all_ranks(tmp_path, saves):
    """A BatchNorm that a callback sets to eval computes with statistics that each rank has gathered for itself."""
    class Freeze(Callback):
        where = "all"

        def step_end(self, run):
            if run.state.cursor.step == 2:
                run.spec.model.norm.eval()

    setting = replace(BASE, out=str(tmp_path), checkpoint=CheckpointConfig(at_end=False, every_steps=saves))
    runs = lockstep(2, setting, lambda rank: model(Normed), data(), lambda run: (work(run, Freeze()), run)[1])
    held = [[t.detach().numpy() for t in run.spec.model.state_dict().values()] for run in runs]
    assert apart(held[0], held[1]) == 0
    STATISTICS.setdefault("first", held[0])
    assert apart(held[0], STATISTICS["first"]) < 1e-6, "saves change nothing"


STATISTICS: dict[str, list] = {}
