"""Frozen weights of checkpoints: in one file that checkpoints share, also with resumed runs, not where they differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, config, fitted, lockstep, samples, weights

from hvdtrain.checkpoint import CheckpointStore, Snapshot
from hvdtrain.checkpoint.files import write_durably, write_or_link
from hvdtrain.checkpoint.frozen import GROUP
from hvdtrain.config import CheckpointConfig, DataParallelConfig, Named

FILE = f"{GROUP}.safetensors"
BIG = 400  # outputs of a layer whose kernel is frozen and large


def frozen_model(framework):
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        torch.manual_seed(0)
        base = torch.nn.Linear(FEATURES * 8, BIG).requires_grad_(False)
        return torch.nn.Sequential(base, torch.nn.ReLU(), torch.nn.Linear(BIG, CLASSES))
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    keras.utils.set_random_seed(0)
    base = keras.layers.Dense(BIG, "relu", trainable=False)
    return keras.Sequential([keras.Input((FEATURES * 8,)), base, keras.layers.Dense(CLASSES)])


def wide(n=24):
    x, y = samples(n)
    return np.tile(x, 8), y


def trained(framework, out, size=2, **changes):
    asked = config(global_batch=8, max_steps=4, optimizer=Named("Adam"), out=str(out),
                   checkpoint=CheckpointConfig(every_steps=2, keep=3, at_end=False))
    return lockstep(size, replace(asked, **changes), lambda rank: frozen_model(framework), wide(), fitted)


@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_checkpoints_share_frozen_weights_and_a_resumed_run_continues_from_them(framework, tmp_path):
    whole = trained(framework, tmp_path / "whole", max_steps=6)
    trained(framework, tmp_path / "two")
    steps = sorted((tmp_path / "two" / "checkpoints").iterdir())
    assert [step.name for step in steps] == ["step-00000002", "step-00000004"]
    assert len({(step / FILE).stat().st_ino for step in steps}) == 1 and (steps[0] / FILE).stat().st_nlink == 2
    assert len({(step / "model.safetensors").stat().st_ino for step in steps}) == 2
    assert (steps[0] / "model.safetensors").stat().st_size < (steps[0] / FILE).stat().st_size
    for size, changes in ((1, {}), (2, {"data_parallel": DataParallelConfig("zero", 2)})):
        run = trained(framework, tmp_path / "two", size, resume=str(steps[-1]), max_steps=6, **changes)[0]
        for a, b in zip(weights(run), weights(whole[0]), strict=True):
            assert np.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_unfrozen_weights_lie_with_the_others(tmp_path):
    trained("torch", tmp_path, size=1, freeze={"0": 1})
    first, second = sorted((tmp_path / "checkpoints").iterdir())
    assert (first / FILE).exists() and not (second / FILE).exists()


def test_a_store_shares_the_file_only_while_its_bytes_are_the_same(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)

    def content(seed):
        return Snapshot({"model": {"w": np.arange(4.0)}, GROUP: {"base": np.full(30000, seed, np.float32)}}, {})

    paths = [store.save(content(seed), step) for step, seed in enumerate((1, 1, 1, 2))]
    assert not paths[0].exists() and not paths[1].exists()
    assert (paths[2] / FILE).stat().st_nlink == (paths[3] / FILE).stat().st_nlink == 1
    _, found = store.latest_whole(print)
    assert list(found.tensors) == ["model"]
    assert found.tensors["model"]["base"][7] == 2 and found.tensors["model"]["w"].tolist() == [0, 1, 2, 3]
    damaged = bytearray((paths[3] / FILE).read_bytes())
    damaged[-1] ^= 1
    (paths[3] / FILE).write_bytes(damaged)
    last = store.save(content(2), 4)
    assert (last / FILE).stat().st_nlink == 1 and store.latest_whole(print)[0] == last


@pytest.mark.parametrize("change", [0, 70_000, 99_999, None])
def test_a_file_that_differs_anywhere_is_written(tmp_path, monkeypatch, change):
    monkeypatch.setattr("hvdtrain.checkpoint.files.CHUNK_BYTES", 1 << 15)
    data = np.random.default_rng(0).integers(0, 255, 100_000).astype(np.uint8)
    before = write_durably(tmp_path / "a", [data.data])
    if change is not None:
        data[change] ^= 1
    entry = write_or_link(tmp_path / "b", [data[:30_000].data, data[30_000:].data], tmp_path / "a")
    assert (tmp_path / "b").read_bytes() == data.tobytes() and (entry == before) == (change is None)
    assert (tmp_path / "b").stat().st_nlink == (2 if change is None else 1)
    shorter = write_or_link(tmp_path / "c", [data[:50_000].data], tmp_path / "a" if change is None else tmp_path / "b")
    assert (tmp_path / "c").stat().st_size == shorter.size_bytes == 50_000


def test_a_file_system_without_hard_links_gets_a_copy(tmp_path, monkeypatch):
    def refused(*args, **more):
        raise OSError(1, "Operation not permitted")

    write_durably(tmp_path / "a", [memoryview(b"abc")])
    monkeypatch.setattr("os.link", refused)
    assert write_or_link(tmp_path / "b", [memoryview(b"abc")], tmp_path / "a").size_bytes == 3
    assert (tmp_path / "b").read_bytes() == b"abc" and (tmp_path / "b").stat().st_nlink == 1
