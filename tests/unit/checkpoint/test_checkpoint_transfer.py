"""State on its way between ranks: to the rank that writes it alone, and back; a rank that fails is everyone's error."""

import threading

import numpy as np
import pytest
from small_runs import config, fitted, lockstep, make_model, samples

from hvdtrain.checkpoint import Snapshot, files, read_snapshot, stream, write_snapshot
from hvdtrain.checkpoint.stream import StreamedContent, head, in_order
from hvdtrain.checkpoint.transfer import arriving, fetch, own_group, whole_shards
from hvdtrain.comm.collectives.lockstep import LockstepControl, LockstepWorld
from hvdtrain.config import CheckpointConfig, DataParallelConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Head, Want
from hvdtrain.engine import session


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch):
    """Use rounds of 100 bytes, so that tensors are divided."""
    monkeypatch.setattr(stream, "PIECE_BYTES", 100)
    monkeypatch.setattr(stream, "PACKED_BYTES", 40)


class Watched:
    """A control that counts bytes received by each rank, and the largest message."""

    received, largest = {}, 0
    lock = threading.Lock()

    def __init__(self, control):
        self._control = control

    def __getattr__(self, name):
        return getattr(self._control, name)

    def send(self, arrays, source, target=None):
        self._control.send(arrays, source, target)
        n_bytes = sum(a.nbytes for a in arrays)
        if self.rank != source and n_bytes:
            with self.lock:
                Watched.received[self.rank] = Watched.received.get(self.rank, 0) + n_bytes
                Watched.largest = max(Watched.largest, n_bytes)


def own(rank):
    """Return what a rank holds for itself: some 300 bytes, with arrays of no element and of no dimension."""
    return {"residual": np.full((2, 33), rank, np.float32), "empty": np.zeros((0, 3)), "seed": np.array(rank),
            "bits": np.full(9 + rank, 7, np.uint16)}


def state(rank):
    """Yield what a rank gives: rank 0 what is alike on all, each its own."""
    if rank == 0:
        yield from whole_shards({"model": {"w": np.arange(60.0).reshape(5, 12)}}, ["model"])
    yield from whole_shards({own_group(rank): own(rank)}, [own_group(rank)])


def same(got, want):
    assert set(got) == set(want)
    for name, array in want.items():
        assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype) and (got[name] == array).all(), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_state_goes_to_the_writer_alone_and_each_rank_gets_what_it_wants(tmp_path, size):
    Watched.received, Watched.largest = {}, 0

    def work(control, wire):
        control = Watched(control)
        shards = in_order(state(control.rank))
        heads_P = [[Head(*one) for one in row] for row in control.gather([tuple(head(shard)) for shard in shards])]
        content = StreamedContent(heads_P, arriving(control, heads_P, shards), {"a": 1})
        if control.rank == 0:
            write_snapshot(tmp_path / "a", content)
        else:
            content.drain()
        control.barrier("written")
        given = dict(Watched.received)
        control.barrier("counted")
        kept = read_snapshot(tmp_path / "a") if control.rank == 0 else None
        rows = control.bcast([tuple(one) for group in kept.tensors.values() for one in group.heads()] if kept else [])
        heads = [Head(*row) for row in rows]
        wants = [Want("model", "w", 0, 60), *(Want(one.group, one.name, 0, one.n) for one in heads
                                              if one.group == own_group(control.rank))]
        back = fetch(control, kept, wants, heads)
        assert set(back) == {"model", own_group(control.rank)}
        same(back[own_group(control.rank)], own(control.rank))
        same(back["model"], {"w": np.arange(60.0).reshape(5, 12)})
        control.barrier("received")
        received = dict(Watched.received)
        control.barrier("counted again")
        low, high = 20 * control.rank, 20 * control.rank + 20
        window = fetch(control, kept, [Want("model", "w", low, high)], heads)
        same(window["model"], {"w": np.arange(60.0)[low:high]})
        return given, received

    n_own = [sum(a.nbytes for a in own(rank).values()) for rank in range(size)]
    for given, received in LockstepWorld(size).run(work):
        assert set(given) <= {0} and given.get(0, 0) == sum(n_own[1:])
        assert all(received[rank] == n_own[rank] + 480 for rank in range(1, size))
    assert Watched.largest <= 100
    tensors = read_snapshot(tmp_path / "a").tensors
    assert list(tensors) == ["model", "optimizer", *(own_group(rank) for rank in range(size))]
    for rank in range(size):
        same(tensors[own_group(rank)], own(rank))


def test_a_file_that_cannot_be_read_is_everyones_error(tmp_path):
    path = write_snapshot(tmp_path / "a", Snapshot({"model": {"w": np.arange(60.0)}}))

    def work(control, wire):
        kept = read_snapshot(path) if control.rank == 0 else None
        control.barrier("open")
        if control.rank == 0:
            (path / "model.safetensors").unlink()
        with pytest.raises(UserError, match="rank 0 on host lockstep: .*model.safetensors cannot be read"):
            fetch(control, kept, [Want("model", "w", 0, 60)], [Head("model", "w", (60,), "<f8", 0, 60)])
        assert control.gather(control.rank) == [0, 1]  # all are in step again

    LockstepWorld(2).run(work)


# --- whole runs ----------------------------------------------------------------------------------------------------

@pytest.fixture(params=["channel", "no channel"])
def channel(request, monkeypatch):
    """Return a channel for threads, or none, as with horovodrun --gloo."""
    if request.param == "no channel":
        monkeypatch.setattr(LockstepControl, "channel", lambda self, longest_sleep_s: None)


def test_a_save_that_one_rank_cannot_give_its_state_for_fails_on_all_and_the_run_goes_on(tmp_path, channel):
    def work(run):
        give = run.rank_state

        def rank_state():
            if run.control.rank == 1 and run.state.cursor.step == 2:
                raise UserError("the device is lost", "a device", "look at it")
            return give()

        run.rank_state = rank_state
        fitted(run)
        return run.notes

    settings = config(global_batch=8, max_steps=4, out=str(tmp_path), checkpoint=CheckpointConfig(every_steps=2))
    for notes in lockstep(2, settings, lambda rank: make_model("numpy"), samples(40), work):
        assert any("step 2: checkpoint not written (rank 1 on host lockstep: the device is lost" in n for n in notes)
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_disk_that_fails_in_the_middle_leaves_all_ranks_in_step(tmp_path, monkeypatch, channel, fails_at):
    """Pieces of 100 bytes, so that the others are in the middle of theirs."""
    real, count = files.write_durably, [0]

    def write(path, pieces):
        count[0] += 1
        if count[0] == fails_at:
            next(iter(pieces))
            raise OSError(28, "No space left on device")
        return real(path, pieces)

    monkeypatch.setattr(files, "write_durably", write)
    settings = config(global_batch=8, max_steps=6, out=str(tmp_path), checkpoint=CheckpointConfig(every_steps=2),
                      data_parallel=DataParallelConfig("zero", 2))
    runs = lockstep(3, settings, lambda rank: make_model("numpy"), samples(40), fitted)
    assert all(any("step 2: checkpoint not written ([Errno 28]" in n for n in run.notes) for run in runs)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_a_checkpoint_has_the_files_it_always_had(tmp_path):
    """Groups without arrays have a file too, as in every checkpoint so far."""
    def work(run):
        give = run.parts.state.state
        run.parts.state.state = lambda place=None: ({**give()[0], "optimizer": {}}, {})
        run.parts.state.load = lambda groups, rest: groups["model"]["w0"] + 0
        fitted(run)
        assert session.save(run) == ""
        session.restore(run, read_snapshot(run.out / "checkpoints/step-00000003") if run.control.rank == 0 else None)

    settings = config(global_batch=8, max_steps=3, out=str(tmp_path))
    lockstep(2, settings, lambda rank: make_model("numpy"), samples(40), work)
    names = [p.name for p in (tmp_path / "checkpoints/step-00000003").iterdir()]
    assert sorted(names) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "rank-0000.safetensors",
                             "rank-0001.safetensors"]
