"""Whole runs of PyTorch models partitioned over devices, alone and over ranks, against runs of models that are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from small_runs import Record, apart, fitted, lockstep, make_model, solo, weights  # noqa: E402
from split_models import Chain, Skips, deep  # noqa: E402
from split_torch_tools import BASE, CPU, DATA, all_cpu, elsewhere  # noqa: E402,F401
from torch import nn  # noqa: E402
from torch_tools import one_thread, spec  # noqa: E402,F401

import torch_models.cnn  # noqa: E402
import torch_models.device_split  # noqa: E402
import torch_models.gpt  # noqa: E402
from hvdtrain.backends.torch.pipelined.over_devices import OverDevices  # noqa: E402
from hvdtrain.config import CheckpointConfig, ExchangeConfig, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402


def trained(settings, model=None, data=DATA):
    return fitted(solo(settings, model or deep(), data))


@pytest.mark.parametrize("changes", [
    {},
    {"optimizer": Named("Adam"), "lr": 1e-2},
    {"accumulate": 2, "micro_batch": 7, "clip_norm": 0.05},
    {"split_micro_batches": 3, "nan_guard": "skip"},
    {"split_micro_batches": 1},
], ids=["momentum", "adam", "accumulate and clip", "three parts", "one part"])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_split_model_follows_the_whole_one(cpus, devices, changes):
    settings = replace(BASE, **changes)
    whole, split = trained(settings), trained(replace(settings, model_parallel=devices))
    assert apart(weights(split), weights(whole)) < 1e-5
    assert split.parts.describe()["split"].count(" on ") == 1 and len(split.parts.ops_of_place) == devices
    assert "split" not in whole.parts.describe() and not whole.parts.ops_of_place
    assert split.state.metrics == pytest.approx(whole.state.metrics)
    assert "forward" not in vars(split.spec.model), "the model is its user's again"


def test_blocks_are_measured_with_the_runs_own_data(cpus):
    """The example of mlp.py has 64 values a sample, this model and these data 12."""
    whole, split = trained(BASE, make_model("torch")), trained(replace(BASE, model_parallel=2), make_model("torch"))
    assert apart(weights(split), weights(whole)) < 1e-5


def test_a_sequential_is_split_by_its_children(cpus):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))

    whole, split = trained(BASE, build()), trained(replace(BASE, model_parallel=3), build())
    assert apart(weights(split), weights(whole)) < 1e-5
    assert split.parts.describe()["split"].startswith("0 | 1 | 2 on cpu, cpu, cpu")


def test_a_model_is_split_again_wherever_the_run_before_has_left_it(cpus):
    model, whole = deep(), deep()
    trained(replace(BASE, max_steps=5, model_parallel=2), model)
    kept = OverDevices([[model.first], [model.second, model.third, model.head]], [CPU, CPU], 2)
    kept.install(model)  # as it stays after a run on two GPUs
    trained(replace(BASE, max_steps=5, model_parallel=3), model)
    assert "forward" not in vars(model)
    for _ in range(2):
        trained(replace(BASE, max_steps=5), whole)
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)


def test_joint_batchnorm_where_a_split_model_computes_in_one_part(cpus):
    settings = replace(BASE, sync_batchnorm=True, split_micro_batches=1)
    build = lambda rank=0: deep(norm=nn.BatchNorm1d(16))  # noqa: E731
    runs = lockstep(2, replace(settings, model_parallel=2, shares=[3, 1]), build, DATA, fitted)
    want = weights(trained(settings, build()))
    assert all(apart(weights(run), want) < 1e-5 for run in runs)


@pytest.mark.parametrize("cut", [[1, 1], [3, 1], [0, 1]], ids=["equal", "unequal", "one with nothing"])
@pytest.mark.parametrize("changes", [
    {},
    {"compression": "topk", "exchange": ExchangeConfig(topk_ratio=1.0, bucket_mb=0.0005)},
], ids=["plain", "compressed"])
def test_hybrid_two_ranks_of_two_devices_equal_one_of_one(cpus, cut, changes):
    """topk that sends every entry loses nothing, so that law 2 holds to 1e-5 through a compressor with state."""
    settings = replace(BASE, max_steps=20, shares=cut, model_parallel=2, **changes)
    runs = lockstep(2, settings, lambda rank: deep(), DATA, fitted)
    want = weights(trained(replace(BASE, max_steps=20)))
    for run in runs:
        assert apart(weights(run), want) < 1e-5
        assert {b.place for b in run.dp.buckets} == {0, 1} and run.dp.compression == settings.compression
    assert runs[0].parts.describe()["split"] == runs[1].parts.describe()["split"]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_hybrid_with_narrow_gradients_equals_ranks_that_are_not_split(cpus, name):
    settings = replace(BASE, compression=name, shares=[3, 1])
    split = lockstep(2, replace(settings, model_parallel=2), lambda rank: deep(), DATA, fitted)
    whole = lockstep(2, settings, lambda rank: deep(), DATA, fitted)
    assert apart(weights(split[1]), weights(whole[0])) < 2e-3, "a rounding may fall to the other side"
    assert apart(weights(split[0]), weights(split[1])) == 0


def test_gpt_with_its_own_task_and_a_whole_number_input(cpus):
    x = np.random.default_rng(0).integers(0, 96, (48, 64))
    data = (x, np.concatenate([x[:, 1:], np.full((48, 1), -1)], axis=1))
    settings = replace(BASE, max_steps=3, global_batch=16, metrics=[])

    def build():
        torch.manual_seed(0)
        return torch_models.gpt.build(width=16, depth=2, heads=2)

    whole, split = trained(settings, build(), data), trained(replace(settings, model_parallel=2), build(), data)
    assert apart(weights(split), weights(whole)) < 1e-5


def test_batchnorm_takes_each_part_and_says_so(cpus):
    x, y = np.random.default_rng(0).random((34, 8, 8), dtype=np.float32), np.arange(34) % 10
    model = torch_models.cnn.build(channels=(4, 4), norm="batch")
    run = solo(replace(BASE, max_steps=4, model_parallel=2), model, (x, y))
    said = "BatchNorm computes its statistics over each part of a micro-batch"
    assert said in run.parts.caveats()
    counts = []
    run.spec.model.conv_0.norm.register_forward_hook(lambda m, args, out: counts.append(len(args[0])))
    fitted(run)
    assert min(counts) >= 2, "never one sample, of which there are no statistics"


def test_dropout_in_a_split_model_trains_and_repeats(cpus):
    settings = replace(BASE, model_parallel=2)
    build = lambda: deep(drop=nn.Dropout(0.3))  # noqa: E731
    assert "dropout draws differ with split_micro_batches" in solo(settings, build(), DATA).parts.caveats()
    assert apart(weights(trained(settings, build())), weights(trained(settings, build()))) < 1e-5


@pytest.mark.parametrize("own", ["bf16", "fp16"])
def test_16_bits_in_a_split_model(cpus, own):
    settings = replace(BASE, precision=own, loss_scale=1024.0)
    whole, split = trained(settings), trained(replace(settings, model_parallel=2))
    assert apart(weights(split), weights(whole)) < 2e-2
    assert split.parts.scale.on is (own == "fp16")


def test_a_step_that_is_not_finite_is_left_out_of_a_split_model(cpus):
    x, y = np.copy(DATA[0]), DATA[1]
    x[5] = np.nan
    runs = []
    for devices in (1, 2):
        record = Record()
        run = solo(replace(BASE, model_parallel=devices, nan_guard="skip"), deep(), (x, y))
        run.callbacks.insert(0, record)
        runs.append((fitted(run), record.non_finite_at))
    assert runs[0][1] == runs[1][1] != []
    assert apart(weights(runs[1][0]), weights(runs[0][0])) < 1e-5


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3), (2, 2)])
def test_a_checkpoint_goes_on_with_another_number_of_devices(cpus, tmp_path, before, after):
    settings = replace(BASE, out=str(tmp_path), optimizer=Named("Adam"), lr=1e-2)
    trained(replace(settings, max_steps=5, model_parallel=before, checkpoint=CheckpointConfig(at_end=True)))
    run = trained(replace(settings, max_steps=12, model_parallel=after, resume="auto"))
    want = trained(replace(settings, out=str(tmp_path / "whole"), max_steps=12))
    assert run.state.cursor.step == 12 and apart(weights(run), weights(want)) < 1e-5
    files = run.parts.state.export(tmp_path)
    saved = torch.load(tmp_path / files[1], weights_only=True)
    assert saved.keys() == deep().state_dict().keys()
    assert all(torch.equal(saved[n], t) for n, t in run.spec.model.state_dict().items())


def test_a_rank_whose_file_cannot_be_split_ends_all_ranks_alike(cpus):
    def work(run):
        raise AssertionError("no run is to come of it")

    with pytest.raises(UserError, match="rank 1 on host .* give an output that differs from the model's"):
        lockstep(2, replace(BASE, model_parallel=2), lambda rank: deep(kind=(Chain, Skips)[rank]), DATA, work)


def test_the_twin_of_the_seeds_example_trains_by_hand(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    losses = torch_models.device_split.main(steps=5, B=32)
    out = capsys.readouterr().out
    assert losses[-1] < losses[0] and "Two devices need a GPU" in out and "second.weight (10, 512) on cpu" in out


def test_the_seeds_example_in_two_stages(cpus):
    data = torch_models.device_split.example(64)
    whole = trained(replace(BASE, max_steps=4), built(), data)
    split = trained(replace(BASE, max_steps=4, model_parallel=2), built(), data)
    assert apart(weights(split), weights(whole)) < 1e-5
    assert [s.place for s in split.parts.params.specs] == [0, 0, 1, 1]
    described = split.parts.describe()
    assert described["device"] == "cpu, cpu" and described["split"].startswith("first | second on cpu, cpu")
    assert "predicted" in described["bubble"] and "measured" in described["bubble"]


def built():
    torch.manual_seed(1)
    return torch_models.device_split.build(hidden=32)
