"""Plain MPI's exchange continues while the program computes: sums, parts, and a compressor's second request."""

import threading
import time

import numpy as np
import pytest
from collectives_cases import CASES, as_is, name_of

from hvdtrain.cluster.messages.progress import MpiProgress, Operation
from hvdtrain.comm.collectives import rounds
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.comm.collectives.rounds import Peers, Reduced
from hvdtrain.core.protocols import AllGather, AllReduce, AllToAll

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def wire(comm):
    found = MpiCollectives(comm, timeout_s=60)
    assert found.overlaps, "MPI was not started for several threads"
    return found


def until(test, limit_s=30.0):
    """Compute something else until ``test`` is true."""
    ends_at = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < ends_at, "nothing moved while nobody waited"
        sum(range(1000))
        time.sleep(0)


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_in_small_pieces(comm, check, monkeypatch):
    """As many rounds as a large vector has."""
    for name in ("PIECE", "LEAST_PIECE"):
        monkeypatch.setattr(rounds, name, 4096 if "bits" in check.__name__ else 64)
    check(MpiCollectives(comm, timeout_s=60), as_is, as_is)


def test_a_sum_arrives_while_the_program_computes(wire):
    xs = [np.full(n, float(wire.rank), np.float32) for n in (700_001, 3, 400_000)]
    handles = [wire.allreduce(x, f"sum {i}") for i, x in enumerate(xs)]
    until(lambda: all(handle.done() for handle in handles))
    for x, handle in zip(xs, handles):
        assert handle.wait() is x and (x == wire.size * (wire.size - 1) / 2).all()


def test_handles_may_be_waited_for_in_any_order(wire):
    handles = [wire.allreduce(np.full(1000 * (i + 1), 1.0, np.float32), f"any order {i}") for i in range(80)]
    order = np.random.default_rng(wire.rank).permutation(80)
    for i in order:
        got = handles[i].wait()
        assert got.size == 1000 * (i + 1) and (got == wire.size).all()


def test_every_rank_adds_in_rank_order(wire):
    """Float sums depend on their order: that of the ranks gives all wires and all numbers of parts the same bits."""
    rows = [np.random.default_rng(r).standard_normal(100_000).astype(np.float32) * 10.0 ** (r - 1)
            for r in range(wire.size)]
    expected = rows[0].copy()
    for row in rows[1:]:
        expected += row
    np.testing.assert_array_equal(wire.allreduce(rows[wire.rank].copy(), "order").wait(), expected)


def exchange(wire, steps, computed_in):
    """Return a compressor's exchange of several requests, which notes the threads it computes in."""
    def run():
        x = np.full(wire.size * 100, float(wire.rank + 1), np.float32)
        for i in range(steps):
            computed_in.append(threading.current_thread())
            if i % 3 == 0:
                got = yield AllToAll(x.reshape(wire.size, -1))
                x = np.repeat(got.sum(0) / wire.size, wire.size)
            elif i % 3 == 1:
                got = yield AllGather(x[:100])
                x = np.concatenate(list(got))
            else:
                x = yield AllReduce(x / wire.size)
        return x, {"steps": steps}
    return run()


def test_the_second_request_starts_when_the_first_has_arrived(wire):
    threads = []
    handles = [wire.drive(exchange(wire, steps, threads), as_is, as_is, f"course {steps}") for steps in (1, 2, 7, 3)]
    until(lambda: all(handle.done() for handle in handles))
    assert threading.current_thread() not in threads
    for steps, handle in zip((1, 2, 7, 3), handles):
        total, state = handle.wait()
        assert state == {"steps": steps}
        np.testing.assert_allclose(total, (wire.size + 1) / 2, rtol=1e-6)


def test_an_error_in_an_exchange_is_told_where_it_is_waited_for(wire):
    def failing():
        yield AllGather(np.ones(3, np.float32))
        raise MemoryError("no room for the sum")

    handle, after = wire.drive(failing(), as_is, as_is, "failing"), wire.allreduce(np.ones(5, np.float32), "after it")
    with pytest.raises(MemoryError, match="no room"):
        handle.wait()
    assert after.wait().tolist() == [float(wire.size)] * 5


def test_ranks_whose_exchanges_ask_for_other_things_all_hear_of_it(wire):
    def asks():
        n = 4 if wire.rank == wire.size - 1 else 3
        yield AllGather(np.ones(n, np.float32))

    handle = wire.drive(asks(), as_is, as_is, "grad.0")
    told = rf"rank 0 entered .*'grad.0.r0' \(3,\).*; rank {wire.size - 1} entered .*\(4,"
    with pytest.raises(RuntimeError, match=told):
        handle.wait()


def test_without_threads_in_mpi_operations_move_where_they_are_waited_for(comm):
    peers = Peers(comm.Dup(), MpiProgress(threaded=False))
    x = np.full(100_000, 1.0, np.float32)
    sizes = rounds.even_parts(x.size, peers.size)
    first = Reduced(peers, "first", 0, 0, x, sizes, spread=True)
    peers.progress.issue(first)
    time.sleep(0.05)
    assert not first.over
    peers.progress.wait(first)
    assert (x == peers.size).all()


def test_a_late_rank_costs_the_others_no_processor_time(wire, comm):
    """They sleep, as they are to where processor time is rationed; 0.5 s of waiting take a small part of it."""
    comm.Barrier()
    if wire.rank == 0:
        time.sleep(0.5)
    began = time.thread_time()  # of this thread: others of the process, such as a Horovod's, are not its wait
    wire.allreduce(np.ones(1000, np.float32), "late").wait()
    assert wire.rank == 0 or time.thread_time() - began < 0.25


def test_what_follows_on_an_operation_that_failed_is_dropped():
    progress, calls = MpiProgress(threaded=False), []
    operation = Operation()
    progress.guarded(operation, lambda: 1 / 0)
    progress.guarded(operation, lambda: calls.append(1))
    assert isinstance(operation.error, ZeroDivisionError) and not calls


def test_messages_of_an_operation_that_takes_long_are_no_others(wire):
    """More operations come after it than there are tags; those wait for it, whatever else is through."""
    large = np.full(6_000_000, 1.0, np.float32)
    slow = wire.allreduce(large, "large")
    handles = [wire.allreduce(np.full(40_000, float(i), np.float32), f"after {i}") for i in range(560)]
    for i, handle in enumerate(handles):
        assert (handle.wait() == i * wire.size).all(), i
    assert (slow.wait() == wire.size).all()
