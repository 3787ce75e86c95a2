"""``bench wire``: time and bandwidth of each collective by size, with the columns and definitions of nccl-tests.

Measures what a gradient bucket costs, from the framework's array to the framework's array. Definitions:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.cluster import boot
from hvdtrain.cluster import links as measuring
from hvdtrain.comm import transport_sweep as links
from hvdtrain.comm.collectives.shared import SUMMED
from hvdtrain.comm.sweep import settle
from hvdtrain.commands.bench import cli
from hvdtrain.commands.bench.session import Session, open_session, records
from hvdtrain.core import terminal
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Array, Ops
from hvdtrain.core.protocols.types import itemsize
from hvdtrain.core.terminal import spread
from hvdtrain.core.units import format_number

KINDS = ("allreduce", "allgather", "alltoall", "reducescatter", "broadcast")
FRAMEWORKS = ("torch", "tensorflow", "numpy")
WIRES = ("horovod", "mpi", "shared", "auto", "null")
DTYPES = ("float32", "float64", "float16", "int32", "int64")
EXACT = {"float16": 1 << 11}
"""Up to which whole numbers are exact; the other types: 2^24 at least."""
HEADERS = ("size (B)", "count", "type", "redop", "root", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong")

ROOT = 0
REPEAT_S = 1e-3
"""Calls of a small size are timed together until a repeat lasts about this long, as many as `MOST_CALLS`."""
MOST_CALLS = 64
WARM_UPS = 3


@dataclass(frozen=True)
class Point:
    """Row of the table: ``size`` bytes of the collective ``kind``; ``count``: elements that a rank's call names."""

    kind: str
    size: int
    count: int
    elements: int
    dtype: str


def bus_factor(kind: str, ranks: int) -> float:
    """Return busbw / algbw: what the busiest link carries per byte of ``size``. Source: nccl-tests' PERFORMANCE.md."""
    if kind == "allreduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if kind == "broadcast" else (ranks - 1) / ranks


def point(kind: str, size: int, dtype: str, ranks: int) -> Point:
    """Return the row for about ``size`` bytes, rounded down to whole elements for each rank, at least one.

    ``size`` is that of nccl-tests: the vector of allreduce and broadcast; the result of allgather, the input of
    reducescatter; the whole buffer of alltoall. ``count``: of the last three 1/P of the elements.
    """
    share = 1 if kind in ("allreduce", "broadcast") else ranks
    count = max(1, size // (itemsize(dtype) * share))
    return Point(kind, count * share * itemsize(dtype), count, count * share, dtype)


def sizes(least: int, most: int, factor: float) -> list[int]:
    """Return bytes from ``least`` to ``most``, each ``factor`` times the one before."""
    found = [float(least)]
    while found[-1] * factor <= most:
        found.append(found[-1] * factor)
    return sorted({int(n) for n in found})


def bandwidths(p: Point, ranks: int, seconds: float) -> tuple[float, float]:
    """Return (algbw, busbw) in GB/s, 10^9 bytes: size / time, and that times `bus_factor`."""
    algbw = p.size / seconds / 1e9
    return algbw, algbw * bus_factor(p.kind, ranks)


def sent(p: Point, rank: int, ranks: int) -> np.ndarray:
    """Return the input of ``rank`` for the check: whole numbers that differ by element, rank and destination.

    (elements,), for allgather (count,), for alltoall (P, count).
    """
    if p.kind == "alltoall":
        return _pattern(np.arange(p.elements).reshape(ranks, p.count), rank, ranks, p.dtype)
    return _pattern(np.arange(p.count if p.kind == "allgather" else p.elements), rank, ranks, p.dtype)


def expected(p: Point, rank: int, ranks: int) -> np.ndarray:
    """Return the result on ``rank`` when all ranks bring `sent`, in closed form."""
    index = np.arange(p.count)
    if p.kind == "allreduce":
        return _sum(index, ranks, p.dtype)
    if p.kind == "reducescatter":
        return _sum(index + rank * p.count, ranks, p.dtype)
    if p.kind == "broadcast":
        return _pattern(index, ROOT, ranks, p.dtype)
    if p.kind == "alltoall":
        index += rank * p.count
    return np.stack([_pattern(index, q, ranks, p.dtype) for q in range(ranks)])


def _pattern(index: np.ndarray, rank: int, ranks: int, dtype: str) -> np.ndarray:
    """Return element i of rank r: h(i) + r mod M, with h in 1 ... M without a period; see `_values` for M."""
    return (_hashed(index, ranks, dtype) + rank % _values(ranks, dtype)).astype(dtype)


def _sum(index: np.ndarray, ranks: int, dtype: str) -> np.ndarray:
    """Return the sum over r of `_pattern`: P h(i) + the sum of r mod M. No rank's own element equals it, as h > 0."""
    own = sum(rank % _values(ranks, dtype) for rank in range(ranks))
    return (ranks * _hashed(index, ranks, dtype) + own).astype(dtype)


def _values(ranks: int, dtype: str) -> int:
    """Return M: so many values that the sum over ranks, at most P (2 M - 1), is exact in ``dtype``, in any order."""
    return max(1, EXACT.get(dtype, 1 << 24) // (2 * ranks))


def _hashed(index: np.ndarray, ranks: int, dtype: str) -> np.ndarray:
    """Return h: whole numbers of 1 ... M that repeat with no shift or stride; multiply and xor-shift twice."""
    x = index.astype(np.uint32)
    for _ in range(2):
        x ^= x >> 16
        x *= np.uint32(0x9E3779B1)
    x ^= x >> 15
    return (x % np.uint32(_values(ranks, dtype))).astype(np.int64) + 1


def count_wrong(found: np.ndarray, right: np.ndarray) -> int:
    """Return the number of wrong elements; all of them where the shape is another."""
    return right.size if found.shape != right.shape else int(np.count_nonzero(found != right))


def algorithm(kind: str, wire: str, dtype: str, several_hosts: bool, facts: Mapping[str, Any]) -> str:
    """Return what is known of how the bytes move by ``facts`` (`Session.facts`); the libraries below tell no more."""
    library = facts.get("mpi") or "MPI"
    forced = ", ".join(f"{k.removeprefix('OMPI_MCA_')}={v}" for k, v in facts.get("settings", {}).items()
                       if k.startswith("OMPI_MCA_coll"))
    tuned = f"{library} ({forced})" if forced else f"{library} tuned" if "Open MPI" in library else library
    if wire == "shared" and kind == "allreduce" and dtype in SUMMED:
        return "shared memory" + (f" within hosts, {tuned} across" if several_hosts else "")
    if wire in ("mpi", "shared"):
        return tuned
    if wire == "horovod":
        if facts.get("gpu") and facts.get("nccl"):
            return "Horovod over NCCL"
        return f"Horovod over {tuned}" if facts.get("mpi_enabled") else "Horovod over Gloo"
    return {"null": "null (no exchange)"}.get(wire, wire)


def measure(session: Session, p: Point, repeats: int) -> dict[str, Any]:
    """Check one size, time it on the slowest rank by repeat, and return its record, with "wrong". Collective."""
    control, wire = session.control, session.wire
    source, give = _source(session, p)
    np.copyto(source, sent(p, control.rank, control.size))
    call = _caller(session, p)
    out = call(give())
    wrong = count_wrong(np.asarray(session.ops.to_host(out)), expected(p, control.rank, control.size))
    total = int(control.sum(np.array([wrong], np.float64))[0])
    source[...] = 0  # sums in place stay zero; written, so that the pages are there
    seconds, calls = _time(session, call, give(), repeats)
    slowest = np.max(np.stack(control.gather(seconds)), axis=0)
    us = {f"{k}_us": 1e6 * v for k, v in spread(slowest).items()}
    algbw, busbw = bandwidths(p, control.size, us["median_us"] / 1e6)
    moves = wire.name != "null" or control.size == 1
    return {"collective": p.kind, "size_bytes": p.size, "count": p.count, "dtype": p.dtype, "redop": redop(p.kind),
            "root": ROOT if p.kind == "broadcast" else -1, "time_us": us.pop("median_us"), **us,
            "algbw_GBps": algbw, "busbw_GBps": busbw, "wrong": total if moves else None,
            "algorithm": algorithm(p.kind, wire.name, p.dtype, session.several_hosts, session.facts),
            "repeats": repeats, "calls_a_repeat": calls}


def redop(kind: str) -> str:
    return "sum" if kind in ("allreduce", "reducescatter") else "none"


def _source(session: Session, p: Point) -> tuple[np.ndarray, Callable[[], Array]]:
    """Return (numpy memory to fill, a function that makes the framework's array of it). Collective.

    An allreduce sums in the transport's own memory, as training does, where the framework's arrays may lie in it.
    """
    ops, wire = session.ops, session.wire
    own = wire.buffer(p.count, p.dtype) if p.kind == "allreduce" and wire.host and _lies_in_numpy(ops) else None
    memory = np.zeros_like(sent(p, session.control.rank, session.control.size)) if own is None else own
    return memory, lambda: ops.from_host(memory)


def _lies_in_numpy(ops: Ops) -> bool:
    """Return whether an array of this framework shares the numpy memory that it was made from."""
    memory = np.zeros(4096, np.float32)
    array = ops.from_host(memory)
    memory[:] = 1
    return bool(np.asarray(ops.to_host(array)).all()) and np.shares_memory(np.asarray(ops.to_host(array)), memory)


def _caller(session: Session, p: Point) -> Callable[[Array], Array]:
    """Return one collective from the framework's array to its array; names are equal on all ranks (law 5)."""
    wire, ops = session.wire, session.ops
    operate, name = getattr(wire, p.kind), f"bench.{p.kind}.{p.size}.{p.dtype}"
    more = (ROOT,) if p.kind == "broadcast" else ()

    def call(x: Array) -> Array:
        if wire.host:
            return ops.from_host(operate(ops.to_host(x), name, *more).wait())
        return operate(x, name, *more).wait()

    return call


def _time(session: Session, call: Callable[[Array], Array], x: Array, repeats: int) -> tuple[np.ndarray, int]:
    """Return (seconds of a call by repeat, calls per repeat); calls follow each other as in nccl-tests."""
    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            out = call(x)
        settle(session.ops, out)
        return time.perf_counter() - begin

    run(1)
    one_s = run(WARM_UPS) / WARM_UPS
    calls = session.control.bcast(min(MOST_CALLS, max(1, round(REPEAT_S / max(one_s, 1e-9)))))
    session.control.barrier("bench wire")
    run(1)  # whoever left the barrier late has caught up
    return np.array([run(calls) / calls for _ in range(repeats)]), calls


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 where a result was wrong."""
    args = parse(argv)
    return bench(open_session(args.framework, args.collectives, args.timeout, argv), args)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; `UserError` for a bad one."""
    parser = cli.Parser("hvdtrain bench wire",
                            "Time and bandwidth of each collective by size, with the columns "
                            "and definitions of nccl-tests, and the links between hosts. Start the bench under mpirun; "
                            "on one rank it shows the overhead of a call.")
    parser.add_argument("--framework", type=cli.one_of("--framework", FRAMEWORKS), default="torch",
                        metavar="|".join(FRAMEWORKS), help="framework of the exchanged arrays")
    parser.add_argument("--collectives", type=cli.one_of("--collectives", WIRES), default="horovod",
                        metavar="|".join(WIRES), help="transport; auto: the one that a run would choose")
    parser.add_argument("--kinds", type=cli.some_of("--kinds", KINDS), default=",".join(KINDS), metavar="A,B",
                        help="collectives to measure")
    parser.add_argument("--min", "--minbytes", type=cli.size("--min"), default="4K", metavar="BYTES",
                        help="smallest size, such as 4K")
    parser.add_argument("--max", "--maxbytes", type=cli.size("--max"), default="64M", metavar="BYTES",
                        help="largest size, such as 64M; horovodrun has its own --max, so use --maxbytes under "
                             "horovodrun")
    parser.add_argument("--factor", type=cli.number("--factor", 1, 1024), default=4.0, metavar="X",
                        help="factor from one size to the next")
    parser.add_argument("--dtype", type=cli.one_of("--dtype", DTYPES), default="float32", metavar="TYPE",
                        help="element type")
    parser.waits(600.0, "longest wait for other ranks, in seconds")
    parser.common(repeats=20)
    args = parser.parse(argv)
    if args.max < args.min:
        raise UserError(f"--max {args.max} is below --min {args.min}", "--max of at least --min", "correct one")
    if args.framework == "numpy" and args.collectives in ("horovod", "auto"):
        raise UserError(f"--framework numpy with --collectives {args.collectives}", "mpi, shared or null",
                        "name one of them, or another framework")
    return args


def bench(session: Session, args: argparse.Namespace) -> int:
    """Measure, print the tables, append records; return 1 where a result was wrong. Collective."""
    control, status = session.control, 0
    if args.dtype not in session.wire.dtypes and any(redop(kind) == "sum" for kind in args.kinds):
        raise UserError(f"{session.wire.name} does not sum {args.dtype}",
                        "one of " + ", ".join(d for d in DTYPES if d in session.wire.dtypes), "correct --dtype")
    keep = records(session, "wire", args.jsonl)
    for note in session.notes if control.rank == 0 else ():
        terminal.note(note)
    for kind in args.kinds:
        points = [point(kind, n, args.dtype, control.size) for n in sizes(args.min, args.max, args.factor)]
        found = []
        for p in dict.fromkeys(points):  # sizes that round to the same are measured once
            found.append(measure(session, p, args.repeats))
            keep(found[-1])
        status |= any(row["wrong"] for row in found)
        if control.rank == 0:
            terminal.show(_title(session, found[0]), HEADERS, [cells(row) for row in found], args.markdown,
                       launched=control.size > 1)
    _tell_links(session, keep, args.markdown)
    return int(status)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a record's row."""
    return [str(row["size_bytes"]), str(row["count"]), row["dtype"], row["redop"],
            str(row["root"]), *(format_number(row[key]) for key in ("time_us", "algbw_GBps", "busbw_GBps")),
            "N/A" if row["wrong"] is None else str(row["wrong"])]


def _title(session: Session, row: Mapping[str, Any]) -> str:
    ranks = session.control.size
    return (f"{row['collective']}: {session.framework} over {session.wire.name}, {row['algorithm']}; "
            f"{ranks} rank{'s' if ranks > 1 else ''}, {session.hosts}")


def _tell_links(session: Session, keep: Callable[[dict[str, Any]], None], markdown: bool) -> None:
    """Measure the pairs of a session's hosts, print and ``keep`` what was found; collective."""
    hosts = session.topology.hosts if session.topology is not None else ()
    if len(hosts) < 2 or not boot.has_mpi():
        if session.control.rank == 0:
            terminal.note(links.ONE_HOST if len(hosts) < 2 else links.NO_MPI)
        return
    found = measuring.measure(boot.mpi_comm(), [host.ranks for host in hosts])
    if session.control.rank != 0:
        return
    names = [host.node for host in hosts]
    for link in found:
        for row in links.records(link, names):
            keep({**row, "wire": "mpi"})
    for title, rows in links.tables(found, names):
        terminal.show(title, links.HEADERS, rows, markdown, launched=True)
    for text in links.words(found, names):
        terminal.note(text)
