"""Checkpoints that every rank writes its part of: read by any number of ranks, refused where a part is not whole."""

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from small_runs import FRAMEWORKS, bits, config, fitted, lockstep, make_model, samples, solo

from hvdtrain.checkpoint import CheckpointError, CheckpointStore, adapters, inspect, read_snapshot
from hvdtrain.checkpoint.adapters import part
from hvdtrain.checkpoint.manifest import FileEntry, Manifest, decode, encode
from hvdtrain.comm.collectives.lockstep import LockstepControl
from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.core.errors import UserError

DATA = samples(48)


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch):
    """Tensors of 64 bytes are cut."""
    monkeypatch.setattr(adapters, "LEAST_CUT_BYTES", 64)


def setting(out, framework="numpy", layout="sharded", **changes):
    """12 steps, a checkpoint at each fourth one."""
    return config(**{"out": str(out), "global_batch": 8, "max_steps": 12,
                     "optimizer": Named("SGD" if framework == "numpy" else "Adam"),
                     "checkpoint": CheckpointConfig(every_steps=4, at_end=False, layout=layout), **changes})


def tensors_of(path):
    """Return the state that all ranks hold alike, by group and place: Keras counts its models within a process."""
    snapshot = read_snapshot(path)
    return {group: [(a.shape, a.dtype, a.tobytes()) for _, a in sorted(arrays.items())]
            for group, arrays in snapshot.tensors.items() if not group.startswith("rank-")}


@given(n=strategies.integers(0, 10**6), size=strategies.integers(1, 9), name=strategies.text(max_size=9))
@settings(max_examples=200, deadline=None)
def test_every_element_is_one_ranks(n, size, name):
    parts = [part("model", name, n, 4, rank, size) for rank in range(size)]
    mine = sorted(p for p in parts if p is not None)
    assert mine[0][0] == 0 and mine[-1][1] == n and all(a[1] == b[0] for a, b in zip(mine, mine[1:]))
    assert len(mine) in (1, size)


@pytest.mark.slow
@pytest.mark.parametrize("framework, size", [("numpy", 1), ("numpy", 2), ("numpy", 4), ("torch", 2), ("tensorflow", 2)])
def test_the_ranks_parts_are_the_state_that_one_rank_would_have_written(tmp_path, framework, size):
    for layout in ("gathered", "sharded"):
        lockstep(size, setting(tmp_path / layout, framework, layout), lambda rank: make_model(framework), DATA, fitted)
    path = tmp_path / "sharded/checkpoints/step-00000012"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json", *(f"shard-{rank:04d}.safetensors" for rank in range(size))]
    assert tensors_of(path) == tensors_of(tmp_path / "gathered/checkpoints/step-00000012")
    assert {f"rank-{rank:04d}" for rank in range(size)} < set(read_snapshot(path).tensors)
    assert inspect(path).meta["layout"] == "sharded"
    assert json.loads((path / "manifest.json").read_text())["version"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("framework, before, after", [("numpy", 3, 1), ("numpy", 2, 4), ("numpy", 1, 2),
                                                      *((f, 2, 1) for f in FRAMEWORKS)])
def test_any_number_of_ranks_goes_on_from_shards(tmp_path, framework, before, after):
    whole = fitted(solo(setting(tmp_path / "whole", framework, "gathered"), make_model(framework), DATA))
    first = setting(tmp_path / "run", framework, max_steps=8)
    lockstep(before, first, lambda rank: make_model(framework), DATA, fitted)
    again = setting(tmp_path / "run", framework, resume="auto")
    runs = lockstep(after, again, lambda rank: make_model(framework, seed=5), DATA, fitted)
    assert len({bits(run) for run in runs}) == 1 and runs[0].state.cursor.step == 12
    for got, want in zip(tensors_of(tmp_path / "run/checkpoints/step-00000012")["model"],
                         tensors_of(tmp_path / "whole/checkpoints/step-00000012")["model"]):
        assert np.allclose(np.frombuffer(got[2], got[1]), np.frombuffer(want[2], want[1]), rtol=1e-4, atol=1e-5)
    assert whole.state.cursor.step == 12


def damage_lack(path):
    (path / "shard-0001.safetensors").unlink()


def damage_bit(path):
    data = bytearray((path / "shard-0001.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "shard-0001.safetensors").write_bytes(data)


def damage_short(path):
    os.truncate(path / "shard-0000.safetensors", 200)


def damage_swap(path):
    (path / "shard-0000.safetensors").rename(path / "x")
    (path / "shard-0001.safetensors").rename(path / "shard-0000.safetensors")
    (path / "x").rename(path / "shard-0001.safetensors")


def damage_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 12', '"step": 13', 1))


@pytest.mark.parametrize("damage", [damage_lack, damage_bit, damage_short, damage_swap, damage_manifest])
@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_a_checkpoint_that_is_not_whole_gives_way_to_the_one_before(tmp_path, damage, layout, capsys):
    lockstep(2, setting(tmp_path, layout=layout), lambda rank: make_model("numpy"), DATA, fitted)
    newest = tmp_path / "checkpoints/step-00000012"
    if layout == "gathered":
        for number, group in enumerate(["model", "rank-0001"]):
            (newest / f"{group}.safetensors").rename(newest / f"shard-{number:04d}.safetensors")
        damage(newest)
        for number, group in enumerate(["model", "rank-0001"]):
            if (newest / f"shard-{number:04d}.safetensors").exists():
                (newest / f"shard-{number:04d}.safetensors").rename(newest / f"{group}.safetensors")
    else:
        damage(newest)
    with pytest.raises(CheckpointError):
        read_snapshot(newest)
    run = solo(setting(tmp_path, layout=layout, resume="auto", max_steps=9), make_model("numpy"), DATA)
    assert run.state.cursor.step == 8 and "checkpoint step-00000012 is not used" in capsys.readouterr().out


def test_a_disk_that_fails_on_one_rank_fails_the_checkpoint_of_all(tmp_path, monkeypatch):
    real, failing = os.fsync, threading.Event()

    def fsync(descriptor):
        if failing.is_set() and os.readlink(f"/proc/self/fd/{descriptor}").endswith("shard-0001.safetensors"):
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr("hvdtrain.checkpoint.files.os.fsync", fsync)

    def work(run):
        def step_end(run):
            if run.control.rank != 0:  # the others are done with a save before all are
                return
            run.saver is None or run.saver.wait()
            (failing.set if run.state.cursor.step == 8 else failing.clear)()

        run.callbacks[-1].step_end, ours = lambda run: (step_end(run), ours(run)), run.callbacks[-1].step_end
        fitted(run)
        return run.notes

    for notes in lockstep(3, setting(tmp_path), lambda rank: make_model("numpy"), DATA, work):
        assert any("step 8: checkpoint not written (rank 1: [Errno 5] Input/output error" in n for n in notes), notes
    root = tmp_path / "checkpoints"
    assert [one.step for one in CheckpointStore(root, 1).list()] == [4, 12]
    assert [name for name in os.listdir(root) if name.startswith(".")] == []


def test_a_file_system_that_is_not_shared_is_refused_on_all_ranks(tmp_path, monkeypatch):
    """Rank 2 looks at a disk of its own."""
    monkeypatch.setattr("hvdtrain.checkpoint.sharded.LOOK_S", 0.1)
    lstat = os.lstat

    def other_disk(path, **more):
        if threading.current_thread().name == "lockstep-2" and ".hvdtrain-tmp" in str(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return lstat(path, **more)

    monkeypatch.setattr("hvdtrain.checkpoint.sharded.os.lstat", other_disk)

    def work(run):
        with pytest.raises(UserError, match=r"rank\(s\) 2 do not see rank 0's"):
            fitted(run)

    lockstep(3, setting(tmp_path / "run"), lambda rank: make_model("numpy"), DATA, work)
    assert not (tmp_path / "run").exists()


def test_without_a_channel_the_ranks_write_their_parts_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(LockstepControl, "channel", lambda self, longest_sleep_s: None)
    for layout in ("gathered", "sharded"):
        lockstep(2, setting(tmp_path / layout, layout=layout), lambda rank: make_model("numpy"), DATA, fitted)
    assert (tensors_of(tmp_path / "sharded/checkpoints/step-00000012")
            == tensors_of(tmp_path / "gathered/checkpoints/step-00000012"))


APART = """
from hvdtrain.parallel.data_parallel.alone import Alone


class Apart(Alone):
    def meets(self, step):
        return False


def make(setup):
    return Apart(setup.parts.optimizer, setup.ops)
"""


def test_copies_that_train_apart_are_not_mixed(tmp_path):
    """Between two meetings of a local SGD, of which only its author knows, rank 0's copy is what is saved."""
    (tmp_path / "apart.py").write_text(APART)
    run = setting(tmp_path / "run", data_parallel=f"{tmp_path / 'apart.py'}:make", check_every=0)
    runs = lockstep(2, run, lambda rank: make_model("numpy"), DATA, fitted)
    got = read_snapshot(tmp_path / "run/checkpoints/step-00000012").tensors["model"]
    own = [{name: np.array_equal(got[name], p) for name, p in run.spec.model.params.items()} for run in runs]
    assert all(own[0].values()) and not any(own[1].values())


@pytest.mark.parametrize("shards", [
    {}, {"a.safetensors": {"model/w": [0]}}, {"a.safetensors": {"model/w": [-1, [2]]}}, {"a.safetensors": 3},
    {"a.safetensors": {"model/w": [0, 2]}}, {"a.safetensors": {"../w": [0, [2]]}}, {"b.safetensors": {}}])
def test_shards_of_a_foreign_writer_are_refused(shards):
    files = {"a.safetensors": FileEntry(3, "0" * 64)}
    data = encode(Manifest(1, files, {}, shards or {"b.safetensors": {}}))
    with pytest.raises(CheckpointError):
        decode(data, str(Path("x")))
