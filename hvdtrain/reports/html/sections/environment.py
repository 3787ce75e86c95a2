"""Hosts, devices, versions and clocks."""

from __future__ import annotations

from typing import Any

from hvdtrain.core.mesh import spans
from hvdtrain.reports.html.facts import RunFacts, environment
from hvdtrain.reports.html.shapes import Section, Table
from hvdtrain.reports.html.words import cut, duration, number, size

MOST = 32


def make(facts: RunFacts) -> Section | None:
    found = environment(facts)
    blocks: list[Any] = []
    hosts = found.get("hosts")
    rows = (
        [
            [
                str(h.get("node", "")),
                _ranks(h.get("ranks")),
                str(h.get("cores", "")),
                size(number(h.get("memory_bytes"))),
                cut(h.get("cpu") or "", 80),
            ]
            for h in hosts[:MOST]
            if isinstance(h, dict)
        ]
        if isinstance(hosts, list)
        else []
    )
    if rows:
        blocks.append(Table("Hosts", ["host", "ranks", "cores", "memory", "processor"], rows, words=frozenset({4})))
    elif facts.start.get("hosts"):
        blocks.append(Table("Hosts", ["hosts"], [[str(facts.start["hosts"])]], words=frozenset({0})))
    if cut_over_ranks := _pipeline(facts):
        blocks.append(cut_over_ranks)
    devices, clocks = found.get("devices"), facts.log.last("clocks").get("ranks")
    per_rank = _per_rank(
        facts, devices if isinstance(devices, list) else [], clocks if isinstance(clocks, list) else []
    )
    if per_rank is not None:
        blocks.append(per_rank)
    versions = found.get("versions")
    rows = [[str(k), str(v)] for k, v in versions.items()] if isinstance(versions, dict) else []
    rows = [[name, str(found[key])] for name, key in (("Python", "python"), ("MPI", "mpi"), ("launcher", "launcher"))
            if found.get(key)] + rows
    if rows:
        blocks.append(Table("Versions", ["package", "version"], rows, folded=len(rows) > 12))
    return Section("environment", "Environment", "", blocks) if blocks else None


def _pipeline(facts: RunFacts) -> Table | None:
    """Return the table of ranks and blocks of a partitioned model."""
    told = facts.start.get("pipeline")
    named = told.get("blocks") if isinstance(told, dict) else None
    rows = []
    for copy, ranks in enumerate(facts.copies):
        blocks = named[copy] if isinstance(named, list) and copy < len(named) else ()
        for stage, rank in enumerate(ranks):
            own = blocks[stage] if isinstance(blocks, list) and stage < len(blocks) else ""
            rows.append([str(copy), str(stage), facts.who(rank), cut(own, 120)])
    return Table("Partition of the model", ["replica", "stage", "", "blocks"], rows[:MOST], words=frozenset({3})
                 ) if rows else None


def _ranks(ranks: Any) -> str:
    return spans(tuple(sorted(r for r in ranks if isinstance(r, int)))) if isinstance(ranks, list) else str(ranks or "")


def _per_rank(facts: RunFacts, devices: list[Any], clocks: list[Any]) -> Table | None:
    """Devices and clocks of ranks; ranks that are alike are one row."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in range(max(len(devices), len(clocks))):
        clock = clocks[rank] if rank < len(clocks) and isinstance(clocks[rank], dict) else {}
        key = (cut(devices[rank], 80) if rank < len(devices) else "",
               "" if not clock else duration(number(clock.get("offset_s"))),
               "" if not clock else duration(number(clock.get("within_s"))))
        groups.setdefault(key, []).append(rank)
    rows = [[_ranks(ranks), *key] for key, ranks in list(groups.items())[:MOST]]
    heads = ["ranks", "device", "clock ahead of rank 0's", "error at most"]
    used = [0, *(i for i in (1, 2, 3) if any(row[i] for row in rows))]
    if len(used) < 2:
        return None
    return Table("Devices and clocks", [heads[i] for i in used], [[row[i] for i in used] for row in rows],
                 words=frozenset({1}))
