"""State on its way between ranks: to the rank that writes it alone, and back; a rank that fails is everyone's error."""

import threading

import numpy as np
import pytest
from small_runs import config, fitted, lockstep, make_model, samples

from hvdtrain.checkpoint import read_snapshot, session, transfer
from hvdtrain.checkpoint.transfer import collect, own_group, spread, whole_shards
from hvdtrain.collectives.lockstep import LockstepWorld
from hvdtrain.config import Checkpoint
from hvdtrain.errors import UserError
from hvdtrain.protocols.state import Shard


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch):
    """Rounds of 100 bytes, so that tensors are cut."""
    monkeypatch.setattr(transfer, "ROUND_BYTES", 100)


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
    """What a rank holds for itself: some 300 bytes, with arrays of no element and of no dimension."""
    return {"residual": np.full((2, 33), rank, np.float32), "empty": np.zeros((0, 3)), "seed": np.array(rank),
            "bits": np.full(9 + rank, 7, np.uint16)}


def state(rank):
    """What a rank gives: rank 0 what is alike on all, each its own."""
    if rank == 0:
        yield from whole_shards({"model": {"w": np.arange(60.0).reshape(5, 12)}}, ["model"])
    yield from whole_shards({own_group(rank): own(rank)}, [own_group(rank)])


def same(got, want):
    assert set(got) == set(want)
    for name, array in want.items():
        assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype) and (got[name] == array).all(), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_state_goes_to_the_writer_alone_and_each_rank_gets_its_own_back(size):
    Watched.received, Watched.largest = {}, 0

    def work(control, wire):
        control = Watched(control)
        tensors = collect(control, state(control.rank))
        assert (tensors == {}) == (control.rank > 0)
        if control.rank == 0:
            assert list(tensors) == ["model", *(own_group(r) for r in range(size))]
            for rank in range(size):
                same(tensors[own_group(rank)], own(rank))
        given = dict(Watched.received)
        control.barrier("collected")
        back = spread(control, tensors, own=True)
        assert set(back) == {"model", own_group(control.rank)}
        same(back[own_group(control.rank)], own(control.rank))
        same(back["model"], {"w": np.arange(60.0).reshape(5, 12)})
        assert set(spread(control, tensors, own=False)) == {"model"}
        return given

    n_own = [sum(a.nbytes for a in own(rank).values()) for rank in range(size)]
    for given in LockstepWorld(size).run(work):
        assert set(given) <= {0}
    assert Watched.received.get(0, 0) == sum(n_own[1:]) and Watched.largest <= 100
    assert all(Watched.received[rank] == n_own[rank] + 2 * 480 for rank in range(1, size))


def test_a_tensor_may_be_cut_over_the_ranks():
    def work(control, wire):
        values = np.arange(40.0)[control.rank * 10:][:10]
        return collect(control, [Shard("optimizer", "m", (8, 5), control.rank * 10, values)])

    found = LockstepWorld(4).run(work)
    same(found[0]["optimizer"], {"m": np.arange(40.0).reshape(8, 5)})


def test_a_tensor_that_two_ranks_give_is_refused_on_all():
    def work(control, wire):
        with pytest.raises(UserError, match="'m' of group 'optimizer': some of the elements 0 to 12 came twice"):
            collect(control, [Shard("optimizer", "m", (8, 5), 0, np.arange(40.0))])

    LockstepWorld(2).run(work)


@pytest.mark.parametrize("odd, after", [(0, 0), (1, 0), (2, 3)])
def test_a_rank_that_fails_while_it_gives_its_state_is_everyones_error(odd, after):
    def failing(rank):
        for count, shard in enumerate(state(rank)):
            if rank == odd and count == after:
                raise UserError("the device is lost", "a device", "look at it")
            yield shard

    def work(control, wire):
        with pytest.raises(UserError, match=f"rank {odd} on host lockstep: the device is lost"):
            collect(control, failing(control.rank))
        assert control.gather(control.rank) == [0, 1, 2]  # all are in step again

    LockstepWorld(3).run(work, timeout_s=10)


def test_a_rank_that_crashes_while_it_gives_its_state_ends_the_others():
    def work(control, wire):
        collect(control, ([][0] for _ in range(2)) if control.rank == 1 else state(control.rank))

    with pytest.raises(IndexError):
        LockstepWorld(3).run(work, timeout_s=10)


# --- whole runs ----------------------------------------------------------------------------------------------------

def test_a_save_that_one_rank_cannot_give_its_state_for_fails_on_all_and_the_run_goes_on(tmp_path):
    def work(run):
        give = run.rank_state

        def rank_state():
            if run.control.rank == 1 and run.state.cursor.step == 2:
                raise UserError("the device is lost", "a device", "look at it")
            return give()

        run.rank_state = rank_state
        fitted(run)
        return run.notes

    settings = config(global_batch=8, max_steps=4, out=str(tmp_path), checkpoint=Checkpoint(every_steps=2))
    for notes in lockstep(2, settings, lambda rank: make_model("numpy"), samples(40), work):
        assert any("step 2: checkpoint not written (rank 1 on host lockstep: the device is lost" in n for n in notes)
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]


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
