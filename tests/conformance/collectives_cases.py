"""Cases that every `hvdtrain.core.protocols.Collectives` must pass: ``check_*(wire, make, host)``.

Every rank calls the same check. ``make`` turns a numpy array into what the collectives take, ``host`` turns their
result back. Answers are in closed form: rank r contributes r, so that the mean of ranks is (P-1)/2.
Each call is made twice, with other values the second time: a cache that outlives its first call is caught.
"""

from __future__ import annotations

import functools
import zlib

import numpy as np


def check_flags(wire, make, host):
    assert isinstance(wire.name, str) and 0 <= wire.rank < wire.size
    assert "float32" in wire.dtypes and isinstance(wire.dtypes, frozenset)
    assert all(isinstance(flag, bool) for flag in (wire.overlaps, wire.in_graph, wire.host))


def check_allreduce(wire, make, host):
    P, r = wire.size, wire.rank
    for n in (1, 2, 7, 1000):
        for turn in (1, 2):
            got = host(wire.allreduce(make(np.full(n, turn * r, np.float32)), f"case.sum.{n}").wait())
            assert got.shape == (n,) and got.dtype == np.float32
            np.testing.assert_array_equal(got / P, turn * (P - 1) / 2)


def check_allreduce_dtypes(wire, make, host):
    P, r = wire.size, wire.rank
    for dtype in sorted(wire.dtypes - {"bfloat16"}):
        for turn in (1, 2):
            x = (np.arange(5) + turn * r).astype(dtype)
            got = host(wire.allreduce(make(x), f"case.dtype.{dtype}").wait())
            assert got.dtype.name == dtype
            np.testing.assert_array_equal(got, (P * np.arange(5) + turn * P * (P - 1) // 2).astype(dtype))


def check_allreduce_same_bits(wire, make, host):
    """Check that sums whose order matters have the same last bit on all ranks, by a gather of their hashes."""
    for n in (1, 3, 1023, 100_003):
        for turn in (1, 2):
            rng = np.random.default_rng([wire.rank, n, turn])
            x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32)
            total = host(wire.allreduce(make(x), f"case.bits.{n}").wait())
            own = np.array([zlib.crc32(np.ascontiguousarray(total).tobytes())], np.int64)
            seen = host(wire.allgather(make(own), f"case.bits.hash.{n}").wait())
            assert (seen == own[0]).all(), seen


def check_many_at_once(wire, make, host):
    """Several handles open at the same time."""
    P, r = wire.size, wire.rank
    for _ in range(2):
        handles = [wire.allreduce(make(np.full(3, r + i, np.float32)), f"case.many.{i}") for i in range(5)]
        for i, handle in enumerate(handles):
            np.testing.assert_array_equal(host(handle.wait()), P * i + P * (P - 1) / 2)


def check_allgather(wire, make, host):
    P, r = wire.size, wire.rank
    for turn in (1, 2):
        got = host(wire.allgather(make(np.array([r, turn, 10 * r], np.float32)), "case.gather").wait())
        np.testing.assert_array_equal(got, [[q, turn, 10 * q] for q in range(P)])
        bits = host(wire.allgather(make(np.array([r - turn, -1], np.int16)), "case.gather16").wait())
        assert bits.dtype == np.int16
        np.testing.assert_array_equal(bits, [[q - turn, -1] for q in range(P)])


def check_alltoall(wire, make, host):
    P, r = wire.size, wire.rank
    for dtype in (np.float32, np.int16):
        for turn in (1, 2):
            rows = np.array([[100 * r + p, turn] for p in range(P)], dtype)
            got = host(wire.alltoall(make(rows), f"case.all.{np.dtype(dtype).name}").wait())
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, [[100 * q + r, turn] for q in range(P)])


def check_alltoallv(wire, make, host):
    """Parts of unlike lengths, some empty: rank r sends (r + p) % 3 elements to rank p; in turn 2 rank 0 sends nothing.
    """
    P, r = wire.size, wire.rank
    for dtype in (np.int8, np.int16, np.int32):
        for turn in (1, 2):
            def length(q, p):
                return 0 if turn == 2 and q == 0 else (q + p) % 3 + (q == p)

            sent, got = [length(r, p) for p in range(P)], [length(q, r) for q in range(P)]
            x = np.concatenate([np.full(k, turn * (10 * r + p)) for p, k in enumerate(sent)]).astype(dtype)
            found = host(wire.alltoallv(make(x), sent, got, f"case.allv.{np.dtype(dtype).name}").wait())
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, np.concatenate([np.full(k, turn * (10 * q + r))
                                                                 for q, k in enumerate(got)]))


def check_reducescatter(wire, make, host):
    P, r = wire.size, wire.rank
    for turn in (1, 2):
        got = host(wire.reducescatter(make((np.arange(3 * P) + turn * r).astype(np.float32)), "case.scatter").wait())
        assert got.shape == (3,)
        np.testing.assert_array_equal(got, P * np.arange(3 * r, 3 * r + 3) + turn * P * (P - 1) / 2)


def cuts(n, P):
    """Parts of n elements: alike, unlike, of which some are empty, all of it one rank's."""
    alike = [n * (r + 1) // P - n * r // P for r in range(P)]
    halves = [k // 2 for k in alike[1:]]
    found = [alike, [n - sum(halves), *halves], [0] * (P - 1) + [n], [n] + [0] * (P - 1)]
    assert all(sum(sizes) == n and len(sizes) == P for sizes in found)
    return found


def in_order(rows, wire):
    """Return the sum of the ranks' rows in the transport's order: by rank, within each host where it has hosts.

    float16, which no memory adds, goes from rank to rank on any wire.
    """
    def add(xs):
        wide = [x.astype(np.float32) if x.dtype == np.float16 else x for x in xs]
        total = wide[0].copy()
        for x in wide[1:]:
            total += x
        return total

    hosts = [range(wire.size)] if rows[0].dtype == np.float16 else getattr(wire, "hosts", [range(wire.size)])
    return add([add([rows[r] for r in ranks]) for ranks in hosts])


def mixed(rank, n, turn, dtype):
    """Values whose order matters when they are added."""
    return _mixed(rank, n, turn, dtype).copy()


@functools.lru_cache(256)
def _mixed(rank, n, turn, dtype):  # many cases add the same values, and powers take longer than their sum
    rng = np.random.default_rng([rank, n, turn])
    size = 10.0 ** rng.integers(-2 if dtype == "float16" else -6, 3 if dtype == "float16" else 6, n)
    return (rng.standard_normal(n) * size).astype(dtype)


def check_reducescatterv(wire, make, host):
    P, r = wire.size, wire.rank
    for n in (0, 1, 3, 40):
        for i, sizes in enumerate(cuts(n, P)):
            for turn in (1, 2):
                got = host(wire.reducescatterv(make(mixed(r, n, turn, "float32")), sizes, f"case.partv.{n}.{i}").wait())
                want = in_order([mixed(q, n, turn, "float32") for q in range(P)], wire)
                assert got.shape == (sizes[r],) and got.dtype == np.float32
                np.testing.assert_array_equal(got, want[sum(sizes[:r]):][:sizes[r]])


def check_reducescatterv_bits(wire, make, host):
    """Of longer vectors and every type that sums; a result outlives the next call."""
    P, r, n = wire.size, wire.rank, 70_001
    for dtype in sorted(wire.dtypes & {"float16", "float32", "float64", "int32"}):
        last = None
        for i, sizes in enumerate(cuts(n, P)):
            rows = [mixed(q, n, i, dtype) for q in range(P)]
            own = slice(sum(sizes[:r]), sum(sizes[:r + 1]))
            want = in_order(rows, wire)[own].astype(dtype)
            result = wire.reducescatterv(make(rows[r]), sizes, f"case.partv.{dtype}").wait()
            assert last is None or np.array_equal(host(last[0]), last[1])
            assert host(result).dtype.name == dtype
            np.testing.assert_array_equal(host(result), want)
            last = result, want


def check_allgatherv(wire, make, host):
    P, r = wire.size, wire.rank
    for n in (0, 1, 3, 40, 1000):
        for i, sizes in enumerate(cuts(n, P)):
            for dtype in ("float32", "float16", "int64"):
                for turn in (1, 2):
                    whole = (np.arange(n) * turn % 1009).astype(dtype)
                    own = whole[sum(sizes[:r]):sum(sizes[:r + 1])].copy()
                    got = host(wire.allgatherv(make(own), sizes, f"case.wholev.{n}.{i}.{dtype}").wait())
                    assert got.dtype.name == dtype and got.shape == (n,)
                    np.testing.assert_array_equal(got, whole)


def check_parts_in_turn(wire, make, host):
    """As a step does it: parts of several vectors' sums, one after the other, each then brought together."""
    P, r = wire.size, wire.rank
    for turn in range(6):
        n = 3000 + 7 * (turn % 3)
        sizes = cuts(n, P)[turn % 4]
        part = wire.reducescatterv(make(np.full(n, r + turn, np.float32)), sizes, f"case.turn.{n}.part").wait()
        got = host(wire.allgatherv(part, sizes, f"case.turn.{n}.whole").wait())
        np.testing.assert_array_equal(got, np.full(n, P * turn + P * (P - 1) / 2))


def check_broadcast(wire, make, host):
    for root in range(wire.size):
        for turn in (1, 2):
            x = np.array([wire.rank, turn, 7.5 * wire.rank], np.float32)
            got = host(wire.broadcast(make(x), f"case.broadcast.{root}", root).wait())
            np.testing.assert_array_equal(got, np.array([root, turn, 7.5 * root], np.float32))


def check_not_finite(wire, make, host):
    """Check that one rank's infinity reaches all ranks."""
    last = wire.size - 1
    x = np.array([np.inf if wire.rank == last else 1.0, 1.0], np.float32)
    got = host(wire.allreduce(make(x), "case.inf").wait())
    np.testing.assert_array_equal(got, np.array([np.inf, wire.size], np.float32))


def check_result_is_own(wire, make, host):
    """Check that the next collective of the same name does not overwrite a result."""
    first = wire.allreduce(make(np.full(4, 1.0, np.float32)), "case.own").wait()
    kept = np.array(host(first))
    wire.allreduce(make(np.full(4, 2.0, np.float32)), "case.own").wait()
    np.testing.assert_array_equal(host(first), kept)


CASES = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


def name_of(check):
    """pytest id of a case."""
    return check.__name__.removeprefix("check_")


def as_is(x):
    """``make`` and ``host`` of collectives that take numpy arrays."""
    return x
