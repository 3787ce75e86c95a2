"""Wrappers around a model or its layers leave no trace in names: of files, checkpoints, optimizer state, averages."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from small_runs import bits, config, fitted, lockstep, make_model, samples, solo  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402

from hvdtrain import trainer  # noqa: E402
from hvdtrain.backends.torch import (
    modules,  # noqa: E402
    state,  # noqa: E402
)
from hvdtrain.backends.torch.state import load_model, model_arrays  # noqa: E402
from hvdtrain.checkpoint import read_snapshot  # noqa: E402
from hvdtrain.checkpoint.adapters import fitting  # noqa: E402
from hvdtrain.commands import checkpoints  # noqa: E402
from hvdtrain.config import CheckpointConfig, DataParallelConfig, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine import session  # noqa: E402

DATA = samples(48)


def compiled(module):
    return torch.compile(module, backend="eager")


def plain():
    return make_model("torch")


def half():
    """Return a model with one compiled layer inside of DataParallel, as a model in a model may come."""
    model = plain()
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    model.set_submodule(name, torch.nn.DataParallel(compiled(layer)))
    return model


WRAPPED = {"compiled": lambda: compiled(plain()), "half": half}


class UsersOwn(torch.nn.Module):
    """Has a layer that its user calls "module"."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(12, 5)

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_wrappers_leave_no_trace_in_names(wrapped):
    model, bare = WRAPPED[wrapped](), plain()
    assert list(modules.state_dict(model)) == list(bare.state_dict())
    assert [name for name, _ in modules.named_parameters(model)] == [name for name, _ in bare.named_parameters()]
    modules.load_state_dict(model, {name: torch.full_like(t, 3) for name, t in bare.state_dict().items()})
    assert all((p == 3).all() for p in model.parameters())


def test_a_layer_that_its_user_calls_module_keeps_its_name():
    for model in (UsersOwn(), compiled(UsersOwn())):
        assert list(modules.state_dict(model)) == ["module.weight", "module.bias"]
    both = torch.nn.DataParallel(UsersOwn())
    assert list(modules.state_dict(both)) == ["module.weight", "module.bias"]
    both.register_buffer("rest", torch.zeros(1))
    both.module.register_buffer("rest", torch.zeros(1))
    with pytest.raises(UserError, match="'rest' in addition to 'module.rest'"):
        modules.check_unique_names(both)


def test_a_compiled_layer_in_a_recomputed_block_keeps_its_name():
    block = checkpoint_wrapper(torch.nn.Sequential(compiled(torch.nn.Linear(2, 2))))
    for model, prefix in ((torch.nn.Sequential(block), "0.0"), (block, "0")):
        assert list(modules.state_dict(model)) == [f"{prefix}.weight", f"{prefix}.bias"]
        assert [name for name, _ in modules.named_parameters(model)] == list(modules.state_dict(model))


class Second(torch.nn.Linear):
    """A layer of version 2, which takes weights of no version for those of its first, and has expanded buffers."""

    _version = 2

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("same", torch.ones(1).expand(3))
        self.register_buffer("other", torch.ones(1).expand(3))

    def _load_from_state_dict(self, given, prefix, facts, *args):
        if facts.get("version", 1) < 2:
            given[f"{prefix}weight"] = given[f"{prefix}weight"].T.clone()
        super()._load_from_state_dict(given, prefix, facts, *args)


@pytest.mark.parametrize("wrapped", [lambda model: model, compiled])
def test_a_model_that_converts_old_weights_takes_its_own_as_they_are(tmp_path, wrapped):
    model, other = (wrapped(torch.nn.Sequential(Second())) for _ in range(2))
    arrays = model_arrays(model)
    arrays["0.other"] = np.array([1, 2, 3], np.float32)
    load_model(other, arrays)
    found = modules.state_dict(other)
    assert all(np.array_equal(found[name].numpy(), array) for name, array in arrays.items())
    assert found["0.same"].stride() == (0,), "a buffer that has its values already stays the model's own"
    state.write_files(model, tmp_path)
    bare = torch.nn.Sequential(Second())
    bare[0].same, bare[0].other = torch.zeros(3), torch.zeros(3)
    bare.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(bare[0].weight, modules.state_dict(model)["0.weight"])


def test_a_type_that_no_checkpoint_can_hold_is_refused():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(UserError, match="'table' is of torch.float8_e4m3fn"):
        modules.check_model(model)


def test_names_of_older_checkpoints_are_matched_with_the_models():
    assert fitting(["a.w"], ["_orig_mod.a.w"]) == {"_orig_mod.a.w": "a.w"}
    assert fitting(["module.w"], ["_orig_mod.module.w", "module.w"]) == {}
    assert fitting(["a.w", "module.a.w"], ["_orig_mod.a.w"]) == {}, "which of the two is not known"


def settings(out, **changes):
    more = {"optimizer": Named("Adam"), "lr": 0.01, "ema": 0.9, "global_batch": 8,
            "checkpoint": CheckpointConfig(every_steps=3, keep=9, at_end=False)} | changes
    return config(out=str(out), **more)


def with_wrappers(monkeypatch):
    """Write names as releases before 0.1.0's last weeks did."""
    monkeypatch.setattr(modules.PlainNames, "__call__", lambda self, name: name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run of the plain model without interruption."""
    return fitted(solo(settings(tmp_path_factory.mktemp("whole") / "run", max_steps=6), plain(), DATA))


@pytest.mark.parametrize("first, then", [("plain", "compiled"), ("half", "plain"), ("older compiled", "half")])
def test_a_run_resumes_with_and_without_wrappers_to_the_bit(tmp_path, monkeypatch, whole, first, then):
    models, want = {"plain": plain, **WRAPPED}, whole
    with monkeypatch.context() as older:
        if first.startswith("older"):
            with_wrappers(older)
        fitted(solo(settings(tmp_path / "run", max_steps=3), models[first.split()[-1]](), DATA))
    kept = read_snapshot(tmp_path / "run/checkpoints/step-00000003")
    assert any("_orig_mod" in name for name in kept.tensors["optimizer"]) == first.startswith("older")
    run = solo(settings(tmp_path / "run", max_steps=6, resume="auto"), models[then](), DATA)
    assert run.state.cursor.step == 3
    fitted(run)
    assert bits(run) == bits(want)
    for got, right in zip(run.average.arrays(), want.average.arrays()):
        assert got[0] == right[0] and np.array_equal(got[1], right[1])
    trainer.export(run)
    plain().load_state_dict(load_file(tmp_path / "run/model/model.safetensors"))
    plain().load_state_dict(torch.load(tmp_path / "run/model/model.pt", weights_only=True))


def test_divided_state_of_an_older_compiled_run_is_resumed(tmp_path, monkeypatch):
    zero = {"data_parallel": DataParallelConfig("zero"), "ema": 0.0}
    with monkeypatch.context() as older:
        with_wrappers(older)
        fitted(solo(settings(tmp_path / "run", max_steps=3, ema=0.0), WRAPPED["compiled"](), DATA))
    kept = read_snapshot(tmp_path / "run/checkpoints/step-00000003")

    now = settings(tmp_path / "other", resume=str(tmp_path / "run"), **zero)
    assert lockstep(2, now, lambda rank: plain(), DATA, session.save) == ["", ""]
    again = read_snapshot(tmp_path / "other/checkpoints/step-00000003")
    for group in ("model", "optimizer"):
        assert {name.replace("_orig_mod.", "") for name in kept.tensors[group]} == set(again.tensors[group])
        for name in kept.tensors[group]:
            assert np.array_equal(kept.tensors[group][name], again.tensors[group][name.replace("_orig_mod.", "")])
    assert checkpoints.main([str(tmp_path / "run"), "--export", str(tmp_path / "m.safetensors")]) == 0
    plain().load_state_dict(load_file(tmp_path / "m.safetensors"))
