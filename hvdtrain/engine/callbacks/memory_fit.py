"""`micro_batch: auto` and `remat: auto`: fit each rank's share to its memory before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from hvdtrain import backends
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.machine import memory
from hvdtrain.core.errors import count
from hvdtrain.core.protocols.types import Shortage, first_line
from hvdtrain.core.terminal import show
from hvdtrain.core.units import format_bytes, format_ms
from hvdtrain.engine import balance_probe, machine, memory_survey
from hvdtrain.engine import memory_plan as plans
from hvdtrain.engine.callbacks import out_of_memory
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.memory_plan import RankFit, Settling, estimator
from hvdtrain.engine.run import Run
from hvdtrain.parallel.recovery import T
from hvdtrain.planning.linear import least

Reckoned = Callable[[int], int] | None


class MemoryFit(Callback):
    """Runs on all ranks, before balance, whose probe finds the blocks recomputed that were chosen."""

    where = "all"
    doing = "fitting the micro-batch into memory"
    before = ("Balance",)  # whose probe finds the blocks recomputed that were chosen
    state_key = "MemoryFit"

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._learnt = 0

    def fit_start(self, run: Run) -> None:
        """Measure, decide and cut; once. Collective."""
        config = run.config
        self._learnt = 0
        micro, remat = config.micro_batch == "auto", config.remat == "auto"
        if remat and run.parts.remat is None:
            run.note("remat auto: the model has no named blocks, so activation checkpointing is off")
            remat = False
        if self._state or run.parts.layout is not None:  # a stage alone is no pass to measure; its plan has counted it
            return
        if not (micro or remat):
            self._reckon(run)
            return
        owns_P = self._settled(run, micro, remat)
        if micro:
            self._cut(run, owns_P)
        self._state = {"samples": [own.samples for own in owns_P], "micro": [own.fit.micro_batch for own in owns_P]}
        run.memory = {**run.memory, "fit": [own.to_dict() for own in owns_P]}
        self._tell(run, owns_P, micro, remat)

    def told(self, run: Run) -> None:
        found = run.recovery.ceilings
        if "micro" in self._state:
            self._state["micro"] = [least(n, found.get(rank, 0)) for rank, n in enumerate(self._state["micro"])]
        own = found.get(run.control.rank, 0)
        if own and own != self._learnt and run.batch is not None and run.batch.micros:
            self._learnt = own
            balance_probe.keep_ceiling(run, tuple(array[:1] for array in run.batch.micros[0]), own)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state

    def _settled(self, run: Run, micro: bool, remat: bool) -> list[RankFit]:
        """Return what each rank does, by rank; chosen by now."""
        control = run.control
        scene = memory_survey.scene_of(run, backends.load(run.spec.framework))
        with run.parts.draws_kept(), deadline(run.config.control_timeout_s, "the fitting of micro-batches to memory"):
            settling = agreed(control, lambda: self._settling(run, scene, micro, remat), "memory")
            parts = self._parts_before(run, settling, micro)
            own = agreed(control, lambda: _least(run, lambda: settling.decide(parts)), "memory")
            parts_P = control.gather(own.fit.parts)
            if run.feed.even_micros and parts_P != [max(parts_P)] * len(parts_P):
                own = agreed(control, lambda: _least(run, lambda: settling.decide(max(parts_P))), "memory")
        if run.recovery.guard is not None:
            spared = own.fit.need - own.fit.choice.peak
            run.recovery.guard.estimated = lambda n: memory.imported_bytes() + settling.need(n) - (
                spared * n // max(1, own.fit.micro_batch))
        return control.gather(own)

    def _settling(self, run: Run, scene: Any, micro: bool, remat: bool) -> Settling:
        cap = least(run.config.micro_batch_limit, balance_probe.ceiling_of(run, scene.sample(1)) if micro else 0)
        return _least(run, lambda: Settling(scene, memory_survey.way_of(scene, run.dp), micro, remat, cap))

    def _reckon(self, run: Run) -> None:
        """Find out what a step takes where the kernel would end a process that takes too much; collective."""
        if not run.control.agree(run.recovery.guard is not None and memory.limited()):
            return
        scene = memory_survey.scene_of(run, backends.load(run.spec.framework))
        way = memory_survey.way_of(scene, run.dp)
        with run.parts.draws_kept(), deadline(run.config.control_timeout_s, "the measurement of memory"):
            found = agreed(run.control, lambda: _looked(run, lambda: estimator(scene, way)), "memory")
        if run.recovery.guard is not None:
            run.recovery.guard.estimated = found

    def _parts_before(self, run: Run, settling: Settling, micro: bool) -> int:
        """Return the number of micro-batches that this rank had before the resume, where it still fits; else 0."""
        rank = run.control.rank
        alike = run.control.gather(settling.samples) == self._kept.get("samples")
        before = self._kept["micro"][rank] if alike and micro else 0
        if not before or not settling.keeps(before):
            return 0
        return int(-(-settling.samples // before))

    def _cut(self, run: Run, owns_P: list[RankFit]) -> None:
        """Cut training and evaluation into the ranks' micro-batches; balance cuts by ceilings of its own."""
        if run.config.balance != "off" and run.control.size > 1:
            return
        step = run.state.cursor.step
        cut = run.feed.cut_at(step)
        most = max(own.fit.parts for own in owns_P)
        even = (most,) * len(owns_P) if run.feed.even_micros else cut.accumulate_P
        cut = replace(cut, accumulate_P=even, micro_batch_P=tuple(own.fit.micro_batch for own in owns_P))
        run.feed.recut(cut, step)
        for feed in run.eval_feeds.values():
            feed.recut(cut, 0)

    def _tell(self, run: Run, owns_P: list[RankFit], micro: bool, remat: bool) -> None:
        """Note a sentence for each rank that differs, and print the table of the one that recomputes most."""
        keys = " and ".join([*(["micro_batch auto"] if micro else []), *(["remat auto"] if remat else [])])
        equal = alike(owns_P)
        for rank, own in enumerate(owns_P[:1] if equal else owns_P[:MOST_NAMED]):
            also = ", the same on all others" if equal and len(owns_P) > 1 else ""
            run.note(f"{keys}: {note(rank, own, micro, remat)}{also}")
        worst = max(range(len(owns_P)), key=lambda r: len(owns_P[r].fit.choice.names))
        rows = table(owns_P[worst])
        if rows and run.control.rank == 0 and run.config.progress != "off":
            show(f"blocks of rank {worst}, for a micro-batch of {owns_P[worst].fit.micro_batch}", COLUMNS, rows,
                 launched=True)
        run.record("memory_fit", ranks=[own.to_dict() for own in owns_P])


def _least(run: Run, settle: Callable[[], T]) -> T:
    """Return what it returns; `UserError` where memory lacks even for the one sample that is tried last."""
    def caught(error: Exception) -> None:
        shortage = Shortage(run.state.cursor.step, "training", 1, -1, first_line(error))
        raise out_of_memory.at_its_least(run.control.rank, shortage, "") from error

    found, _ = run.recovery.attempt(settle, caught)
    return cast(T, found)


def _looked(run: Run, look: Callable[[], Reckoned]) -> Reckoned:
    """Return what it returns; None where memory lacks for the look itself: the first step then finds its own size."""
    if run.recovery.guard is None:
        return None
    return cast(Reckoned, run.recovery.attempt(look)[0])


COLUMNS = ("block", "saves", "costs", "recomputed")
"""Headings of `table`."""

MOST_NAMED = 6


def note(rank: int, own: RankFit, micro: bool, remat: bool) -> str:
    """Return what a rank does and why, in one sentence."""
    fit, free = own.fit, own.free
    if not own.samples:
        return f"rank {rank} has no samples"
    room = "unknown room" if free is None else f"{format_bytes(free)} available"
    words = []
    if micro:
        words.append(f"{count(fit.parts, 'micro-batch', 'micro-batches')} of {fit.micro_batch}")
    if remat:
        names = fit.choice.names
        some = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        words.append(f"recomputes {len(names)} of {len(own.costs)} blocks ({some}) in {1e3 * fit.choice.seconds:.3g} "
                     "ms a micro-batch" if names else "no activation checkpointing")
    then = (f"{format_bytes(fit.choice.peak)} in place of " if fit.choice.names else "") + format_bytes(fit.need)
    fits = "" if fit.choice.fits else ", which does not fit, and no remaining option would"
    tried = (f"; in a trial of {count(own.tried, 'sample')} that saved {format_bytes(max(0, own.measured))}, predicted "
             f"{format_bytes(own.predicted)}") if own.tried else ""
    return f"rank {rank}: {', '.join(words)}; needs {then} of {room}{fits}{tried}"


def table(own: RankFit) -> list[list[str]]:
    """Return rows under `COLUMNS`: bytes and milliseconds of each block for this rank's micro-batch."""
    rows = [[cost.name, format_bytes(max(0, cost.saved_bytes)), format_ms(cost.forward_s),
             "yes" if cost.name in own.fit.choice.names else "no"] for cost in own.costs]
    chosen = [cost for cost in own.costs if cost.name in own.fit.choice.names]
    if chosen:
        rows.append(["together", format_bytes(own.fit.need - own.fit.choice.peak), format_ms(own.fit.choice.seconds),
                     f"{len(chosen)} of {len(own.costs)}"])
    return rows


def alike(owns_P: Sequence[RankFit]) -> bool:
    """Return whether all ranks have settled on the same."""
    found = [(own.samples, own.fit.micro_batch, own.fit.choice.names) for own in owns_P]
    return all(one == found[0] for one in found)


LOOK_AFTER = 2
"""Steps after which what is held is what will be."""


class MemoryReport(Callback):
    """Writes ``run.memory``: bytes of "state", as estimated by rank, and "peak", as measured by rank.

    "estimated" and "measured" are by rank and kind (`hvdtrain.core.units`), None where nothing is known.
    """

    where = "all"
    doing = "measuring memory"

    def __init__(self) -> None:
        self._steps = 0
        self._free: int | None = None

    def fit_start(self, run: Run) -> None:
        """Count, and say so where even that comes close to the limit. Collective."""
        self._steps = 0
        scene = memory_survey.scene_of(run, backends.load(run.spec.framework))
        way = memory_survey.way_of(scene, run.dp)
        facts = agreed(run.control, lambda: plans.facts_now(scene, way, False), "memory")
        self._free = facts.rank.free_bytes
        plan = plans.agreed_plan(scene, facts, always=False)
        run.memory = {"state": [need.states for need in plan.needs_P], "free": list(plan.free_P),
                      "reckoned": [{**asdict(need), "activations": None} for need in plan.needs_P]}
        said = plan.sentence()
        if said:
            run.note(f"{said} (activations not counted: see python -m hvdtrain plan --memory)")

    def step_end(self, run: Run) -> None:
        self._steps += 1
        if self._steps != LOOK_AFTER or not self._free:
            return
        peak = machine.peak_bytes(run)
        if peak >= plans.CLOSE * self._free:
            run.tell_all("memory", f"has used {format_bytes(peak)} of {format_bytes(self._free)} "
                         "available; python -m hvdtrain plan --memory with the same options lists what would use less")

    def told(self, run: Run) -> None:
        for word in run.state.told:
            if word.topic == "memory":
                run.note(f"memory: rank {word.rank} {word.text}")

    def fit_end(self, run: Run) -> None:
        """Bring the ranks' peaks together, and what they hold by kind. Collective."""
        backend = backends.load(run.spec.framework)
        rows = run.control.gather((machine.peak_bytes(run), machine.memory(run, backend, backend.allocators())))
        run.memory = {**run.memory, "peak": [peak for peak, _ in rows], "measured": [held for _, held in rows]}
