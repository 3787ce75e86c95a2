"""Memory by kind and rank: estimate and measurement."""

from __future__ import annotations

from typing import Any

from hvdtrain.core.units import KINDS
from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import Bars, Section, StackedBar, Table, bar
from hvdtrain.reports.html.words import number, percent, size

MOST = 16
NAMES = {"state": "optimizer state", "buckets": "exchange"}
COLORS = {kind: f"m{i}" for i, kind in enumerate(KINDS)}


def make(facts: RunFacts) -> Section | None:
    memory = facts.log.last("end").get("memory") or facts.start.get("memory") or (facts.completed or {}).get("memory")
    memory = memory if isinstance(memory, dict) else {}
    rows = facts.log.last("system").get("ranks")
    rows = [row if isinstance(row, dict) else {} for row in rows] if isinstance(rows, list) else []
    blocks: list[Any] = []
    reckoned, measured = _kinds(memory.get("reckoned")), _kinds(memory.get("measured"))
    if not any(measured):
        measured = _kinds([row.get("memory") for row in rows])
    if any(reckoned) or any(measured):
        blocks.append(_by_kind(facts, reckoned, measured, memory))
    table = _planned(facts, memory, rows)
    if table is not None:
        blocks.append(table)
    fitted = _fit(facts)
    if fitted is not None:
        blocks.append(fitted)
    if not blocks:
        return None
    return Section("memory", "Memory", _lead(memory, rows), blocks)


def _lead(memory: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Say why the figures for one rank differ."""
    peaks = [_at(memory.get("peak"), r) for r in range(len(rows))]
    rss = [number(row.get("rss_bytes")) for row in rows]
    if not any(p == p for p in peaks) or not any(one == one for one in rss):
        return ""
    return ("The estimate covers the model's state. The peak adds the workspace of steps; on a CPU "
            "it is counted after the imports, on a GPU by the allocator. The process (RSS) also holds "
            "interpreter and libraries.")


def _at(values: Any, rank: int) -> float:
    return number(values[rank]) if isinstance(values, list) and rank < len(values) else float("nan")


def _kinds(rows: Any) -> list[dict[str, float]]:
    """By rank, kind -> bytes, of what is known."""
    return [{str(k): number(v) for k, v in row.items() if number(v) > 0} if isinstance(row, dict) else {}
            for row in rows] if isinstance(rows, list) else []


def _by_kind(facts: RunFacts, reckoned: list[dict[str, float]], measured: list[dict[str, float]],
             memory: dict[str, Any]) -> Bars:
    """Two bars a rank, as far as both are known: what was estimated above what was measured."""
    ranks = max(len(reckoned), len(measured))
    found = [row for row in (*reckoned, *measured) if row]
    names = list(
        dict.fromkeys([k for k in KINDS if any(k in row for row in found)] + [k for row in found for k in row])
    )
    colors = {name: COLORS.get(name, f"m{i % 8}") for i, name in enumerate(names)}
    peaks = [_at(memory.get("peak"), r) for r in range(ranks)]
    full = max([sum(row.values()) for row in found] + [p for p in peaks if p == p] + [1.0])
    rows: list[StackedBar] = []
    for rank in range(min(ranks, MOST)):
        for kinds, what in ((reckoned, "estimated"), (measured, "measured")):
            row = kinds[rank] if rank < len(kinds) else {}
            if row:
                label = f"rank {rank}, {what}" if any(reckoned) and any(measured) else facts.who(rank)
                words = {colors[k]: f"{label}: {NAMES.get(k, k)} {size(v)}" for k, v in row.items()}
                mark = peaks[rank] if what == "measured" and peaks[rank] == peaks[rank] else -1.0
                rows.append(bar(label, {colors[k]: row[k] for k in names if k in row}, full, words,
                                size(sum(row.values())), mark=mark))
    legend = [(colors[name], NAMES.get(name, name), size(max(row.get(name, 0.0) for row in found))) for name in names]
    note = "Amounts next to the names: maximum over ranks." + (
        " The vertical line is the measured peak." if any(p == p for p in peaks) else "") + (
        f" {ranks - MOST} more ranks are not drawn." if ranks > MOST else "")
    return Bars("By kind", rows, legend, note)


def _planned(facts: RunFacts, memory: dict[str, Any], rows: list[dict[str, Any]]) -> Table | None:
    """State as estimated, the peak as measured, what was free, and what allocators hold in vain."""
    ranks = max([len(v) for v in memory.values() if isinstance(v, list)] + [len(rows)], default=0)
    heads = ["", "estimated: parameters, gradients, optimizer", "measured: peak", "free at the start", "process (RSS)",
             "allocated", "reserved", "fragmentation"]
    table = []
    for rank in range(min(ranks, MOST)):
        row = rows[rank] if rank < len(rows) else {}
        part = number(row.get("fragmentation"))
        cells = [_at(memory.get("state"), rank), _at(memory.get("peak"), rank), _at(memory.get("free"), rank),
                 number(row.get("rss_bytes")), number(row.get("allocated_bytes")), number(row.get("reserved_bytes"))]
        table.append([facts.who(rank), *("" if cell != cell else size(cell) for cell in cells),
                      "" if part != part else percent(100 * part)])
    used = [0, *(i for i in range(1, len(heads)) if any(row[i] for row in table))]
    if len(used) < 2:
        return None
    return Table("Plan and measurement", [heads[i] for i in used], [[row[i] for i in used] for row in table])


def _fit(facts: RunFacts) -> Table | None:
    found = facts.log.last("memory_fit").get("ranks")
    rows = []
    for rank, row in enumerate(found if isinstance(found, list) else ()):
        if isinstance(row, dict) and rank < MOST:
            names = row.get("recomputed")
            rows.append([facts.who(rank), str(row.get("micro_batch", "")), str(row.get("micro_batches", "")),
                         size(number(row.get("need_then"))), size(number(row.get("free"))),
                         str(len(names)) if isinstance(names, list) else ""])
    if not rows:
        return None
    return Table("Micro-batches chosen by memory", ["", "samples", "per step", "needs", "free",
                                                    "checkpointed blocks"], rows)
