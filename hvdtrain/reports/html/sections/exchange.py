"""Transport of gradients, compression and compilation, with the tables of the decisions."""

from __future__ import annotations

from typing import Any

from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import Prose, Section, Table
from hvdtrain.reports.html.words import cut, duration, number, short, size

WIRES = {"null": "nothing: there was one rank", "shared": "shared memory",
         "mpi": "plain MPI", "horovod": "Horovod"}
_STAGES = {"rule": "chosen by rule", "decided": "decided", "tried": "tried", "checked": "checked",
           "changed": "given up, to decide again"}


def make(facts: RunFacts) -> Section | None:
    lines, blocks = [], []
    wire = str(facts.start.get("wire") or "")
    if wire:
        lines.append("Gradients went over "
                     f"{WIRES.get(wire, wire)}{f' (`collectives: {wire}`)' if wire in WIRES else ''}.")
    for name, title, what in (("wire", "Estimated transports", "transport"),
                              ("compression", "Estimated compressors", "compressor")):
        events = facts.log.all(name)
        for event in events:
            v = event.values
            stage = _STAGES.get(str(v.get("stage")), "decided") if name == "wire" else v.get("stage", "decided")
            lines.append(f"Step {event.step:,}: {name} {v.get('choice')} was {stage}: "
                         f"{cut(v.get('reason') or '', 300)}.")
        decided = next((e.values for e in reversed(events) if e.values.get("rows")), None)
        if decided is not None:
            blocks += _tables(decided, title, what)
    for event in facts.log.all("compile"):
        lines.append(f"Step {event.step:,}: compile {event.values.get('option')}: {_kinds(event.values.get('kinds'))}.")
    if not lines and not blocks:
        return None
    return Section("exchange", "Exchange and compilation", "", [Prose(lines[-30:]), *blocks])


def _tables(decided: dict[str, Any], title: str, what: str) -> list[Table]:
    tables = []
    rows = [row for row in decided["rows"] if isinstance(row, dict)]
    heads = list(
        dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (list, dict)))
    )
    marked = frozenset(i for i, row in enumerate(rows) if row.get("name") == decided.get("choice"))
    if rows:
        tables.append(Table(title, [_head(h) for h in heads],
                            [[_cell(h, row.get(h)) for h in heads] for row in rows], marked=marked,
                            note=f"The measurement took {duration(number(decided.get('sweep_s')))}."))
    refused = decided.get("refused")
    if isinstance(refused, dict) and refused:
        tables.append(Table("Not used", [what, "why"], [[str(k), cut(v or "", 200)] for k, v in refused.items() if v],
                            folded=True, words=frozenset({1})))
    links = decided.get("links")
    if isinstance(links, dict) and links and all(isinstance(one, dict) for one in links.values()):
        names = list(dict.fromkeys(key for one in links.values() for key in one))
        tables.append(
            Table(
                "Measured links",
                ["collective", *(_head(n) for n in names)],
                [[str(kind), *(_cell(n, one.get(n)) for n in names)] for kind, one in links.items()],
                folded=True,
            )
        )
    return tables


def _head(name: str) -> str:
    return str(name).removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return "" if value is None else str(value)
    if str(name).endswith("bytes"):
        return size(number(value))
    return (
        duration(number(value))
        if str(name).endswith("_s")
        else short(number(value)) if number(value) == number(value) else cut(value, 60)
    )


def _kinds(kinds: Any) -> str:
    if not isinstance(kinds, dict):
        return "decided"
    said = []
    for kind, one in kinds.items():
        kept = one.get("kept") if isinstance(one, dict) else None
        said.append(f"{'kept' if kept else 'not kept'} on {kind}")
    return ", ".join(said)
