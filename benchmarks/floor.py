"""The least that a step over several hosts can take: max(compute, first bucket ready + bytes / rate + update).

Owns the formula, which contenders it is for, and its words; pure. A step cannot be shorter than its computing, nor can
its gradients arrive before they have crossed the network: nothing travels before the first bucket is ready, each host
sends its part of the ring's bytes at the rate of the slowest link, and the update comes last. What goes into it is
measured by `benchmarks.worker` in the jobs that are raced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.peers import Contender
from benchmarks.standings import Times
from hvdtrain.core.units import format_bytes

SHARES = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
"""Compression -> the part of the gradients' bytes that travels."""
TITLES = {1.0: "uncompressed", 0.5: "fp16"}
WITHOUT = ("plain-each", "hvdtrain-null")
"""Contenders whose steps exchange nothing, the first that takes part tells what computing takes."""


@dataclass(frozen=True)
class Floor:
    """The parts of the formula. ``compute_of``: what told how long computing takes; ``slowest``: the pair of hosts.

    ``compute_s``: a step without any exchange, its update in it. ``first_s``: from the begin of a step until its first
    bucket starts; None where that is inside a graph and not seen, and counts as 0. ``sent_bytes``: that
    a host sends for one uncompressed step. ``rate_Bps``: of the slowest link in each direction, both busy.
    """

    compute_s: float
    compute_of: str
    first_s: float | None
    update_s: float
    sent_bytes: float
    rate_Bps: float
    slowest: str
    hosts: int

    def seconds(self, share: float = 1.0) -> float:
        """Return the floor where ``share`` of the bytes travels."""
        return max(self.compute_s, (self.first_s or 0.0) + share * self.sent_bytes / self.rate_Bps + self.update_s)


def counts(contender: Contender) -> bool:
    """Return whether the floor is for this contender: hvdtrain's plain data parallelism, uncompressed or halved."""
    return (contender.file == "ours" and contender.compression in SHARES
            and set(contender.options) <= {"wire", "compression"})


def sent_bytes(gradient_bytes: int, hosts: int) -> float:
    """Bytes that each of H hosts sends in an all-reduce, at least: 2 (H - 1) / H of the gradients.

    Source: Patarasuk and Yuan 2009. Ranks of one host sum among themselves first, so that hosts count, not ranks.
    """
    return 2 * (hosts - 1) / hosts * gradient_bytes


def find(times: Times, contenders: Sequence[Contender], about: Mapping[str, Mapping[str, Any]]) -> Floor | None:
    """Return the floor from the jobs' reports (``about``: link, gradient_bytes, marks of each round); None on one host.

    Of several contenders the least first bucket and update count, and the median rate: their jobs do the same until the
    gradients travel. ``times``: of the complete rounds.
    """
    told = [about[c.name] for c in contenders if c.name in times and counts(c) and about[c.name].get("link")]
    rounds = min((len(ms) for ms in times.values()), default=0)
    marks = [found for one in told if (found := _medians(one.get("marks", ())[:rounds]))]
    if not told or not marks:
        return None
    update_s = min(found["update_s"] for found in marks)
    without = next((name for name in WITHOUT if name in times), None)
    compute_s = min(found["compute_s"] for found in marks) + update_s if without is None else median(
        times[without]) / 1e3
    link = told[0]["link"]
    return Floor(compute_s, without or "hvdtrain's own phases", min((found["first_s"] for found in marks
                                                                    if "first_s" in found), default=None), update_s,
                 sent_bytes(told[0]["gradient_bytes"], link["hosts"]), median(one["link"]["rate_Bps"] for one in told),
                 link["slowest"], link["hosts"])


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median over rounds of what each of them has; {} of nothing."""
    keys = set.intersection(*(set(found) for found in rounds)) if rounds else set()
    return {key: median(found[key] for found in rounds) for key in sorted(keys)}


def over(floor: Floor, times: Times, contenders: Sequence[Contender]) -> dict[str, dict[str, float]]:
    """Of each contender that counts: median ms of its step, its floor in ms, and their ratio."""
    found = {}
    for c in contenders:
        if c.name in times and counts(c):
            ms, least_ms = median(times[c.name]), 1e3 * floor.seconds(SHARES[c.compression])
            found[c.name] = {"median_ms": ms, "floor_ms": least_ms, "ratio": ms / least_ms}
    return found


def record(floor: Floor | None, times: Times, contenders: Sequence[Contender]) -> dict[str, Any] | None:
    """Return the floor for the summary; None without one."""
    if floor is None:
        return None
    return {**asdict(floor), "uncompressed_ms": 1e3 * floor.seconds(), "fp16_ms": 1e3 * floor.seconds(SHARES["fp16"]),
            "contenders": over(floor, times, contenders)}


def lines(floor: Floor, times: Times, contenders: Sequence[Contender]) -> list[str]:
    """Return the parts, the floor, and each contender's step over it."""
    first = ("the first bucket is ready inside a graph, not seen: 0" if floor.first_s is None else
             f"first bucket ready {1e3 * floor.first_s:.2f} ms after a step's begin")
    told = [f"floor of a step over {floor.hosts} hosts: max(compute, first bucket ready + bytes / rate + update)",
            f"  compute {1e3 * floor.compute_s:.2f} ms ({floor.compute_of})", f"  {first}",
            f"  bytes {format_bytes(floor.sent_bytes)} that each host sends, fp16 half of them",
            f"  rate {8e-9 * floor.rate_Bps:.4f} Gbit/s in each direction ({floor.slowest}, the slowest link over MPI)",
            f"  update {1e3 * floor.update_s:.2f} ms"]
    told += [f"  floor, {TITLES[share]}: {1e3 * floor.seconds(share):.2f} ms" for share in TITLES]
    for c in contenders:
        if (found := over(floor, times, [c])):
            told.append(f"  {c.name}: {found[c.name]['median_ms']:.2f} ms, {found[c.name]['ratio']:.3f} of the floor, "
                        f"{TITLES[SHARES[c.compression]]}")
    return told
