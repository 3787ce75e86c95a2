"""Measurement of transports (seconds and processor seconds of a step's gradients by bytes), and the rows that `bench
wire` and `doctor` show of links between hosts.

Collective: the slowest rank's number decides about each turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.cluster.links import SINGLY, PairLink, others_Bps, slowest_link
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.comm.sweep import settle, slowest
from hvdtrain.core.protocols import AllReduce, Array, Collectives, Control, Ops
from hvdtrain.core.units import MIB, format_number
from hvdtrain.planning.linear import fit_link
from hvdtrain.planning.transport_choice import MeasuredTransport

PIECE = 2 * MIB
"""Bytes of the largest vector that is summed at once."""

TURNS = ((1, MIB // 16), (1, MIB // 2), (1, PIECE), (2, PIECE), (4, PIECE))
"""(vectors under way at once, bytes of each): growing, as far as the time allows, two at least."""

REPEATS, LEAST_REPEATS = 30, 4
"""Turns of the largest size, as the time allows: at most, and those that a size must leave time for."""

FITTED = 3
"""Sizes that count: smaller ones say little of a step's."""

IDLE_S = 0.03
"""How long a transport is watched doing nothing."""


def measure(wires: Mapping[str, Collectives], ops: Ops, control: Control, nbytes: float,
            budget_s: float) -> list[MeasuredTransport]:
    """Time sums over each of ``wires``, which take turns, for about ``budget_s``; the same on every rank.

    First one turn of each size, to see how far they go: none larger than a step's ``nbytes``, nor one that would not
    fit with repeats. Then the largest over and over: a link that lets a burst through before it slows down then shows
    the speed that lasts. Beyond it a step's bytes go at its rate; up to it the line is through the largest few.
    """
    begin = time.perf_counter()
    probes = {name: _TransportProbe(name, wire, ops) for name, wire in wires.items()}
    idle = {name: _idle_cores() if not probe.host else 0.0 for name, probe in probes.items()}
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in probes}
    busy: dict[str, list[float]] = {name: [] for name in probes}
    sizes: list[tuple[int, int]] = []
    last_s: dict[str, float] = {}
    for count, size in TURNS:
        total = count * size
        if len(sizes) >= 2:
            before = sizes[-1][0] * sizes[-1][1]
            used_s, = slowest(control, [time.perf_counter() - begin])
            if before >= nbytes or used_s + LEAST_REPEATS * sum(last_s.values()) * total / before > budget_s:
                break
        for name, probe in probes.items():
            if not sizes or not probe.host:
                probe.turn(count, size)  # connects, or traces
            taken_s, _ = probe.turn(count, size)
            last_s[name], = slowest(control, [taken_s])
            seconds[name][total] = [last_s[name]]
        sizes.append((count, size))
    total = sizes[-1][0] * sizes[-1][1]
    for _ in range(REPEATS):
        for name, probe in probes.items():
            taken_s, busy_s = probe.turn(*sizes[-1])
            seconds[name][total].append(taken_s)
            busy[name].append(busy_s)
        used_s, round_s = slowest(control, [time.perf_counter() - begin, sum(s[total][-1] for s in seconds.values())])
        if used_s + round_s > budget_s:
            break
    found = []
    for name in probes:
        n_points = 1 if nbytes > total else FITTED
        points = [(float(size), _typical(times)) for size, times in seconds[name].items()][-n_points:]
        *times, busy_s, idle_cores = slowest(control, [s for _, s in points] + [_typical(busy[name]), idle[name]])
        link = fit_link([(size, s) for (size, _), s in zip(points, times)])
        found.append(MeasuredTransport(name, link, busy_s / max(times[-1], 1e-9), idle_cores, total))
    return control.bcast(found)


def _typical(times: Sequence[float]) -> float:
    """Return the lower quartile: a rank that other work or a quota has stopped for a while is slow in any transport."""
    return sorted(times)[len(times) // 4]


def _idle_cores() -> float:
    begin, busy = time.perf_counter(), time.process_time()
    time.sleep(IDLE_S)
    return max(0.0, time.process_time() - busy) / (time.perf_counter() - begin)


class _TransportProbe:
    """Sums over one transport of vectors of any number and size, kept from turn to turn; in a graph as in training."""

    def __init__(self, name: str, wire: Collectives, ops: Ops) -> None:
        self._name, self._wire, self._ops = name, Transport(wire, ops), ops
        self.host = wire.host
        self._vectors: dict[tuple[int, int], list[Array]] = {}
        self._work: dict[tuple[int, int], Callable[[Sequence[Array]], list[Array]]] = {}

    def turn(self, count: int, nbytes: int) -> tuple[float, float]:
        """Sum ``count`` vectors of ``nbytes`` at once: (seconds, processor seconds of this process) until the last."""
        key = count, nbytes
        if key not in self._vectors:
            self._vectors[key] = [self._vector(nbytes // 4) for _ in range(count)]
            self._work[key] = self._working(f"auto.wire.{self._name}.{count}x{nbytes}")
        begin, busy = time.perf_counter(), time.process_time()
        for sum_N in self._work[key](self._vectors[key]):
            settle(self._ops, sum_N)
        return time.perf_counter() - begin, time.process_time() - busy

    def _vector(self, n: int) -> Array:
        """Return zeros, in the transport's own memory where it has some, as in training."""
        wire, ops = self._wire.collectives, self._ops
        return ops.buffer(n, "float32", wire.buffer(n, "float32")) if wire.host else ops.zeros(n, "float32")

    def _working(self, name: str) -> Callable[[Sequence[Array]], list[Array]]:
        def work(flats: Sequence[Array]) -> list[Array]:
            handles = [self._wire.issue(AllReduce(x), f"{name}.p{i}") for i, x in enumerate(flats)]
            return [self._wire.arrived(handle.wait()) for handle in handles]

        compiled = getattr(self._ops, "compiled", None)
        return compiled(work) if self._wire.collectives.in_graph and compiled is not None else work


HEADERS = ("way", "size (B)", "count", "type", "redop", "root", "time (us)", "algbw (GB/s)", "busbw (GB/s)",
           "link (Gbit/s)", "latency (us)")

ONE_HOST = "one host: there is no link between hosts to measure"
NO_MPI = "this job has no MPI, which measuring links between hosts needs"


def records(link: PairLink, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what is known of a pair in three records: there, back, both ways at once. ``names``: of all hosts.

    A pair is what nccl-tests' sendrecv moves between two ranks, whose busbw is its algbw.
    """
    a, b = (names[host] for host in link.hosts)
    found = []
    for source, to, way, kind in ((a, b, link.there, "send"), (b, a, link.back, "send"), (a, b, link.both, "sendrecv")):
        algbw = way.rate_Bps / 1e9
        found.append({"collective": kind, "between": [a, b], "from": source, "to": to, "size_bytes": way.size,
                      "count": way.size, "dtype": "uint8", "redop": "none", "root": -1, "time_us": 1e6 * way.seconds,
                      "algbw_GBps": algbw, "busbw_GBps": algbw, "link_Gbitps": 8 * algbw,
                      "latency_us": 1e6 * link.latency_s, "pieces": way.pieces, "pairs_at_once": link.at_once})
    return found


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a record as a row of the table."""
    way = "both directions at once" if row["collective"] == "sendrecv" else f"{row['from']} to {row['to']}"
    return [way, str(row["size_bytes"]), str(row["count"]), row["dtype"], row["redop"], str(row["root"]),
            *(format_number(row[key]) for key in ("time_us", "algbw_GBps", "busbw_GBps", "link_Gbitps", "latency_us"))]


def tables(found: Sequence[PairLink], names: Sequence[str]) -> list[tuple[str, list[list[str]]]]:
    """Return title and rows, under `HEADERS`, of every pair; of many the slowest `SINGLY`."""
    shows = found if len(found) <= SINGLY else sorted(found, key=lambda link: link.rate_Bps)[:SINGLY]
    return [(f"{both(link, names)}: link over MPI, ranks {link.ranks[0]} and {link.ranks[1]}",
             [cells(row) for row in records(link, names)]) for link in shows]


def words(found: Sequence[PairLink], names: Sequence[str]) -> list[str]:
    """Describe all pairs: the slowest one; which were measured where not all were; how."""
    worst, hosts = slowest_link(found), len(names)
    middle, pairs = others_Bps(worst, found), hosts * (hosts - 1) // 2
    rest = "" if middle is None else f"; median of the others {gbit(middle)}"
    lines = [f"{'the slowest' if len(found) > 1 else 'the only'} pair of hosts: {both(worst, names)}, "
             f"{gbit(worst.rate_Bps)} in each direction with both in use, latency "
             f"{format_number(1e6 * worst.latency_s)} us{rest}"]
    if len(found) < pairs:
        counts = [sum(host in link.hosts for link in found) for host in range(hosts)]
        lines.append(f"{len(found)} of {pairs} pairs were measured, each host with {min(counts)}"
                     + (f" to {max(counts)}" if max(counts) > min(counts) else "") + " of the others")
    if len(found) > SINGLY:
        lines.append(f"the {SINGLY} slowest pairs are shown; range of all pairs: {gbit(worst.rate_Bps)} to "
                     f"{gbit(max(link.rate_Bps for link in found))}")
    if max(link.at_once for link in found) > 1:
        lines.append(f"up to {max(link.at_once for link in found)} pairs were measured at a time and share the "
                     "bandwidth of common cables and switches")
    return lines


def both(link: PairLink, names: Sequence[str]) -> str:
    """Return the names of a pair: "a and b"."""
    return f"{names[link.hosts[0]]} and {names[link.hosts[1]]}"


def gbit(rate_Bps: float) -> str:
    """Return a rate as text: "0.9412 Gbit/s"."""
    return f"{format_number(8e-9 * rate_Bps)} Gbit/s"
