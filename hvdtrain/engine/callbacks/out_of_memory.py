"""Says and records where a rank ran out of memory, and what it did about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain import backends
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import ALONE, REPEAT, Shortage, among
from hvdtrain.core.units import format_bytes
from hvdtrain.engine import memory_plan as plans
from hvdtrain.engine import memory_survey
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.memory_survey import MemoryProbeContext
from hvdtrain.engine.run import Run
from hvdtrain.planning.memory.forecast import MemoryFacts


class OutOfMemory(Callback):
    """Writes ``run.shortages``: a record for each, the same on every rank, and into the log of those with one."""

    where = "all"

    def __init__(self) -> None:
        self._bends_told = False

    def told(self, run: Run) -> None:
        """Note what ranks have just told; the first time that one takes smaller micro-batches also what that bends."""
        for rank, shortage in reported_shortages(run):
            run.shortages.append({"rank": rank, **shortage._asdict()})
            run.note(f"step {shortage.step}: rank {rank} {shortage.words()}")
            fields = run.shortages[-1]
            run.record("out_of_memory", **{k: v for k, v in fields.items() if k != "step"}, at_step=fields["step"])
            smaller = shortage.phase == "training" and 0 <= shortage.then < shortage.size
            caveats = run.parts.caveats() if smaller and not self._bends_told else []
            if caveats:
                self._bends_told = True
                run.note(f"the gradient depends on the micro-batches, which change from step {shortage.step} on: "
                         + "; ".join(caveats))


MOST = 4
"""Ways out that are named."""


def at_its_least(rank: int, shortage: Shortage, ways: str) -> UserError:
    """Return the error of ``rank``, which has no smaller size to try; ``ways``: what would help, "" where unknown."""
    held = f"a micro-batch of {shortage.size}" if shortage.size else "no sample of the step"
    in_general = "use activation checkpointing (remat: auto), shard the state (data_parallel: zero), or partition " \
                 "the model over devices (model_parallel)"
    return UserError(f"rank {rank} is out of memory in {shortage.phase} with {held} ({shortage.why})",
                     "memory for the model and one sample" if shortage.size <= 1 else "a smaller micro-batch that fits",
                     ways or in_general)


def tell(run: Run, shortage: Shortage, meets: bool) -> None:
    """Report it to all ranks in this step's agreement; `UserError` without one, or a smaller size."""
    if not meets and shortage.then < 0:
        raise at_its_least(run.control.rank, shortage, "")
    run.tell_all(REPEAT if meets else ALONE, shortage.spelled())


def reported_shortages(run: Run) -> list[tuple[int, Shortage]]:
    """Take note of what ranks have just told; return it, by rank."""
    found = list(among(run.state.told, REPEAT, ALONE))
    for rank, shortage in found:
        if shortage.phase == "training" and 0 <= shortage.then < shortage.size:
            run.recovery.ceilings[rank] = shortage.then
        if shortage.phase == "training" and rank in run.recovery.copy:
            run.recovery.training.follow(shortage.size, shortage.then)
    return found


def repeats(run: Run) -> bool:
    """Return whether a rank has told at the agreement just held that it ran out of memory: then all repeat the step.

    Errors: `UserError`, the same on every rank, where one of them has no smaller size to try. Collective then.
    """
    found = list(among(run.state.told, REPEAT))
    lost = next(((rank, shortage) for rank, shortage in found if shortage.then < 0), None)
    if lost is not None:
        raise at_its_least(*lost, of_plan(run, lost[0]))
    return bool(found)


def recovers(run: Run, shortages_P: Sequence[Sequence[Shortage]]) -> bool:
    """Tell the callbacks of what happened in an evaluation, by rank; every rank calls it alike.

    Returns whether all are to measure again: a rank of a pipeline was short, and all of its copy now cut alike.
    Errors: `UserError`, the same on every rank, where one of them has no smaller size to try. Collective then.
    """
    lost = [(rank, shortage) for rank, shortages in enumerate(shortages_P) for shortage in shortages
            if shortage.then < 0]
    if lost:
        raise at_its_least(*lost[0], of_plan(run, lost[0][0]))
    run.deliver([(rank, ALONE, shortage.spelled()) for rank, shortages in enumerate(shortages_P)
                 for shortage in shortages])
    together = [(rank, shortage) for rank, shortages in enumerate(shortages_P) for shortage in shortages
                if len(run.mesh.copies[run.mesh.copy_of(rank)]) > 1]
    for rank, shortage in together:
        if rank in run.recovery.copy:
            run.recovery.evaluation.follow(shortage.size, shortage.then)
    return bool(together)


def of_plan(run: Run, rank: int) -> str:
    """Return what takes less memory, with the bytes that ``rank`` saves, most first, or ""; collective."""
    scene = memory_survey.scene_of(run, backends.load(run.spec.framework))
    plan = plans.agreed_plan(scene, _facts(scene, run.dp))
    found = [(plan.needs_P[rank].total - o.needs_P[rank].total, o.line, o.name) for o in plan.options
             if not o.line.startswith("--accumulate")]  # the micro-batches are at their least already
    recomputed = run.control.gather(_recomputed(run))[rank]
    if not any("remat" in line for _, line, _ in found):
        found.append((recomputed, "--remat auto", "activations of one sample"))
    ways = [f"{line} saves about {format_bytes(saved)} ({name})" for saved, line, name in sorted(found, reverse=True)
            if saved > 0]
    return "add to the command what helps: " + "; ".join(ways[:MOST]) if ways else ""


def _facts(scene: MemoryProbeContext, dp: Any) -> MemoryFacts:
    way = memory_survey.way_of(scene, dp)
    try:
        return plans.facts_now(scene, way, True)
    except Exception:  # memory is what lacks: what follows from the tensors alone is known anyway
        return plans.facts_now(scene, way, False)


def _recomputed(run: Run) -> int:
    """Bytes of activations of one sample that recomputing every block would save here; 0 where that is unknown."""
    remat = run.parts.remat
    if remat is None or remat.chosen:
        return 0
    try:
        return sum(max(0, cost.saved_bytes) for cost in remat.costs(run.feed.sample(1)))
    except Exception:  # as above
        return 0
