"""Which ranks run on which host, with how many cores.

Owns the survey and the arithmetic on it, such as the thread count of a rank. Does not set thread counts: backends do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.core.errors import count
from hvdtrain.core.mesh import spans
from hvdtrain.core.protocols import Control


@dataclass(frozen=True)
class Host:
    """One host: its name, the ranks on it (ascending), and the cores that they may use together."""

    node: str
    ranks: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class Topology:
    """``hosts`` in order of their lowest rank."""

    hosts: tuple[Host, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(h.ranks) for h in self.hosts)

    @property
    def homogeneous(self) -> bool:
        """Every host has the same number of ranks."""
        return len({len(h.ranks) for h in self.hosts}) == 1

    def host_of(self, rank: int) -> Host:
        """The host that ``rank`` runs on."""
        return next(h for h in self.hosts if rank in h.ranks)

    def cores_of(self, rank: int) -> int:
        """Cores that ``rank``, which asks, may use by itself: those it is bound to, or its part of the host's."""
        host = self.host_of(rank)
        return compute_threads(len(affinity()), host.cores, len(host.ranks), 0)

    def describe(self) -> str:
        """One line for the summary: "2 hosts: a (ranks 0-3, 8 cores), b (ranks 4-5, 4 cores)"."""
        each = ", ".join(f"{h.node} (rank{'s' if len(h.ranks) > 1 else ''} {spans(h.ranks)}, "
                         f"{count(h.cores, 'core')})" for h in self.hosts[:8])
        more = f", and {len(self.hosts) - 8} more" if len(self.hosts) > 8 else ""
        return f"{count(len(self.hosts), 'host')}: {each}{more}"


def arrange(rows: Sequence[tuple[str, Sequence[int], float] | tuple[str, Sequence[int], float, str]]) -> Topology:
    """Topology of the ranks' ``(node, cores this rank may run on, quota in cores, whose quota)``, by rank. Pure.

    The cores of a host are the union over its ranks: ranks that mpirun bound to one core each add up, ranks that
    share all cores do not. Quotas lower it: one that ranks share, such as a container's, once; those of groups of their
    own add up.
    """
    nodes = list(dict.fromkeys(row[0] for row in rows))
    hosts = []
    for node in nodes:
        ranks = tuple(r for r, row in enumerate(rows) if row[0] == node)
        union = {core for r in ranks for core in rows[r][1]}
        quota = sum({rows[r][3:]: rows[r][2] for r in ranks}.values())
        hosts.append(Host(node, ranks, max(1, int(min(len(union), quota)))))
    return Topology(tuple(hosts))


def survey(control: Control) -> Topology:
    """Gather the topology of the job; collective."""
    return arrange(control.gather((control.node, sorted(affinity()), *tightest_quota())))


def affinity() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cpu_quota(cgroup: str = "/sys/fs/cgroup", proc: str = "/proc") -> float:
    """Cores' worth of time that this process may use; infinite where there is no limit (`tightest_quota`)."""
    return tightest_quota(cgroup, proc)[0]


def tightest_quota(cgroup: str = "/sys/fs/cgroup", proc: str = "/proc") -> tuple[float, str]:
    """(cores' worth of time, the group) of the tightest processor quota around this process; (inf, "") without one.

    Of the control groups of versions 1 and 2 that this process is in, and of all around those, as far as they can be
    seen from here: a container sees its own alone, at the top.
    """
    found = [(cores, str(folder)) for folder, name in _groups(Path(cgroup), Path(proc))
             if (cores := _quota(folder, name)) is not None]
    return min(found, default=(float("inf"), ""))


def _groups(cgroup: Path, proc: Path) -> list[tuple[Path, str]]:
    """(folder, file of the quota) of each control group around this process that may hold one."""
    one, two = "cpu.cfs_quota_us", "cpu.max"
    found = {cgroup: two, cgroup / "cpu": one}
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, kinds, path = (line.split(":", 2) + ["", ""])[:3]
        if number != "0" and "cpu" not in kinds.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in (cgroup, cgroup / "unified") if number == "0" else (cgroup / kinds, cgroup / "cpu"):
            found |= {top.joinpath(*parts[:i]): two if number == "0" else one for i in range(len(parts) + 1)}
    return list(found.items())


def _quota(folder: Path, name: str) -> float | None:
    """Cores' worth of time that one group allows; None where it says nothing, or no limit."""
    try:
        words = (folder / name).read_text().split()
        period = int(words[1] if len(words) > 1 else (folder / "cpu.cfs_period_us").read_text())
        return int(words[0]) / period if int(words[0]) > 0 and period > 0 else None
    except (OSError, ValueError, IndexError):  # "max" is no number: no limit
        return None


def compute_threads(bound: int, cores: int, local_size: int, asked: int) -> int:
    """Compute threads one rank should use. Pure.

    ``bound``: cores this rank may run on; ``cores``: cores of its host that all its ranks may use together;
    ``asked``: the user's number, 0 to choose. A rank bound to part of the cores uses that part; ranks that share
    the cores use an equal part each, at least one.
    """
    if asked > 0:
        return asked
    shared = max(1, cores // max(1, local_size))
    return max(1, bound) if bound < cores else shared
