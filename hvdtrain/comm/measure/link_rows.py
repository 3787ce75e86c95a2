"""The links between hosts as `bench wire` and `doctor` show them: nccl-tests' columns, pair by pair, and the slowest.

Owns rows, titles and words; the measuring is `hvdtrain.cluster.links`.
A pair is what nccl-tests' sendrecv moves between two ranks, whose busbw is its algbw; here each direction also goes
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.cluster.pair_links import SINGLY, PairLink, others_Bps, slowest
from hvdtrain.core.units import format_number

HEADERS = ("way", "size (B)", "count", "type", "redop", "root", "time (us)", "algbw (GB/s)", "busbw (GB/s)",
           "link (Gbit/s)", "latency (us)")

ONE_HOST = "one host: there is no link between hosts to measure"
NO_MPI = "this job has no MPI, over which links between hosts are measured"


def records(link: PairLink, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what is known of a pair in three records: there, back, both ways at once. ``names``: of all hosts."""
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
    way = "both at once" if row["collective"] == "sendrecv" else f"{row['from']} to {row['to']}"
    return [way, str(row["size_bytes"]), str(row["count"]), row["dtype"], row["redop"], str(row["root"]),
            *(format_number(row[key]) for key in ("time_us", "algbw_GBps", "busbw_GBps", "link_Gbitps", "latency_us"))]


def tables(found: Sequence[PairLink], names: Sequence[str]) -> list[tuple[str, list[list[str]]]]:
    """Return title and rows, under `HEADERS`, of every pair; of many the slowest `SINGLY`."""
    shows = found if len(found) <= SINGLY else sorted(found, key=lambda link: link.rate_Bps)[:SINGLY]
    return [(f"{both(link, names)}: link over MPI, ranks {link.ranks[0]} and {link.ranks[1]}",
             [cells(row) for row in records(link, names)]) for link in shows]


def words(found: Sequence[PairLink], names: Sequence[str]) -> list[str]:
    """Return sentences about all pairs: the slowest one; which were measured where not all were; how."""
    worst, hosts = slowest(found), len(names)
    middle, pairs = others_Bps(worst, found), hosts * (hosts - 1) // 2
    rest = "" if middle is None else f"; median of the others {gbit(middle)}"
    told = [f"{'the slowest' if len(found) > 1 else 'the only'} pair of hosts: {both(worst, names)}, "
            f"{gbit(worst.rate_Bps)} in each direction with both busy, latency "
            f"{format_number(1e6 * worst.latency_s)} us{rest}"]
    if len(found) < pairs:
        met = [sum(host in link.hosts for link in found) for host in range(hosts)]
        told.append(f"{len(found)} of {pairs} pairs were measured, each host with {min(met)}"
                    + (f" to {max(met)}" if max(met) > min(met) else "") + " of the others")
    if len(found) > SINGLY:
        told.append(f"the {SINGLY} slowest pairs are shown; all of them: {gbit(worst.rate_Bps)} to "
                    f"{gbit(max(link.rate_Bps for link in found))}")
    if max(link.at_once for link in found) > 1:
        told.append(f"pairs were measured up to {max(link.at_once for link in found)} at a time: what they share, such "
                    "as a cable between two switches, is divided among them")
    return told


def both(link: PairLink, names: Sequence[str]) -> str:
    """Return the names of a pair: "a and b"."""
    return f"{names[link.hosts[0]]} and {names[link.hosts[1]]}"


def gbit(rate_Bps: float) -> str:
    """Return a rate in words: "0.9412 Gbit/s"."""
    return f"{format_number(8e-9 * rate_Bps)} Gbit/s"
