"""Checkpoints of runs whose optimizer state is divided: saved by owners, resumed by any ranks, the bits of one run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, FRAMEWORKS, HIDDEN, bits, config, fitted, lockstep, make_model, samples

from hvdtrain.checkpoint import read_snapshot
from hvdtrain.comm.collectives.lockstep import LockstepControl
from hvdtrain.commands.convert import request as places
from hvdtrain.commands.convert import worker
from hvdtrain.commands.convert.request import Request, completed
from hvdtrain.config import CheckpointConfig, DataParallelConfig, ExchangeConfig, Named

DATA = samples(96)
SHARDS = {1: [], 2: [1, 3], 3: [5, 0, 2], 4: [1, 2, 4, 0]}
MOMENTUM = config(global_batch=24, max_steps=8, optimizer=Named("SGD", {"momentum": 0.9}), seed=3,
                  exchange=ExchangeConfig(bucket_mb=0.0005))


def way(name, size, stage=2):
    """Return the setting data_parallel for so many ranks, with unequal parts."""
    return DataParallelConfig("zero", stage, SHARDS[size]) if name == "zero" else DataParallelConfig()


def trained(size, out, layout="gathered", framework="numpy", **changes):
    """Return the runs by rank; a checkpoint after step 4 and at the end."""
    settings = replace(MOMENTUM, out=str(out), checkpoint=CheckpointConfig(every_steps=4, keep=9, layout=layout),
                       **changes)
    if framework != "numpy":
        settings = replace(settings, optimizer=Named("Adam"), lr=0.01)
    return lockstep(size, settings, lambda rank: make_model(framework, rank), DATA, fitted)


def state_of(path):
    """Model and optimizer: (shape, dtype, bytes) by group, in order: Keras counts its models within a process."""
    tensors = read_snapshot(path).tensors
    return {group: [(a.shape, a.dtype, a.tobytes()) for _, a in sorted(tensors[group].items())]
            for group in ("model", "optimizer")}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """``replicas(ranks, framework)``: the folder of replicas, saved after steps 4 and 8, trained once.

    ``ranks``: how many train; or (3, N), where three stop after step 4 and N resume.
    """
    made = {}

    def get(ranks, framework="numpy"):
        if (ranks, framework) not in made:
            made[ranks, framework] = out = tmp_path_factory.mktemp("replicas") / "run"
            if isinstance(ranks, tuple):
                trained(ranks[0], out, max_steps=4, framework=framework)
                trained(ranks[1], out, resume="auto", framework=framework)
            else:
                trained(ranks, out, framework=framework)
        return made[ranks, framework]

    return get


@pytest.fixture(params=["channel", "no channel"])
def channel(request, monkeypatch):
    """Return a channel for threads, or none, as with horovodrun --gloo."""
    if request.param == "no channel":
        monkeypatch.setattr(LockstepControl, "channel", lambda self, longest_sleep_s: None)


@pytest.mark.slow
@pytest.mark.parametrize("size, layout", [(2, "gathered"), (3, "gathered"), (4, "gathered"), (3, "sharded")])
def test_owners_write_the_state_that_an_unsharded_run_writes(tmp_path, channel, replicas, size, layout):
    whole = replicas(size)
    trained(size, tmp_path / "zero", layout, data_parallel=way("zero", size))
    for step in (4, 8):
        name = f"checkpoints/step-{step:08d}"
        assert state_of(tmp_path / "zero" / name) == state_of(whole / name)
        if layout == "gathered":
            for group in ("model", "optimizer"):
                one, other = (run / name / f"{group}.safetensors" for run in (tmp_path / "zero", whole))
                assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("before, after, layout", [("zero", "zero", "gathered"), ("zero", "replicate", "gathered"),
                                                   ("replicate", "zero", "gathered"), ("zero", "zero", "sharded")])
def test_any_ranks_go_on_with_the_bits_of_a_run_that_never_stopped(tmp_path, replicas, size, before, after, layout):
    """Three ranks stop after step 4; what goes on at other ranks equals, to the bit, replicas that do the same."""
    trained(3, tmp_path / "got", layout, max_steps=4, data_parallel=way(before, 3))
    runs = trained(size, tmp_path / "got", layout, resume="auto", data_parallel=way(after, size, stage=1))
    assert {run.state.cursor.step for run in runs} == {8} and len({bits(run) for run in runs}) == 1
    got, want = (state_of(out / "checkpoints/step-00000008") for out in (tmp_path / "got", replicas((3, size))))
    assert got == want


def test_other_ranks_go_on_without_the_residuals_of_a_compressor(tmp_path):
    """As replicas do, to the bit: what the ranks of before still owed is given up, which a note says."""
    for name in ("zero", "replicate"):
        more = {"compression": "int8", "framework": "torch"}
        trained(3, tmp_path / name, max_steps=4, data_parallel=way(name, 3), **more)
        runs = trained(2, tmp_path / name, resume="auto", data_parallel=way(name, 2), **more)
        assert len({bits(run) for run in runs}) == 1 and runs[0].dp.compression == "int8"
        assert any("compressor state" in note for note in runs[0].notes)
    got, want = (state_of(tmp_path / name / "checkpoints/step-00000008") for name in ("zero", "replicate"))
    assert got == want


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("before, after", [("zero", "zero"), ("zero", "replicate"), ("replicate", "zero")])
def test_adams_state_goes_from_owners_to_owners_in_each_framework(tmp_path, replicas, framework, before, after):
    trained(3, tmp_path / "got", max_steps=4, data_parallel=way(before, 3), framework=framework)
    runs = trained(2, tmp_path / "got", resume="auto", data_parallel=way(after, 2), framework=framework)
    assert len({bits(run) for run in runs}) == 1 and runs[0].state.cursor.step == 8
    for step in (4, 8):
        got, want = (state_of(out / f"checkpoints/step-{step:08d}")
                     for out in (tmp_path / "got", replicas((3, 2), framework)))
        assert got == want, step


@pytest.mark.slow
@pytest.mark.parametrize("framework, other", [("torch", "tf_models"), ("tensorflow", "torch_models")])
def test_convert_makes_the_same_run_of_the_other_framework_from_divided_state(tmp_path, framework, other):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    folder = {"torch": "torch_models", "tensorflow": "tf_models"}[framework]
    shape = {"in_features": FEATURES, "hidden": [HIDDEN], "classes": CLASSES, "activation": "tanh"}
    made = {}
    for name in ("zero", "replicate"):
        trained(3, tmp_path / name, max_steps=4, data_parallel=way(name, 3), framework=framework,
                model=f"{folder}.mlp:build", model_args=shape)
        new = tmp_path / f"{name}-new"
        new.mkdir()
        asked = completed(Request(places.source_of(str(tmp_path / name), print), places.target_of(str(new)),
                                  twin=f"{other}.mlp:build", input_shape=[FEATURES]))
        worker.read(asked, tmp_path / f"{name}-exchange")
        report = worker.write(asked, tmp_path / f"{name}-exchange", new)
        assert report["slots"] == ["m", "v"] and report["apart"] <= 1e-5
        made[name] = state_of(new / "checkpoints/step-00000004")
    assert made["zero"] == made["replicate"]


@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_a_run_that_stops_and_goes_on_has_the_bits_of_one_that_does_not(tmp_path, replicas, first, then):
    trained(3, tmp_path / "run", max_steps=4, data_parallel=way("zero", 3, first))
    other = DataParallelConfig("zero", then, [0, 1, 1])
    runs = trained(3, tmp_path / "run", resume="auto", data_parallel=other)
    assert len({bits(run) for run in runs}) == 1
    name = "checkpoints/step-00000008"
    assert state_of(tmp_path / "run" / name) == state_of(replicas(3) / name)
    held = [sum(a.size for _, _, a in run.parts.optimizer.slots()) for run in runs]
    assert held[0] == 0 and abs(held[1] - held[2]) <= 32 * len(runs[0].dp.buckets)
    assert np.isfinite(runs[0].state.loss)


def test_what_checkpoints_take_of_the_disk_counts_all_owners_slices(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("hvdtrain.checkpoint.savers.warning",
                        lambda settings, one_bytes, free, n_best: said.append(one_bytes))
    for name in ("replicate", "zero"):
        trained(3, tmp_path / name, data_parallel=way(name, 3))
    assert len(said) == 2 and said[0] == said[1] > 0
