"""A full disk costs older checkpoints, then time, and never both the last checkpoint and the final model."""

import errno
import os

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import config, lockstep, make_model, samples, weights

from hvdtrain.checkpoint import CheckpointStore, Snapshot, files, read_snapshot
from hvdtrain.config import CheckpointConfig, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import final_files as room
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.trainer import Trainer


class Disk:
    """A disk of ``capacity`` bytes below ``root``, of which files use what they hold."""

    def __init__(self, root, monkeypatch):
        self.root, self.capacity, write = root, 1 << 30, files.write_all

        def write_all(descriptor, chunk):
            inside = os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(root))
            if inside and self.used() + len(chunk) > self.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(descriptor, chunk)

        monkeypatch.setattr(files, "write_all", write_all)
        monkeypatch.setattr(files, "free_bytes", lambda directory: self.capacity - self.used())
        monkeypatch.setattr(room, "WAITS_S", ())

    def used(self):
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file() and path.suffix != ".jsonl")

    def checkpoints(self):
        return sorted(path.name for path in (self.root / "checkpoints").iterdir())


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "aside"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "aside").mkdir()
    return Disk(tmp_path / "run", monkeypatch)


class Fills(Callback):
    """Leaves ``left`` bytes at an event."""

    def __init__(self, disk, event, left):
        self.left, self.disk = left, disk
        setattr(self, event, self.fill)

    def fill(self, run):
        self.disk.capacity = self.disk.used() + self.left


def fit(disk, event, left, **changes):
    keys = {"checkpoint": CheckpointConfig(every_steps=2, keep=3)} | changes
    trainer = Trainer(config(out=str(disk.root), epochs=1, global_batch=8, **keys))
    trainer.fit(make_model("numpy"), samples(64), callbacks=[Fills(disk, event, left)])
    return trainer.run


def test_a_store_gives_up_its_oldest_checkpoints_for_the_next_and_never_the_newest(tmp_path, monkeypatch):
    state = Snapshot({"model": {"w": np.zeros(1000)}})
    store, disk = CheckpointStore(tmp_path / "checkpoints", keep=9), Disk(tmp_path / "checkpoints", monkeypatch)
    for step in (1, 2, 3):
        store.save(state, step)
    said: list[str] = []
    disk.capacity = disk.used() + 12_000
    store.save(state, 4, said.append)  # which takes 17 000, as it is estimated
    assert [one.step for one in store.list()] == [2, 3, 4]
    assert len(said) == 1 and "step-00000001, was removed" in said[0]
    disk.capacity = disk.used()
    with pytest.raises(OSError, match="not enough space"):
        store.save(Snapshot({"model": {"w": np.zeros(10_000)}}), 5, said.append)
    assert [one.step for one in store.list()] == [2, 3, 4], "none goes where that would not help"
    while store.drop_oldest() is not None:
        pass
    assert [one.step for one in store.list()] == [4] and read_snapshot(store.path_of(4)).meta == {}


def test_the_final_model_goes_before_older_checkpoints(disk):
    run = fit(disk, "fit_saved", 100)
    assert disk.checkpoints() == ["step-00000006", "step-00000008"] and (disk.root / "completed.json").exists()
    assert [note for note in run.notes if "the oldest checkpoint, step-00000004, was removed" in note]
    found = load_file(disk.root / "model/model.safetensors")
    assert all(np.array_equal(found[name], array) for name, array in run.parts.state.state()[0]["model"].items())


def test_a_run_waits_for_room(disk, monkeypatch):
    def freed(seconds):
        disk.capacity = 1 << 30

    monkeypatch.setattr(room, "WAITS_S", (7.0, 7.0))
    monkeypatch.setattr("time.sleep", freed)
    fit(disk, "fit_saved", -(1 << 20))
    assert disk.checkpoints() == ["step-00000008"] and (disk.root / "model/model.safetensors").exists()


@pytest.mark.parametrize("stages", [1, 2])
def test_the_final_model_is_written_elsewhere_where_nothing_helps(disk, tmp_path, stages):
    said = []

    def work(run):
        run.callbacks.append(Fills(disk, "fit_saved", -(1 << 20)))
        with pytest.raises(UserError, match=r"No space left.*; it was written to .*aside/run-model-\w+ ") as error:
            Trainer._fit(run)
        said.append((str(error.value), error.value.kind))
        return weights(run)

    settings = config(out=str(disk.root), epochs=1, global_batch=8, checkpoint=CheckpointConfig(every_steps=2, keep=3),
                      pipeline=PipelineConfig(stages))
    lockstep(2, settings, lambda rank: make_model("numpy"), samples(64), work)
    assert len(set(said)) == 1 and said[0][1] == "disk"
    (file,) = (tmp_path / "aside").glob("run-model-*/model.safetensors")
    kept = read_snapshot(disk.root / "checkpoints/step-00000008").tensors["model"]
    assert all(np.array_equal(array, kept[name]) for name, array in load_file(file).items())
    assert disk.checkpoints() == ["step-00000008"] and not (disk.root / "completed.json").exists()
    assert list((disk.root / "model").iterdir()) == []


def test_without_any_room_the_last_checkpoint_is_named(disk, monkeypatch):
    def nowhere(**keys):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def abandoned(self, run, fill=Fills.fill):
        """Fill the disk beside a checkpoint of a later step, of a run that this one does not continue from."""
        CheckpointStore(disk.root / "checkpoints", keep=9).save(Snapshot({"model": {"w": np.zeros(3)}}), 20)
        fill(self, run)

    monkeypatch.setattr("tempfile.mkdtemp", nowhere)
    monkeypatch.setattr(Fills, "fill", abandoned)
    with pytest.raises(UserError, match="could not be written to .*No space left.*of step 8 holds the weights"):
        fit(disk, "fit_saved", -(1 << 20))
    assert disk.checkpoints() == ["step-00000008", "step-00000020"]


def test_a_last_checkpoint_without_room_does_not_take_the_model_along(disk):
    with pytest.raises(UserError, match="the last checkpoint could not be written: .*; the final model is in") as error:
        fit(disk, "fit_end", 3000, checkpoint=CheckpointConfig(every="off"))
    assert error.value.kind == "disk" and not (disk.root / "completed.json").exists()
    assert (disk.root / "model/model.safetensors").exists() and disk.checkpoints() == []


def test_the_next_fit_of_a_trainer_has_forgotten_it(disk):
    trainer = Trainer(config(out=str(disk.root), epochs=1, global_batch=8, checkpoint=CheckpointConfig(every="off")))
    fills = Fills(disk, "fit_end", 3000)
    with pytest.raises(UserError, match="the last checkpoint"):
        trainer.fit(make_model("numpy"), samples(64), callbacks=[fills])
    fills.left = 1 << 30
    assert trainer.fit().steps == 8 and trainer.run.state.findings.unsaved is None
    assert (disk.root / "completed.json").exists() and disk.checkpoints() == ["step-00000008"]
