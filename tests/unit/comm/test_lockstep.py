"""P ranks in one process: agreement, errors, the count of bytes."""

import threading
import time

import numpy as np
import pytest

from hvdtrain.cluster.control import agreed
from hvdtrain.comm.collectives.lockstep import LockstepWorld, ring_bytes
from hvdtrain.core.errors import PeerFailed, UserError, WaitTimeout


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_control(size):
    def work(control, wire):
        for turn in range(3):
            assert control.bcast({"a": turn} if control.rank == 0 else None) == {"a": turn}
            assert control.gather(control.rank * turn) == [r * turn for r in range(size)]
            assert control.sum(np.array([control.rank, 1])).tolist() == [size * (size - 1) / 2, size]
            assert control.agree(control.rank == size - 1) and not control.agree(False)
            control.barrier(f"turn {turn}")
        return control.rank

    assert LockstepWorld(size).run(work) == list(range(size))


def test_ranks_share_no_object():
    def work(control, wire):
        mine = control.bcast([0])
        mine.append(control.rank)
        control.barrier("appended")
        return mine

    assert LockstepWorld(3).run(work) == [[0, 0], [0, 1], [0, 2]]


def test_ranks_share_no_memory():
    def work(control, wire):
        out = wire.allreduce(np.ones(3, np.float32), "a").wait()
        out += control.rank
        control.barrier("added")
        rows = wire.allgather(out, "b").wait()
        rows[:] = -1
        control.barrier("wiped")
        return out.tolist()

    assert LockstepWorld(3).run(work) == [[3.0 + r] * 3 for r in range(3)]


def test_the_argument_may_be_reused_at_once():
    def work(control, wire):
        x = np.full(4, control.rank, np.float32)
        handle = wire.allreduce(x, "a")
        x[:] = 99
        return handle.wait().tolist()

    assert LockstepWorld(3).run(work) == [[3.0] * 4] * 3


@pytest.mark.parametrize("odd, want", [
    (lambda c, w: w.allreduce(np.ones(3, np.float32), "b"),
     r"rank 0 entered allreduce 'a' \(3,\) float32; rank 1 entered allreduce 'b'"),
    (lambda c, w: w.allreduce(np.ones(4, np.float32), "a"), r"rank 1 entered allreduce 'a' \(4,\) float32"),
    (lambda c, w: w.allreduce(np.ones(3, np.float64), "a"), r"rank 1 entered allreduce 'a' \(3,\) float64"),
    (lambda c, w: w.allgather(np.ones(3, np.float32), "a"), r"rank 1 entered allgather 'a' \(3,\) float32"),
    (lambda c, w: c.barrier("x"), r"rank 0 entered allreduce .*; rank 1 entered barrier 'x'"),
], ids=["name", "shape", "dtype", "kind", "control"])
def test_ranks_that_disagree(odd, want):
    def work(control, wire):
        if control.rank == 1:
            return odd(control, wire)
        return wire.allreduce(np.ones(3, np.float32), "a")

    with pytest.raises(RuntimeError, match=want):
        LockstepWorld(2).run(work, timeout_s=5)


def test_roots_that_disagree():
    with pytest.raises(RuntimeError, match="root 0; rank 1 .* root 1"):
        LockstepWorld(2).run(lambda c, w: w.broadcast(np.ones(2), "a", root=c.rank), timeout_s=5)


def test_a_rank_that_raises_releases_the_others_at_once():
    heard = []

    def work(control, wire):
        if control.rank == 1:
            raise KeyError("mine")
        try:
            control.barrier("never")
        except PeerFailed as error:
            heard.append(str(error))
            raise

    started = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        LockstepWorld(3).run(work, timeout_s=30)
    assert time.monotonic() - started < 5 and len(heard) == 2 and "mine" in heard[0]


def test_a_rank_that_finishes_early_is_named():
    with pytest.raises(RuntimeError, match="rank 0 waits in barrier 'x', but rank 1 has finished"):
        LockstepWorld(2).run(lambda c, w: None if c.rank else c.barrier("x"), timeout_s=30)


def test_a_wait_that_runs_out():
    done = threading.Event()
    with pytest.raises(WaitTimeout, match=r"rank 0 waited 0.2 s in barrier 'x' for rank\(s\) \[1\]"):
        LockstepWorld(2).run(lambda c, w: done.wait(1.0) if c.rank else c.barrier("x"), timeout_s=0.2)
    done.set()


def test_sums_are_in_rank_order():
    rows = [np.random.default_rng(r).standard_normal(1000).astype(np.float32) * 10.0 ** r for r in range(4)]
    want = ((rows[0] + rows[1]) + rows[2]) + rows[3]
    for _ in range(3):
        for got in LockstepWorld(4).run(lambda c, w: w.allreduce(rows[c.rank], "a").wait()):
            assert got.tobytes() == want.astype(got.dtype).tobytes()


@pytest.mark.parametrize("kind, nbytes, size, want", [
    ("allreduce", 1200, 1, 0), ("allreduce", 1200, 2, 1200), ("allreduce", 1200, 3, 1600), ("allreduce", 4, 3, 6),
    ("reducescatter", 1200, 3, 800), ("alltoall", 1200, 3, 800), ("allgather", 1200, 3, 2400),
    ("broadcast", 1200, 3, 1200)])
def test_ring_bytes(kind, nbytes, size, want):
    assert ring_bytes(kind, nbytes, size) == want


def test_broadcast_passes_all_ranks_but_the_last():
    sent = [ring_bytes("broadcast", 10, 3, rank, root=1) for rank in range(3)]
    assert sent == [0, 10, 10] and ring_bytes("broadcast", 10, 1) == 0


def test_sent_bytes_are_counted():
    world = LockstepWorld(3)
    x = np.zeros(300, np.float32)

    def work(control, wire):
        wire.allreduce(x, "a")
        wire.allgather(x, "b")
        wire.reducescatter(x, "c")
        wire.alltoall(x.reshape(3, 100), "d")
        wire.broadcast(x, "e")

    world.run(work)
    assert world.sent_bytes == [1600 + 2400 + 800 + 800 + b for b in (1200, 1200, 0)]


def test_agreed_names_the_rank():
    def work(control, wire):
        def read():
            if control.rank == 2:
                raise UserError("cannot read x", "a file", "copy it")
            return control.rank

        try:
            agreed(control, read, "reading")
        except UserError as error:
            return str(error)
        return ""

    assert LockstepWorld(3).run(work) == ["rank 2 on host lockstep: cannot read x; expected a file. Copy it."] * 3


def test_abort_ends_the_world():
    with pytest.raises(SystemExit):
        LockstepWorld(2).run(lambda c, w: c.abort(3) if c.rank else c.barrier("x"), timeout_s=10)
