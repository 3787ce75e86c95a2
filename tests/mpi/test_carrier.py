"""Transport of a pipeline's messages between ranks: over memory of the host, and over MPI."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import time
import weakref

import numpy as np
import pytest

from hvdtrain.cluster.messages import carrier as carriers
from hvdtrain.cluster.messages import channel, message_slots
from hvdtrain.core.errors import PeerFailed, UserError, WaitTimeout
from hvdtrain.core.protocols import Cargo
from hvdtrain.parallel.pipeline.messages import BACK, FORTH, MessageLabel, Post

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


@pytest.fixture(params=["memory", "MPI"])
def carrier(request, comm, control):
    """Return a carrier between all ranks."""
    made = carriers.over_mpi(comm, 30.0, near=request.param == "memory")
    assert (made._near is not None) == (request.param == "memory")
    yield made
    control.barrier("all through")
    made.flush()
    made.free()


def cargo(*arrays):
    return Cargo(arrays, tuple(a.dtype.name for a in arrays))


def test_cargo_of_all_sizes_goes_round(carrier, control, monkeypatch):
    monkeypatch.setattr(channel, "CHUNK", 1 << 20)  # so that a message is cut
    post, to, source = Post(carrier, "h"), (control.rank + 1) % control.size, (control.rank - 1) % control.size
    sizes = [0, 1, 4000, 16384, 300_000, 5_000_000, 1, 70_000]
    for micro, n in enumerate(sizes):
        for kind in (FORTH, BACK):
            post.send(cargo(np.full(n, control.rank + micro, np.uint8), np.ones((2, kind))), to,
                      MessageLabel(kind, 3 + kind, micro, n))
            post._shapes[2 + kind, micro] = [[2, kind]] if kind == FORTH else [[n], [2, kind]]
    for micro, n in enumerate(sizes):
        for kind in (BACK, FORTH):
            got = post.receive(source, MessageLabel(kind, 3 + kind, micro, n)).arrays
            assert got[0].shape == (n,) and (got[0] == source + micro).all() and got[1].shape == (2, kind)


def test_more_messages_than_there_is_room_for_wait_for_their_receiver(carrier, control):
    post, other = Post(carrier, "h", room=3), control.size - 1
    if control.rank == 0:
        for micro in range(200):
            post.send(cargo(np.full(3000, micro)), other, MessageLabel(FORTH, 0, micro, 1))
    if control.rank == other:
        kept = [post.receive(0, MessageLabel(FORTH, 0, micro, 1)) for micro in range(200)]
        assert all((x.arrays[0] == micro).all() for micro, x in enumerate(kept))


def test_both_sides_of_a_disagreement_are_named_on_both(carrier, control):
    post, other = Post(carrier, f"host{control.rank}"), 1 - control.rank
    if control.rank > 1:
        return
    if control.rank == 0:
        post.send(cargo(np.ones(3)), 1, MessageLabel(FORTH, 0, 5, 4))
    label = MessageLabel(BACK, 1, 5, 4) if control.rank == 0 else MessageLabel(FORTH, 0, 6, 4)
    with pytest.raises(RuntimeError, match="rank 0 on host host0 sent .* micro-batch 5 of .* rank 1 on host host1 "
                                           "expects .* micro-batch 6"):
        post.receive(other, label)


def test_a_message_that_does_not_come_is_named(carrier, control):
    for part in (carrier._near, carrier._far):
        if part is not None:
            part.timeout_s = 0.1
    other = (control.rank + 1) % control.size
    with pytest.raises(WaitTimeout, match=rf"rank {control.rank} .* waited 0.1 s in a message with outputs from rank"):
        carrier.take(other, 0).wait()
    control.barrier("all have waited")
    carrier.put([np.ones(1)], (control.rank - 1) % control.size, 0)


def test_memory_of_messages_is_used_again_and_none_of_it_has_a_name(comm, control):
    made = carriers.over_mpi(comm, 30.0)
    post, other = Post(made, "h"), (control.rank + 1) % control.size
    before = set(os.listdir("/dev/shm"))
    for step in range(20):
        post.begin(step)
        post.send(cargo(np.full(100_000, step)), other, MessageLabel(FORTH, 0, 0, 1))
        got = post.receive((control.rank - 1) % control.size, MessageLabel(FORTH, 0, 0, 1))
        assert (got.arrays[0] == step).all()
        del got
        gc.collect()
        control.barrier("all have forgotten it")
    slots = [slot for sending in made._near._sending.values() for slot in sending._slots]
    assert len(slots) <= 2
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "hvdtrain" in name]
    made.free()


@pytest.mark.parametrize("carrier", ["MPI"], indirect=True)
def test_memory_of_a_message_needs_no_garbage_collection(carrier, control):
    gc.disable()
    try:
        carrier.put([np.ones(100_000)], (control.rank + 1) % control.size, FORTH)
        message = carrier.take((control.rank - 1) % control.size, FORTH)
        assert message.wait().nbytes == 800_000
        alive, ends_at = weakref.ref(message), time.monotonic() + 5
        del message
        while alive() is not None and time.monotonic() < ends_at:
            time.sleep(0.001)  # the thread that has moved it lets go of it
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("carrier", ["memory"], indirect=True)
def test_message_of_a_rank_that_has_ended_is_that_ranks_failure(carrier, control, monkeypatch):
    if control.rank == 0:
        carrier.put([np.arange(5)], 1, FORTH)
    elif control.rank == 1:
        coming = carrier.take(0, FORTH)
        coming.wait_begun()
        with subprocess.Popen(["true"]) as ended, monkeypatch.context() as patch:
            ended.wait()
            patch.setattr(coming._lane, "_pid", ended.pid)
            with pytest.raises(PeerFailed, match="rank 0 (has )?ended"):
                coming.wait()
        assert coming.wait().view(np.int64)[:5].tolist() == [0, 1, 2, 3, 4]


def test_no_more_open_files_are_said_in_words(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        message_slots.more_files()
        most = message_slots._FILES
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (most if hard < 0 else min(hard, most))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def refuse(name):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(UserError, match=r"Too many open files.*ulimit -n"):
        message_slots.MessageSlot(1, 10)
