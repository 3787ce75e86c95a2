"""Saves in the background: the bits of saves that are waited for, at each of many steps, and never a false success."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from small_runs import FRAMEWORKS, Record, config, fitted, lockstep, make_model, samples, solo

from hvdtrain.checkpoint import CheckpointStore, files, read_snapshot
from hvdtrain.checkpoint.savers import BackgroundSaver, HostCopies, InlineSaver, NoRoom
from hvdtrain.comm.collectives.lockstep import LockstepControl
from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.core.errors import UserError, WaitTimeout
from hvdtrain.engine import loop, saving, session
from hvdtrain.engine.callbacks.base import Callback

DATA = samples(48)


def settings(out, framework="numpy", **changes):
    """12 steps, of Adam where there is one, a checkpoint at each second one, all kept."""
    return config(**{"out": str(out), "global_batch": 8, "max_steps": 12,
                     "optimizer": Named("SGD" if framework == "numpy" else "Adam"),
                     "checkpoint": CheckpointConfig(every_steps=2, at_end=False, keep=20), **changes})


def kept(out, own=True):
    """Every checkpoint: step -> (group -> bytes of its arrays, in order; the manifest's facts).

    Not by name: Keras counts models within a process. ``own``: with what ranks hold for themselves.
    """
    found = {}
    for path in sorted((out / "checkpoints").glob("step-*")):
        snapshot = read_snapshot(path)
        facts = {key: value for key, value in snapshot.meta.items() if key != "config"}  # which names the directory
        found[path.name] = {group: [array.tobytes() for _, array in sorted(arrays.items())]
                            for group, arrays in snapshot.tensors.items()
                            if own or not group.startswith("rank-")}, facts
    return found


@pytest.fixture
def slow_disk(monkeypatch):
    """Slow the disk down, so that training runs for steps while files are written."""
    write = files.write_durably

    def slowly(path, pieces):
        time.sleep(0.03)
        return write(path, pieces)

    monkeypatch.setattr(files, "write_durably", slowly)


class Inline(InlineSaver):
    """In place of the saver with a thread."""


@pytest.mark.slow
@pytest.mark.parametrize("framework", ("numpy", *FRAMEWORKS))
def test_a_save_beside_training_has_the_bits_of_one_that_is_waited_for(tmp_path, monkeypatch, slow_disk, framework):
    fitted(solo(settings(tmp_path / "beside", framework), make_model(framework), DATA))
    monkeypatch.setattr(saving, "BackgroundSaver", Inline)
    fitted(solo(settings(tmp_path / "waited", framework), make_model(framework), DATA))
    beside, waited = kept(tmp_path / "beside"), kept(tmp_path / "waited")
    assert len(beside) == 6 and beside == waited


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_send_their_own_beside_training(tmp_path, monkeypatch, slow_disk, size):
    def run(out):
        lockstep(size, settings(out), lambda rank: make_model("numpy"), DATA, fitted)
        assert set(read_snapshot(out / "checkpoints/step-00000012").tensors) == {
            "model", "optimizer", *(f"rank-{rank:04d}" for rank in range(size))}
        return kept(out, own=False)  # ranks that are threads share Python's generators

    beside = run(tmp_path / "beside")
    monkeypatch.setattr(saving, "BackgroundSaver", Inline)
    assert len(beside) == 6 and beside == run(tmp_path / "waited")


@pytest.mark.slow
@pytest.mark.parametrize("channel", [True, False])
def test_what_a_users_exchange_remembers_is_written_as_it_was(tmp_path, monkeypatch, slow_disk, channel):
    """It may hand out its own array, which the next steps change; also where no thread can send (horovodrun --gloo)."""
    if not channel:
        monkeypatch.setattr(LockstepControl, "channel", lambda self, longest_sleep_s: None)

    class Counts(Callback):
        where = "all"

        def __init__(self):
            self.steps = np.zeros(1000)

        def step_end(self, run):
            run.dp.saved = lambda: {"steps": self.steps}
            self.steps += 1

    def work(run):
        run.callbacks[:0] = [Counts()]
        return fitted(run)

    lockstep(2, settings(tmp_path), lambda rank: make_model("numpy"), DATA, work)
    for step in range(2, 13, 2):
        tensors = read_snapshot(tmp_path / f"checkpoints/step-{step:08d}").tensors
        assert all((tensors[f"rank-{rank:04d}"]["steps"] == step).all() for rank in range(2)), step


class Watch(Callback):
    """Notes on every rank whether a save is under way at the end of a step."""

    where = "all"

    def __init__(self):
        self.busy = []

    def step_end(self, run):
        self.busy.append(run.saver is not None and run.saver.busy())


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The disk waits for two steps more, so training must have gone on."""
    write, later = files.write_durably, threading.Event()

    class Opens(Callback):
        def step_end(self, run):
            if run.state.cursor.step == 6:
                later.set()

    def waits(path, pieces):
        assert later.wait(20), "training did not go on"
        return write(path, pieces)

    monkeypatch.setattr(files, "write_durably", waits)
    run = solo(settings(tmp_path, checkpoint=CheckpointConfig(every_steps=4, at_end=False)), make_model("numpy"), DATA)
    watch = Watch()
    run.callbacks[:0] = [Opens(), watch]
    fitted(run)
    assert watch.busy[4] and run.saver.spent.saves == 3
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000004", "step-00000008", "step-00000012"]


def test_the_next_save_does_not_change_the_one_that_is_under_way(tmp_path, monkeypatch):
    """Threads that come to their turn only when the run wants to save again: the steps stay apart."""
    real = saving.Saving._gather

    def late(self, *args):
        time.sleep(0.03)
        real(self, *args)

    monkeypatch.setattr(saving.Saving, "_gather", late)
    every = CheckpointConfig(every_steps=1, at_end=False, keep=20)
    notes = lockstep(2, settings(tmp_path, max_steps=6, checkpoint=every), lambda rank: make_model("numpy"), DATA,
                     lambda run: fitted(run).notes)
    assert not any("not written" in note for said in notes for note in said)
    assert [one.step for one in CheckpointStore(tmp_path / "checkpoints", 1).list()] == [1, 2, 3, 4, 5, 6]


# --- disks that fail -----------------------------------------------------------------------------------------------

FAULTS = {"EIO": OSError(errno.EIO, "Input/output error"), "ENOSPC": OSError(errno.ENOSPC, "No space left on device"),
          "bug": ZeroDivisionError("division by zero"), "memory": MemoryError()}


class Disk:
    """Spoils system calls of the threads that save, while the newest step is in ``steps``."""

    def __init__(self, monkeypatch, call, fault, nth=1):
        self.bad, self.nth, self.seen = False, nth, 0
        real = getattr(os, call)

        def spoiled(*args, **kwargs):
            if self.bad and threading.current_thread().name.startswith("hvdtrain-save"):
                self.seen += 1
                if self.seen % self.nth == 0:
                    if call == "close":
                        real(*args)
                    if fault == "short":
                        return 0
                    raise FAULTS[fault]
            return real(*args, **kwargs)

        monkeypatch.setattr(f"hvdtrain.checkpoint.files.os.{call}", spoiled)


class Breaks(Callback):
    """Breaks the disk before step 4 is saved, and fixes it before step 8 is."""

    where = "all"

    def __init__(self, disk):
        self.disk = disk

    def step_end(self, run):
        if run.control.rank == 0 and run.saver is not None:
            run.saver.wait()  # the disk is as it is for one save at a time
            self.disk.bad = 4 <= run.state.cursor.step < 8


def test_a_save_that_a_callback_asks_for_is_not_blamed_for_the_one_before(tmp_path, monkeypatch):
    disk, told = Disk(monkeypatch, "write", "EIO"), []

    class Saves(Callback):
        where = "all"

        def step_end(self, run):
            if run.saver is not None:
                run.saver.wait()
            if run.control.rank == 0:
                disk.bad = run.state.cursor.step == 4
            if run.state.cursor.step == 5:
                told.append(session.save(run))

    def work(run):
        run.callbacks[:0] = [Saves()]
        return fitted(run).notes

    notes = lockstep(2, settings(tmp_path), lambda rank: make_model("numpy"), DATA, work)
    assert told == ["", ""] and all(any("step 4: checkpoint not written (" in n for n in said) for said in notes)


@pytest.mark.slow
@pytest.mark.parametrize("call, fault, nth", [
    ("write", "EIO", 1), ("write", "ENOSPC", 3), ("write", "short", 2), ("fsync", "EIO", 1), ("fsync", "EIO", 4),
    ("close", "ENOSPC", 1), ("rename", "EIO", 1), ("mkdir", "ENOSPC", 1), ("write", "bug", 2), ("write", "memory", 1)])
def test_a_write_that_fails_is_told_on_all_ranks_and_never_a_success(tmp_path, monkeypatch, call, fault, nth):
    disk = Disk(monkeypatch, call, fault, nth)

    def work(run):
        run.callbacks[:0] = [Breaks(disk)]
        fitted(run)
        return run.notes

    notes = lockstep(2, settings(tmp_path), lambda rank: make_model("numpy"), DATA, work)
    for rank, said in enumerate(notes):
        assert any("step 4: checkpoint not written (" in n for n in said), said
        assert any(n.startswith("2 checkpoints could not be written") for n in said), said
    assert any("step 8: checkpoints are written again, after 2 failures" in n for n in notes[0])
    store = CheckpointStore(tmp_path / "checkpoints", 1)
    assert [one.step for one in store.list()] == [2, 8, 10, 12]
    assert [read_snapshot(one.path).meta["cursor"]["step"] for one in store.list()] == [2, 8, 10, 12]


def test_a_failed_write_ends_all_ranks_where_that_is_asked_for(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, "fsync", "EIO")

    def work(run):
        run.callbacks[:0] = [Breaks(disk)]
        with pytest.raises(UserError, match=r"the checkpoint of step 4 could not be written: .*Input/output error"):
            fitted(run)
        return run.state.cursor.step

    stop = CheckpointConfig(every_steps=2, at_end=False, keep=20, on_failure="stop")
    steps = lockstep(2, settings(tmp_path, checkpoint=stop), lambda rank: make_model("numpy"), DATA, work)
    assert steps[0] == steps[1] and 5 <= steps[0] <= 6


def test_a_failure_of_the_last_steps_save_is_told_though_no_vote_follows(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, "fsync", "EIO")
    run = solo(settings(tmp_path, max_steps=6), make_model("numpy"), DATA)
    disk.bad = True
    fitted(run)
    assert "3 checkpoints could not be written, the last 3 in a row" in run.notes


def test_a_rank_that_has_no_state_to_give_fails_that_save_only(tmp_path):
    def work(run):
        give = run.rank_state

        def rank_state():
            if run.control.rank == 1 and run.state.cursor.step == 4:
                raise UserError("the device is lost", "a device", "look at it")
            return give()

        run.rank_state = rank_state
        fitted(run)
        return run.notes

    for notes in lockstep(3, settings(tmp_path), lambda rank: make_model("numpy"), DATA, work):
        assert any("step 4: checkpoint not written (rank 1 on host lockstep: the device is lost" in n for n in notes)
    assert [one.step for one in CheckpointStore(tmp_path / "checkpoints", 1).list()] == [2, 6, 8, 10, 12]


def test_weights_that_are_not_finite_are_never_written(tmp_path):
    class Spoils(Callback):
        def step_end(self, run):
            run.parts.state._model.params["w0"][0, 0] = np.nan if run.state.cursor.step == 4 else 0.5

    run = solo(settings(tmp_path, nan_guard="skip"), make_model("numpy"), DATA)
    run.callbacks[:0] = [Spoils()]
    fitted(run)
    assert any("step 4: checkpoint not written (parameter w0 is not finite" in n for n in run.notes)
    assert 4 not in [one.step for one in CheckpointStore(tmp_path / "checkpoints", 1).list()]


def test_an_error_in_training_leaves_a_whole_checkpoint_and_no_thread(tmp_path, slow_disk):
    class Fails(Callback):
        def step_end(self, run):
            if run.state.cursor.step == 5:
                raise RuntimeError("a user's mistake")

    run = solo(settings(tmp_path), make_model("numpy"), DATA)
    run.callbacks[:0] = [Fails()]
    before = set(threading.enumerate())  # a save outside of a fit keeps its thread for the next one
    with pytest.raises(RuntimeError, match="a user's mistake"):
        loop.fit(run)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("hvdtrain-save")]
    assert read_snapshot(tmp_path / "checkpoints/step-00000004").meta["cursor"]["step"] == 4


def test_a_save_whose_peer_is_gone_is_dropped_at_the_end(tmp_path, monkeypatch):
    """Rank 1 dies after its copy was asked for; rank 0's thread waits for it, and must not hold the process."""
    monkeypatch.setattr(saving, "GRACE_S", 0.2)
    monkeypatch.setattr(saving, "send_shards", lambda *args: None)

    def work(run):
        run.callbacks[:0] = [Record()]
        session.begin(run)
        time.sleep(0.05)
        busy = run.saver.busy()
        run.saver.close()
        return busy, run.saver.busy(), [outcome.error for outcome in run.saver.settled()]

    first, second = lockstep(2, settings(tmp_path), lambda rank: make_model("numpy"), DATA, work)
    assert first == (True, False, ["ChannelClosed: the channel was closed in a message of tag 0 from rank 1"])
    assert second == (False, False, [""]) and not (tmp_path / "checkpoints").exists()


def test_a_save_that_does_not_end_is_named(tmp_path, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(files, "write_durably", lambda path, pieces: never.wait(20))
    run = solo(settings(tmp_path, control_timeout_s=1.0), make_model("numpy"), DATA)
    session.begin(run)
    with pytest.raises(WaitTimeout, match="rank 0 on host .* waited 1 s for the save of step 0 to end"):
        session.begin(run)
    never.set()
    assert run.saver._background.wait(10)


# --- the memory of copies ------------------------------------------------------------------------------------------

def test_copies_are_made_into_the_same_memory_and_counted():
    copies = HostCopies(1)
    for _ in range(2):
        copies.begin()
        first = copies.place("model", "w", (3, 4), np.float32)
        other = copies.place("model", "b", (4,), np.float32)
    assert copies.bytes == 64 and first is copies.place("model", "w", (3, 4), np.float32) and other is not first
    copies.begin()
    assert copies.place("model", "w", (3, 5), np.float32).shape == (3, 5)
    copies.begin()
    assert copies.bytes == 60  # the other one was not asked for any more


def test_copies_that_memory_has_no_room_for_are_not_made(monkeypatch):
    monkeypatch.setattr("hvdtrain.checkpoint.savers.host_room_bytes", lambda local_size: 100 // local_size)
    copies = HostCopies(2)
    copies.begin()
    copies.place("model", "w", (10,), np.float32)
    with pytest.raises(NoRoom):
        copies.place("model", "v", (10,), np.float32)


@pytest.mark.parametrize("framework", ("numpy", *FRAMEWORKS))
def test_without_room_for_copies_training_waits_and_says_so(tmp_path, monkeypatch, framework):
    fitted(solo(settings(tmp_path / "copied", framework), make_model(framework), DATA))
    monkeypatch.setattr("hvdtrain.checkpoint.savers.host_room_bytes", lambda local_size: 100)
    run = fitted(solo(settings(tmp_path / "waited", framework), make_model(framework), DATA))
    assert len([n for n in run.notes if "host memory has no room for a copy of the state" in n]) == 1
    assert kept(tmp_path / "waited") == kept(tmp_path / "copied")


def test_an_exception_of_any_kind_in_the_thread_is_an_outcome():
    saver = BackgroundSaver()
    for step, error in enumerate([SystemExit(3), KeyError("x")]):
        saver.save(step, lambda error=error: (_ for _ in ()).throw(error))
        assert saver.wait(10)
    assert [outcome.error for outcome in saver.settled()] == ["SystemExit: 3", "KeyError: 'x'"] and not saver.settled()
