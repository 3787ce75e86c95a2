"""The memory plan of a run, and the micro-batch and recomputed blocks that fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdtrain.cluster.machine import memory
from hvdtrain.config.texts import WORDS, wanted
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import BlockCost
from hvdtrain.core.units import KINDS, Footprint, format_bytes
from hvdtrain.engine import memory_survey
from hvdtrain.engine.memory_survey import MemoryProbeContext
from hvdtrain.engine.run import Run
from hvdtrain.planning import shards
from hvdtrain.planning.linear import LinearTime, fit
from hvdtrain.planning.memory import options
from hvdtrain.planning.memory.fit import Fit, MemoryRoom, choose, in_parts, peak, scaled
from hvdtrain.planning.memory.forecast import MemoryFacts, Sharding, forecast
from hvdtrain.planning.memory.options import Option

MOST_OFF = 0.1
"""Part by which the bytes that recomputing saves may be less than estimated before blocks are chosen again."""

SEEN_FROM = 1 << 24
"""Bytes from which a saving shows in what a process holds; on hosts smaller ones drown in its heap."""


@dataclass(frozen=True)
class RankFit:
    """Decision of a rank. ``samples``: its part of a step. ``free``: bytes that it may hold, None: unknown.

    ``costs``: of the blocks it could recompute, for a micro-batch. ``predicted``, ``measured``: bytes that recomputing
    the chosen ones saved in a trial of ``tried`` samples; 0 where it was none.
    """

    fit: Fit
    samples: int
    free: int | None
    costs: tuple[BlockCost, ...] = ()
    predicted: int = 0
    measured: int = 0
    tried: int = 0

    def to_dict(self) -> dict[str, Any]:
        fit = self.fit
        return {"samples": self.samples, "micro_batch": fit.micro_batch, "micro_batches": fit.parts, "need": fit.need,
                "free": self.free, "need_then": fit.choice.peak, "fits": fit.choice.fits,
                "recomputed": list(fit.choice.names), "recompute_s": fit.choice.seconds,
                "blocks": [asdict(cost) for cost in self.costs], "tried_samples": self.tried,
                "saved_predicted": self.predicted, "saved_measured": self.measured}


class Settling:
    """A rank on its way to a decision: measured once, decided as often as the ranks' agreement asks for.

    ``micro``, ``remat``: whether the configuration leaves the one and the other to it. ``cap``: samples that no
    micro-batch may exceed, 0 for none: the configuration's, or what once ran out of memory.
    """

    def __init__(self, scene: MemoryProbeContext, way: Sharding, micro: bool, remat: bool, cap: int = 0) -> None:
        self._scene, self._way, self._micro, self._cap = scene, way, micro, cap
        self._remat = scene.parts.remat if remat else None
        if self._remat is not None:
            self._remat.choose(())
        self.samples, self._least_parts = _samples(scene, cap)
        self._facts = facts = memory_survey.facts_of(scene, way)
        if self.samples:  # else there is nothing to compute, and BatchNorm could not with one sample
            measured = memory_survey.measure(scene, facts.model, way, self._remat is not None)
            self._facts = replace(facts, measured=measured)
        timed = micro and self._remat is not None and self.samples > 0
        self._room = MemoryRoom(self.need, facts.rank.free_bytes, self._costs, self._line()
                                if timed else LinearTime(0.0, 1e-9))

    def need(self, micro_batch: int) -> int:
        """Return the bytes that this rank holds in all with nothing recomputed."""
        rank = self._facts.rank
        parts = max(rank.micros, -(-self.samples // max(1, micro_batch)))
        return forecast(replace(self._facts, rank=replace(rank, micro_batch=micro_batch, micros=parts))).total

    def decide(self, parts: int = 0) -> RankFit:
        """Return what is best: in ``parts`` micro-batches where they are given, else in as many as is best.

        The blocks are chosen and tried, and chosen again where they save less than was estimated.
        """
        for _ in range(2):
            fit = self._decided(parts)
            own = self._tried(fit)
            if own.measured >= (1 - MOST_OFF) * own.predicted:
                break
            self._worth(max(0.0, own.measured / own.predicted))
        return own

    def keeps(self, micro_batch: int) -> bool:
        """Return whether a micro-batch that an earlier part of this run had still fits here, with ``remat`` at most."""
        if not self.samples or not micro_batch:
            return True
        return in_parts(self._room, self.samples, -(-self.samples // micro_batch)).choice.fits

    def _decided(self, parts: int) -> Fit:
        n, room = self.samples, self._room
        if parts:
            return in_parts(room, n, parts)
        # BatchNorm takes no statistics of one sample.
        least = 2 if self._scene.parts.caveats() and n > 1 else 1
        most = max(self._least_parts, n // least) if self._micro else self._least_parts
        return choose(room, n, self._least_parts, most)

    def _costs(self, micro_batch: int) -> list[BlockCost]:
        return options.costs(self._facts, micro_batch)

    def _tried(self, fit: Fit) -> RankFit:
        measured, micro = self._facts.measured, fit.micro_batch
        costs = tuple(self._costs(micro)) if micro else ()
        own = RankFit(fit, self.samples, self._room.free, costs)
        if self._remat is None:
            return own
        n = measured.block_samples
        small = scaled(measured.blocks, 1.0)
        predicted = sum(cost.saved_bytes for cost in small if cost.name in fit.choice.names)
        shows = not measured.with_gradients or self._scene.device.kind != "cpu" or predicted >= SEEN_FROM
        if not fit.choice.names or not shows:
            self._remat.choose(fit.choice.names)
            return own
        whole = memory_survey.pass_bytes(self._scene, n)
        self._remat.choose(fit.choice.names)
        less = memory_survey.pass_bytes(self._scene, n)
        return replace(own, predicted=whole - peak(small, fit.choice.names, whole), measured=whole - less,
                       tried=n)

    def _worth(self, factor: float) -> None:
        """Take every block's saving for ``factor`` of what was estimated."""
        measured = self._facts.measured
        blocks = tuple(replace(cost, saved_bytes=int(factor * cost.saved_bytes)) for cost in measured.blocks)
        self._facts = replace(self._facts, measured=replace(measured, blocks=blocks))
        assert self._remat is not None
        self._remat.choose(())

    def _line(self) -> LinearTime:
        """Seconds of a micro-batch, by those that were tried for their memory: graphs of these sizes are there."""
        most = self._facts.measured.block_samples
        sizes = sorted({max(1, most // 2), most})
        return fit(sizes, [_seconds(self._scene, n) for n in sizes])


def estimator(scene: MemoryProbeContext, way: Sharding) -> Callable[[int], int] | None:
    """Return what this process holds at most, by the samples of a micro-batch, as it is before anything is recomputed.

    None where there is ample room, so that nothing more than a small pass has to be measured.
    """
    facts = memory_survey.facts_of(scene, way)
    if memory_survey.roughly_fits(scene, facts):
        return None
    facts = replace(facts, measured=memory_survey.measure(scene, facts.model, way))
    return lambda n: memory.imported_bytes() + forecast(replace(facts, rank=replace(facts.rank, micro_batch=n))).total


def _samples(scene: MemoryProbeContext, cap: int) -> tuple[int, int]:
    """Return (this rank's samples of a step, the fewest micro-batches that the configuration allows)."""
    feed = scene.feed
    n_global = feed.global_batch if feed.samples is None else min(feed.global_batch, feed.samples)
    cut = feed.cut_at(scene.cursor.step)
    low, high = cut.offsets(n_global)[feed.rank:feed.rank + 2].tolist()
    n = high - low
    parts = max(1, min(cut.accumulate_P[feed.rank], n))
    return n, max(parts, -(-n // cap)) if cap else parts


def _seconds(scene: MemoryProbeContext, n: int) -> float:
    batch, found = scene.sample(n), []
    for _ in range(3):  # the first one may trace a graph
        begin = time.perf_counter()
        scene.parts.stage.trial(batch)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def settle(run: Run, backend: Any) -> None:
    """Have the model of this rank recompute the blocks that the configuration asks for. Not collective.

    Errors: `UserError` for names that the model does not have, and for a block that cannot be recomputed exactly.
    """
    text, remat = run.config.remat, run.parts.remat
    of_keras = any(cls.__module__.startswith("keras.") for cls in type(run.spec.model).__mro__)
    if of_keras and run.spec.framework == "torch":
        _refuse_keras(text)
    names = wanted(text, [] if remat is None else remat.names)
    if remat is None or not names:
        return
    for name in names:
        why = remat.refusal(name)
        if why:
            raise UserError(f"remat: block {name} cannot be recomputed exactly: {why}", "blocks without that",
                            "exclude the block from remat, or set remat: auto, which excludes it")
    remat.choose(names)


def _refuse_keras(text: str | list[str]) -> None:
    """Raise `UserError` for blocks of a Keras model that PyTorch computes: its seed generators are Keras' own."""
    if text not in WORDS:
        raise UserError(f"remat is {text!r} with a Keras model on PyTorch",
                        "a model of PyTorch's own, or Keras on TensorFlow",
                        "set remat: off, or KERAS_BACKEND=tensorflow")


CLOSE = 0.8
"""Part of what a rank may take from which on a plan counts as close to the limit."""


@dataclass(frozen=True)
class MemoryPlan:
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
        said = f"memory: rank {rank} will hold about {format_bytes(need)} of the {format_bytes(free)} available"
        if not self.options:
            return said
        best = self.options[0]
        then = best.needs_P[rank].total
        return f"{said}; {best.name} would take {format_bytes(then)} ({best.cost}): add {best.line}"

    def to_dict(self) -> dict[str, Any]:
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


def made(scene: MemoryProbeContext, dp: Any, measures: bool = True) -> MemoryPlan:
    """Return the plan of a run whose parts are there; collective. Without ``measures`` activations are left out."""
    facts = facts_now(scene, memory_survey.way_of(scene, dp), measures)
    return agreed_plan(scene, facts)


def facts_now(scene: MemoryProbeContext, way: Any, measures: bool) -> MemoryFacts:
    """Return this rank's facts, measured or not; not collective."""
    facts = memory_survey.facts_of(scene, way)
    if not measures:
        return facts
    return MemoryFacts(facts.model, facts.rank, facts.way, memory_survey.measure(scene, facts.model, way, True))


def agreed_plan(scene: MemoryProbeContext, facts: MemoryFacts, always: bool = True) -> MemoryPlan:
    """Return the plan of all ranks' ``facts``, with options ``always`` or near the limit; collective."""
    control = scene.control
    rows = control.gather((forecast(facts), facts.rank.free_bytes))
    free_P = [free for _, free in rows]
    plan = MemoryPlan(tuple(need for need, _ in rows), tuple(free_P))
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
