"""Shared memory within a host passes the cases that all collectives must pass, also with several made-up hosts."""

import gc

import numpy as np
import pytest
from collectives_cases import CASES, as_is, cuts, mixed, name_of

from hvdtrain.cluster.messages import shared_memory
from hvdtrain.comm.collectives import shared
from hvdtrain.comm.collectives.shared import SharedCollectives, SharedUnavailable
from hvdtrain.core.errors import PeerFailed

pytestmark = pytest.mark.mpi(min_size=2)
HOSTS = {"one host": lambda rank: 0, "a host each": lambda rank: rank, "the last apart": lambda rank: int(rank > 1),
         "every other": lambda rank: rank % 2}
LAID_OUT = {"one host": (2, 3), "a host each": (2, 4), "the last apart": (3, 4), "every other": (3, 4)}
"""With how many ranks each layout is tried; with two the others are one of the first two."""


@pytest.fixture(scope="module", params=HOSTS)
def wire(request, comm):
    """Ranks laid out on hosts; what each host's ranks share is real."""
    if comm.size not in LAID_OUT[request.param]:
        pytest.skip(f"tried with {LAID_OUT[request.param]} ranks")
    host = comm.Split(HOSTS[request.param](comm.Get_rank()), key=comm.Get_rank())
    return SharedCollectives(comm, timeout_s=60, chunk=1 << 16, host=host)


@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_shared(wire, check):
    check(wire, as_is, as_is)


@pytest.mark.parametrize("dtype", sorted(shared.SUMMED))
def test_a_buffer_is_summed_in_place(wire, dtype):
    for n in (1, 2, 3, 5, 1000, 3 * shared.TILE + 7, 200_003):
        own_N = wire.buffer(n, dtype)
        assert own_N.shape == (n,) and own_N.dtype == dtype and not own_N.any()
        for turn in (1, 2):
            own_N[:] = np.arange(n) % 97 + turn * wire.rank
            assert wire.allreduce(own_N, f"in place {n} {dtype}").wait() is own_N
            P = wire.size
            np.testing.assert_array_equal(own_N, P * (np.arange(n) % 97) + turn * P * (P - 1) // 2)


@pytest.mark.parametrize("value", [2.0, np.nan, np.inf])
def test_the_squares_of_a_sum_are_told(comm, wire, value):
    n = 3 * shared.TILE + 7
    own_N = wire.buffer(n, "float32")
    for at in (0, 5, n - 1):
        own_N[:] = 1.0 / wire.size
        own_N[at] = value
        wire.looked()
        wire.allreduce(own_N, "squares").wait()
        looked = comm.allgather(wire.looked())
        squares = sum(part for _, part in looked)
        if np.isfinite(value):
            assert {count for count, _ in looked} == {n}
            assert squares == pytest.approx(float(np.square(own_N.astype(np.float64)).sum()), rel=1e-5)
        else:
            assert not np.isfinite(squares) and wire.looked() == (0, 0.0)


@pytest.mark.parametrize("dtype", sorted(shared.SUMMED))
@pytest.mark.parametrize("where", ["flight", "buffer", "elsewhere"])
def test_a_part_has_the_bits_of_the_whole_sum(wire, where, dtype):
    """On one host, and on two where a sum of two has one order; vectors in flight are shorter and longer in turn."""
    P, r = wire.size, wire.rank
    for turn, n in enumerate((1000, 3 * shared.TILE + 7, 40, 3 * shared.TILE + 7)):
        for i, sizes in enumerate(cuts(n, P)):
            values = mixed(r, n, turn + i, dtype)
            whole = wire.allreduce(values.copy(), f"whole {n}").wait()
            make = {"flight": wire.flight, "buffer": wire.buffer, "elsewhere": np.empty}[where]
            own = make(n, dtype)
            own[:] = values
            part = wire.reducescatterv(own, sizes, f"part {n}").wait()
            first = sum(sizes[:r])
            own[:first], own[first + sizes[r]:] = -1, -1  # of the vector nothing but this part is read any more
            if where == "flight":
                own[:] = -1
            if len(wire.hosts) < 3:
                np.testing.assert_array_equal(part, whole[first:first + sizes[r]])
            assert (where == "buffer") == np.shares_memory(part, own) or not sizes[r]
            together = wire.allgatherv(part, sizes, f"together {n}").wait()
            if len(wire.hosts) < 3:
                np.testing.assert_array_equal(together, whole)


def test_there_is_one_vector_in_flight_for_each_type(wire):
    first = wire.flight(3000, "float32")
    assert np.shares_memory(wire.flight(2000, "float32"), first) and wire.flight(4, "float64").dtype == np.float64
    assert wire.flight(4, "float16") is None and wire.flight(0, "float32") is None


def test_what_came_together_is_shared_by_the_ranks_of_a_host(wire):
    sizes = cuts(5000, wire.size)[0]
    kept = [wire.allgatherv(np.full(sizes[wire.rank], float(wire.rank)), sizes, "kept").wait() for _ in range(2)]
    assert np.shares_memory(*kept)


def test_each_rank_hands_over_any_of_its_slots(wire):
    """Slots that were not chosen stay; a mean is the sum over the ranks."""
    slots = wire.buffers(1000, "float32", 3)
    mine = slots[(wire.rank + 1) % 3]
    for slot in slots:
        slot[:] = -1.0
    mine[:] = wire.rank
    assert wire.allreduce(mine, "a slot", "mean").wait() is mine
    assert (mine == np.float32((wire.size - 1) / 2)).all() and sum(slot[0] == -1.0 for slot in slots) == 2
    assert wire.buffers(4, "float16", 3) == []


def test_buffers_do_not_touch_each_other(wire):
    first, second = wire.buffer(10, "float32"), wire.buffer(10, "float32")
    second[:] = 7.0
    first[:] = 1.0
    wire.allreduce(first, "first").wait()
    assert (first == wire.size).all() and (second == 7.0).all()


def test_a_part_of_a_buffer_is_not_mistaken_for_it(wire):
    own_N = wire.buffer(10, "float32")
    own_N[:] = 1.0
    got = wire.allreduce(own_N[:4], "part").wait()
    assert (got == wire.size).all() and (own_N == 1.0).all()


def test_no_buffer_for_what_is_not_summed_here(wire):
    assert wire.buffer(4, "float16") is None and wire.buffer(0, "float32") is None


def test_ranks_that_cannot_share_say_so_together(comm, monkeypatch):
    if comm.Get_rank() == comm.Get_size() - 1:
        monkeypatch.setattr(shared_memory.mmap, "mmap", refuse)
    with pytest.raises(SharedUnavailable, match="a rank cannot open the memory of another: not allowed"):
        SharedCollectives(comm, timeout_s=60)


def refuse(*args):
    raise OSError("not allowed")


def test_no_file_stays_open(comm):
    from pathlib import Path

    def held():
        gc.collect()
        return sum("hvdtrain-gradients" in str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink())

    before = held()
    SharedCollectives(comm, timeout_s=60).buffer(1000, "float32")
    assert held() == before


def test_a_rank_that_has_ended_is_told_by_those_of_its_host(comm, monkeypatch):
    """Within seconds, not when the transport's own bound is over."""
    monkeypatch.setattr(shared, "LOOK_S", 0.05)
    monkeypatch.setattr(shared, "GRACE_S", 0.2)
    wire = SharedCollectives(comm, timeout_s=60, host=comm.Split(0, key=comm.Get_rank()))
    if wire.rank == wire.size - 1:
        wire.leave()
    else:
        with pytest.raises(PeerFailed, match=f"rank {wire.size - 1} has ended.*same number of steps"):
            wire.allreduce(np.ones(4, np.float32), "one step more").wait()
