"""Hosts of a job, their ranks and cores. Owns the survey and the thread count of a rank; backends set thread counts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.cluster.machine.usage import tightest_quota
from hvdtrain.core.errors import count
from hvdtrain.core.mesh import spans
from hvdtrain.core.protocols import Control


@dataclass(frozen=True)
class HostRanks:
    """A host: its name, the ranks on it (ascending), and the cores that they may use together."""

    node: str
    ranks: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class Topology:
    """``hosts`` in order of their lowest rank."""

    hosts: tuple[HostRanks, ...]

    @property
    def size(self) -> int:
        return sum(len(h.ranks) for h in self.hosts)

    @property
    def homogeneous(self) -> bool:
        return len({len(h.ranks) for h in self.hosts}) == 1

    def host_of(self, rank: int) -> HostRanks:
        return next(h for h in self.hosts if rank in h.ranks)

    def cores_of(self, rank: int) -> int:
        """Return the cores that ``rank``, the caller, may use: those it is bound to, or its share of the host's."""
        host = self.host_of(rank)
        return compute_threads(len(affinity()), host.cores, len(host.ranks), 0)

    def describe(self) -> str:
        """Return a line for the summary: "2 hosts: a (ranks 0-3, 8 cores), b (ranks 4-5, 4 cores)"."""
        each = ", ".join(f"{h.node} (rank{'s' if len(h.ranks) > 1 else ''} {spans(h.ranks)}, "
                         f"{count(h.cores, 'core')})" for h in self.hosts[:8])
        more = f", and {len(self.hosts) - 8} more" if len(self.hosts) > 8 else ""
        return f"{count(len(self.hosts), 'host')}: {each}{more}"


def arrange(rows: Sequence[tuple[str, Sequence[int], float] | tuple[str, Sequence[int], float, str]]) -> Topology:
    """Return the topology of the ranks' ``(node, cores this rank may run on, quota in cores, whose quota)``, by rank.
    Pure.

    The cores of a host are the union over its ranks: ranks that mpirun bound to one core each add up, ranks that share
    all cores do not. Quotas lower it: one that ranks share, such as a container's, once; own groups' add up.
    """
    nodes = list(dict.fromkeys(row[0] for row in rows))
    hosts = []
    for node in nodes:
        ranks = tuple(r for r, row in enumerate(rows) if row[0] == node)
        union = {core for r in ranks for core in rows[r][1]}
        quota = sum({rows[r][3:]: rows[r][2] for r in ranks}.values())
        hosts.append(HostRanks(node, ranks, max(1, int(min(len(union), quota)))))
    return Topology(tuple(hosts))


def survey(control: Control) -> Topology:
    """Gather the topology of the job; collective."""
    return arrange(control.gather((control.node, sorted(affinity()), *tightest_quota())))


def affinity() -> set[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def compute_threads(bound: int, cores: int, local_size: int, asked: int) -> int:
    """Return the compute threads that one rank should use. Pure.

    ``bound``: cores this rank may run on; ``cores``: cores of its host that all its ranks may use together; ``asked``:
    the user's number, 0 to choose. A rank bound to some of the cores uses those; ranks that share the cores use an
    equal share each, at least one.
    """
    if asked > 0:
        return asked
    shared = max(1, cores // max(1, local_size))
    return max(1, bound) if bound < cores else shared
