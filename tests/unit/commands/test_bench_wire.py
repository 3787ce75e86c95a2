"""`bench wire`: its definitions in closed form, and its measuring over ranks that are threads."""

import json

import numpy as np
import pytest

from hvdtrain.backends.numpy import Ops
from hvdtrain.comm.collectives.base import NullCollectives, ReadyHandle
from hvdtrain.comm.collectives.lockstep import LockstepCollectives, LockstepWorld
from hvdtrain.commands.bench import wire
from hvdtrain.commands.bench.session import Session, open_session
from hvdtrain.core.errors import UserError

WORLDS = (1, 2, 3)
OPEN_MPI = {"mpi": "Open MPI 4.1.8"}


# --- definitions ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, factors", [("allreduce", (0, 1, 4 / 3, 7 / 4)), ("allgather", (0, 1 / 2, 2 / 3, 7 / 8)),
                                           ("reducescatter", (0, 1 / 2, 2 / 3, 7 / 8)),
                                           ("alltoall", (0, 1 / 2, 2 / 3, 7 / 8)), ("broadcast", (1, 1, 1, 1))])
def test_bus_factors_of_nccl_tests(kind, factors):
    assert [wire.bus_factor(kind, n) for n in (1, 2, 3, 8)] == pytest.approx(factors)


def test_bandwidths():
    p = wire.point("allreduce", 1_000_000_000, "float32", 4)
    assert wire.bandwidths(p, 4, 0.5) == pytest.approx((2.0, 3.0))
    p = wire.point("allgather", 1_000_000_000, "float32", 4)
    assert wire.bandwidths(p, 4, 0.5) == pytest.approx((2.0, 1.5))


@pytest.mark.parametrize("kind, size, dtype, ranks, found", [
    ("allreduce", 4096, "float32", 3, (4096, 1024, 1024)), ("broadcast", 4098, "float64", 2, (4096, 512, 512)),
    ("allgather", 4096, "float32", 2, (4096, 512, 1024)), ("reducescatter", 4096, "float32", 3, (4092, 341, 1023)),
    ("alltoall", 4096, "float16", 4, (4096, 512, 2048)), ("alltoall", 1, "float32", 3, (12, 1, 3))])
def test_size_and_count_as_nccl_tests_have_them(kind, size, dtype, ranks, found):
    p = wire.point(kind, size, dtype, ranks)
    assert (p.size, p.count, p.elements) == found


def test_sizes():
    assert wire.sizes(4096, 65536, 4) == [4096, 16384, 65536]
    assert wire.sizes(1, 10, 2) == [1, 2, 4, 8] and wire.sizes(5, 5, 2) == [5] and wire.sizes(1, 3, 1.5) == [1, 2]


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("dtype", wire.DTYPES)
def test_what_is_expected_is_what_the_collective_means(ranks, dtype):
    def rows(kind):
        p = wire.point(kind, 200, dtype, ranks)
        return p, [wire.sent(p, r, ranks) for r in range(ranks)]

    for rank in range(ranks):
        p, xs = rows("allreduce")
        assert np.array_equal(wire.expected(p, rank, ranks), sum(xs)) and xs[0].dtype == dtype
        p, xs = rows("reducescatter")
        assert np.array_equal(wire.expected(p, rank, ranks), np.split(sum(xs), ranks)[rank])
        p, xs = rows("allgather")
        assert np.array_equal(wire.expected(p, rank, ranks), np.stack(xs))
        p, xs = rows("alltoall")
        assert np.array_equal(wire.expected(p, rank, ranks), np.stack([x[rank] for x in xs]))
        p, xs = rows("broadcast")
        assert np.array_equal(wire.expected(p, rank, ranks), xs[0])


def alike(a, b):
    """Share of elements that are equal."""
    return np.count_nonzero(a == b) / a.size


@pytest.mark.parametrize("dtype", wire.DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_check_tells_elements_ranks_and_destinations_apart(ranks, dtype):
    p = wire.point("alltoall", 1 << 16, dtype, ranks)
    first, second = wire.sent(p, 0, ranks), wire.sent(p, 1, ranks)
    assert alike(first, second) == 0, "ranks"
    assert alike(first[0], first[1]) < 0.05 and alike(first[0], second[1]) < 0.05, "destinations"
    p = wire.point("allreduce", 1 << 14, dtype, ranks)
    total_N = wire.expected(p, 0, ranks)
    assert max(alike(total_N, np.roll(total_N, by)) for by in range(1, 600)) < 0.05, "elements, however moved"
    assert alike(total_N[:1000], total_N[::2][:1000]) < 0.05, "strides"
    assert alike(total_N, wire.sent(p, ranks - 1, ranks)) == 0, "a sum of nothing else"


@pytest.mark.parametrize("dtype, exact", [("float16", 2**11), ("float32", 2**24), ("int32", 2**31 - 1)])
@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_no_sum_is_rounded(ranks, dtype, exact):
    p = wire.point("allreduce", 1 << 13, dtype, ranks)
    parts = sum(wire.sent(p, rank, ranks).astype(np.float64) for rank in range(ranks))
    assert parts.max() <= exact and np.array_equal(parts, wire.expected(p, 0, ranks).astype(np.float64))


def test_wrong_elements_are_counted():
    right = np.arange(6.0).reshape(2, 3)
    assert wire.count_wrong(right.copy(), right) == 0
    assert wire.count_wrong(right + [[0, 1, 0], [1, 0, np.nan]], right) == 3
    assert wire.count_wrong(right.ravel(), right) == 6


@pytest.mark.parametrize("args, text", [
    (("allreduce", "mpi", "float32", False, OPEN_MPI), "Open MPI 4.1.8 tuned"),
    (("allreduce", "mpi", "float32", False, {**OPEN_MPI, "settings": {"OMPI_MCA_coll": "^tuned", "A": "1"}}),
     "Open MPI 4.1.8 (coll=^tuned)"),
    (("allreduce", "mpi", "float32", False, {"mpi": "MPICH 4.2"}), "MPICH 4.2"),
    (("allreduce", "shared", "float32", False, OPEN_MPI), "shared memory"),
    (("allreduce", "shared", "float32", True, OPEN_MPI), "shared memory within hosts, Open MPI 4.1.8 tuned across"),
    (("allreduce", "shared", "float16", False, OPEN_MPI), "Open MPI 4.1.8 tuned"),
    (("alltoall", "shared", "float32", False, OPEN_MPI), "Open MPI 4.1.8 tuned"),
    (("allreduce", "horovod", "float32", False, {**OPEN_MPI, "mpi_enabled": True, "nccl": True, "gpu": True}),
     "Horovod over NCCL"),
    (("allreduce", "horovod", "float32", False, {**OPEN_MPI, "mpi_enabled": True, "nccl": True, "gpu": False}),
     "Horovod over Open MPI 4.1.8 tuned"),
    (("allreduce", "horovod", "float32", False, {"mpi": None, "mpi_enabled": False}), "Horovod over Gloo"),
    (("broadcast", "null", "float32", False, {}), "null (no exchange)")])
def test_what_is_said_of_the_algorithm(args, text):
    assert wire.algorithm(*args) == text


# --- measuring -----------------------------------------------------------------------------------------------------

def options(*more):
    return wire.parse(["--framework", "numpy", "--collectives", "mpi", "--min", "64", "--max", "256", "--repeats", "2",
                       *more])


def in_lockstep(ranks, fn, collectives=lambda control, found: found):
    """``fn(session)`` on every rank; the results by rank."""
    return LockstepWorld(ranks).run(lambda control, found: fn(
        Session(control, collectives(control, found), Ops(), "numpy", "1 host: here")))


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("kind", wire.KINDS)
def test_a_right_wire_has_nothing_wrong(ranks, kind):
    p = wire.point(kind, 960, "float32", ranks)
    results = in_lockstep(ranks, lambda session: wire.measure(session, p, 3))
    assert all(r == results[0] for r in results), "ranks must report the same"
    row = results[0]
    assert row["wrong"] == 0 and row["size_bytes"] == p.size and row["algorithm"] == "lockstep"
    assert 0 < row["min_us"] <= row["p25_us"] <= row["time_us"] <= row["p75_us"] <= row["max_us"]
    assert row["algbw_GBps"] == pytest.approx(p.size / row["time_us"] / 1e3)
    assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * wire.bus_factor(kind, ranks))
    assert 1 <= row["calls_a_repeat"] <= wire.MOST_CALLS
    assert (row["redop"], row["root"]) == ("sum" if kind in ("allreduce", "reducescatter") else "none",
                                           0 if kind == "broadcast" else -1)


class Broken(NullCollectives):
    """Moves nothing and says otherwise."""

    name = "broken"


def broken(control, found):
    return Broken(control.rank, control.size)


@pytest.mark.parametrize("kind, wrong", [("allreduce", 2 * 16), ("allgather", 2 * 8), ("broadcast", 16)])
def test_a_wire_that_moves_nothing_is_seen(kind, wrong):
    """Of 64 bytes on 2 ranks: every sum; of each the other's row; all that is not the root's."""
    p = wire.point(kind, 64, "float32", 2)
    assert in_lockstep(2, lambda session: wire.measure(session, p, 1), broken)[0]["wrong"] == wrong


def test_a_wrong_result_is_the_exit_status(capsys):
    assert in_lockstep(2, lambda session: wire.bench(session, options("--kinds", "allgather")), broken) == [1, 1]
    assert " 16" in capsys.readouterr().out


def test_null_is_not_called_wrong():
    null = in_lockstep(2, lambda session: wire.measure(session, wire.point("allgather", 64, "float32", 2), 1),
                       lambda control, found: NullCollectives(control.rank, control.size))[0]
    assert null["wrong"] is None and wire.cells(null)[-1] == "N/A"


class OwnMemory(LockstepCollectives):
    """Has memory that it sums without a copy."""

    def buffer(self, n, dtype):
        self.own = np.zeros(n, dtype)
        self.inside = 0
        return self.own

    def allreduce(self, flat_N, name, op="sum"):
        self.inside += np.shares_memory(flat_N, self.own)
        self.own[:] = super().allreduce(flat_N, name, op).wait()
        return ReadyHandle(self.own)


def test_a_wire_that_has_memory_of_its_own_is_given_it_as_in_training():
    def measured(session):
        row = wire.measure(session, wire.point("allreduce", 64, "float32", 2), 2)
        return row["wrong"], session.wire.inside > row["calls_a_repeat"] * 2, session.wire.own.any()

    found = in_lockstep(2, measured,
                        lambda control, found: OwnMemory(found._meeting, control.rank, found._sent))
    assert found == [(0, True, False)] * 2


def test_bench_prints_and_records_on_rank_0(tmp_path, capsys):
    path = tmp_path / "wire.jsonl"
    args = options("--jsonl", str(path), "--kinds", "allreduce,alltoall", "--factor", "2")
    assert in_lockstep(2, lambda session: wire.bench(session, args)) == [0, 0]
    out = capsys.readouterr().out
    assert out.count("size (B)") == 2 and out.count("\nallreduce: numpy over lockstep") == 1
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [r[:3] for r in rows] == [[str(n), str(n // d), "float32"] for d in (4, 8) for n in (64, 128, 256)]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 6 and all(r["bench"] == "wire" and r["ranks"] == 2 and r["wrong"] == 0 for r in records)
    assert records[0]["versions"]["numpy"] == np.__version__ and records[0]["wire"] == "lockstep"


def test_records_that_cannot_be_written_are_told_on_every_rank_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(wire, "measure", lambda *args: pytest.fail("measured"))

    def run(session):
        with pytest.raises(UserError, match="/ cannot be written"):
            wire.bench(session, options("--jsonl", "/"))
        return True

    assert in_lockstep(2, run) == [True, True]


def test_sizes_that_round_to_one_are_measured_once(capsys):
    args = wire.parse(["--framework", "numpy", "--collectives", "mpi", "--min", "1", "--max", "16", "--factor", "2",
                       "--repeats", "1", "--kinds", "allgather", "--markdown"])
    in_lockstep(2, lambda session: wire.bench(session, args))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")] == [
        "size", "8", "16"]


def test_sizes_have_the_names_of_nccl_tests_too():
    args = wire.parse(["--minbytes", "1K", "--maxbytes", "2K"])
    assert (args.min, args.max, args.kinds) == (1024, 2048, list(wire.KINDS))


@pytest.mark.parametrize("argv, text", [
    (["--framework", "jax"], "--framework is 'jax'"), (["--collectives", "nccl"], "--collectives is 'nccl'"),
    (["--kinds", "reduce"], "--kinds is 'reduce'"), (["--min", "8K", "--max", "4K"], "--max 4096 is below --min 8192"),
    (["--min", "lots"], "--min is 'lots'"), (["--repeats", "0"], "--repeats is '0'"),
    (["--factor", "1"], "--factor is"),
    (["--framework", "numpy"], "--framework numpy with --collectives horovod"), (["--dtype", "int4"], "--dtype is"),
    (["--size", "4K"], "there is no option --size")])
def test_a_mistake_is_said_in_words(argv, text):
    with pytest.raises(UserError, match=text):
        wire.parse(argv)


def test_a_type_that_the_wire_does_not_sum_is_refused():
    class Narrow(NullCollectives):
        dtypes = frozenset({"float32"})

    session = Session(None, Narrow(), Ops(), "numpy")
    with pytest.raises(UserError, match="does not sum float64; expected one of float32"):
        wire.bench(session, options("--dtype", "float64"))


def test_a_framework_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr("hvdtrain.backends.installed", lambda: ["torch"])
    with pytest.raises(UserError, match="tensorflow is not installed"):
        open_session("tensorflow", "mpi", 60, [])
