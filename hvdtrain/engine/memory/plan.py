"""A memory plan of all ranks: what each holds, whether it fits, what would help; and the words for it.

Owns how ranks come to one plan. Counting is `forecast`'s, measuring `survey`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdtrain.core.units import KINDS, Footprint, format_bytes
from hvdtrain.engine.memory import survey
from hvdtrain.engine.memory.survey import Scene
from hvdtrain.planning import shards
from hvdtrain.planning.memory import options
from hvdtrain.planning.memory.forecast import MemoryFacts, forecast
from hvdtrain.planning.memory.options import Option

CLOSE = 0.8
"""Part of what a rank may take from which on a plan counts as close to the limit."""


@dataclass(frozen=True)
class Plan:
    """The same on every rank. ``needs_P``: what ranks hold; ``free_P``: what each may hold; ``options``: best first."""

    needs_P: tuple[Footprint, ...]
    free_P: tuple[int | None, ...]
    options: tuple[Option, ...] = ()

    def fits(self, rank: int) -> bool:
        """Return whether a rank has room, as far as that is known."""
        free = self.free_P[rank]
        return free is None or self.needs_P[rank].total <= free

    def load(self, rank: int) -> float:
        """Return the part of a rank's room that it takes; 0 where that is unknown."""
        free = self.free_P[rank]
        return 0.0 if free is None else self.needs_P[rank].total / max(1, free)

    def tightest(self) -> int:
        """Return the rank that is nearest to its limit, of equal ones the one that holds most."""
        return max(range(len(self.needs_P)), key=lambda r: (self.load(r), self.needs_P[r].total))

    def sentence(self) -> str:
        """Return what is wrong and the best way out, or "" while every rank keeps well below its limit."""
        rank = self.tightest()
        if self.load(rank) < CLOSE:
            return ""
        need, free = self.needs_P[rank].total, self.free_P[rank]
        assert free is not None
        said = f"memory: rank {rank} will hold about {format_bytes(need)} of the {format_bytes(free)} that it may take"
        if not self.options:
            return said
        best = self.options[0]
        then = best.needs_P[rank].total
        return f"{said}; {best.name} would take {format_bytes(then)} ({best.cost}): add {best.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return {"ranks": [{**asdict(need), "total": need.total, "free": free, "fits": self.fits(r)}
                          for r, (need, free) in enumerate(zip(self.needs_P, self.free_P))],
                "options": [{"name": o.name, "add": o.line, "cost": o.cost, "saves": o.saved(self.needs_P),
                             "fits": o.fits(self.free_P), "totals": [n.total for n in o.needs_P]}
                            for o in self.options]}

    def rows(self) -> list[list[str]]:
        """Return the table's cells: one row a rank."""
        return [[str(r), *(format_bytes(getattr(need, kind)) for kind in KINDS), format_bytes(need.total),
                 "unknown" if self.free_P[r] is None else format_bytes(self.free_P[r] or 0),
                 "unknown" if self.free_P[r] is None else "yes" if self.fits(r) else "no"]
                for r, need in enumerate(self.needs_P)]

    def option_rows(self) -> list[list[str]]:
        """Return the cells of what would help, best first."""
        return [[o.name, format_bytes(o.saved(self.needs_P)), "yes" if o.fits(self.free_P) else "no", o.cost, o.line]
                for o in self.options]


COLUMNS = ("rank", *KINDS, "total", "free", "fits")
OPTION_COLUMNS = ("option", "saves", "fits", "costs", "add to the command")


def made(scene: Scene, dp: Any, measures: bool = True) -> Plan:
    """Return the plan of a run whose parts are there; collective. Without ``measures`` activations are left out."""
    facts = facts_now(scene, survey.way_of(scene, dp), measures)
    return agreed_plan(scene, facts)


def facts_now(scene: Scene, way: Any, measures: bool) -> MemoryFacts:
    """Return this rank's facts, measured or not; not collective."""
    facts = survey.facts_of(scene, way)
    if not measures:
        return facts
    return MemoryFacts(facts.model, facts.rank, facts.way, survey.measure(scene, facts.model, way, True))


def agreed_plan(scene: Scene, facts: MemoryFacts, always: bool = True) -> Plan:
    """Return the plan of all ranks' ``facts``; collective.

    Unless ``always``, options are looked for near the limit alone.
    """
    control = scene.control
    rows = control.gather((forecast(facts), facts.rank.free_bytes))
    free_P = [free for _, free in rows]
    plan = Plan(tuple(need for need, _ in rows), tuple(free_P))
    if not always and plan.load(plan.tightest()) < CLOSE:
        return plan
    parts_P = scene.config.data_parallel.shards or parts_by(free_P)
    found = list(options.changes(facts, scene.config, facts.way.buckets or scene.buckets(), parts_P,
                                 bool(scene.parts.blocks), scene.device.kind))
    names_P = control.gather([change.name for change in found])  # a rank with one sample cannot halve it
    found = [change for change in found if all(change.name in names for names in names_P)]
    rows_P = control.gather(options.tried(facts, found))
    offered = [Option(c.name, c.line, c.cost, tuple(row[i] for row in rows_P)) for i, c in enumerate(found)]
    return replace(plan, options=tuple(options.ranked(offered, plan.needs_P, free_P)))


def parts_by(free_P: Sequence[int | None]) -> list[float]:
    """Return each rank's part of a divided state: by what it has free, equal ones where that is unknown."""
    known = [free for free in free_P if free is not None]
    return shards.by_room(known) if len(known) == len(free_P) else [1 / len(free_P)] * len(free_P)
