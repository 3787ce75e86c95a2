"""Tells where a run comes close to its memory, and sets what it took beside what was reckoned.

At the start what follows from model, optimizer and ranks is counted, which computes nothing. Activations are not in it:
what they take is seen after the first steps, and `python -m hvdtrain plan --memory` measures them before.
"""

from __future__ import annotations

from dataclasses import asdict

from hvdtrain import backends
from hvdtrain.cluster.control import agreed
from hvdtrain.core.units import format_bytes
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.machine import reading
from hvdtrain.engine.memory import plan as plans
from hvdtrain.engine.memory import survey
from hvdtrain.engine.run import Run

LOOK_AFTER = 2
"""Steps after which what is held is what will be."""


class Memory(Callback):
    """Writes ``run.memory``: bytes of "state", as reckoned by rank, and "peak", as measured by rank.

    "reckoned" and "measured" are by rank and kind (`hvdtrain.core.units`), None where nothing is known.
    """

    where = "all"
    doing = "measuring memory"

    def __init__(self) -> None:
        self._steps = 0
        self._free: int | None = None

    def fit_start(self, run: Run) -> None:
        """Count, and say so where even that comes close to the limit. Collective."""
        self._steps = 0
        scene = survey.scene_of(run, backends.load(run.spec.framework))
        way = survey.way_of(scene, run.dp)
        facts = agreed(run.control, lambda: plans.facts_now(scene, way, False), "memory")
        self._free = facts.rank.free_bytes
        plan = plans.agreed_plan(scene, facts, always=False)
        run.memory = {"state": [need.states for need in plan.needs_P], "free": list(plan.free_P),
                      "reckoned": [{**asdict(need), "activations": None} for need in plan.needs_P]}
        said = plan.sentence()
        if said:
            run.note(f"{said} (activations not counted: see python -m hvdtrain plan --memory)")

    def step_end(self, run: Run) -> None:
        """Tell once, when the first steps are over, what comes close to the limit."""
        self._steps += 1
        if self._steps != LOOK_AFTER or not self._free:
            return
        peak = reading.peak_bytes(run)
        if peak >= plans.CLOSE * self._free:
            run.tell_all("memory", f"has held {format_bytes(peak)} of the {format_bytes(self._free)} that it may take; "
                         "python -m hvdtrain plan --memory with the same options tells what would take less")

    def told(self, run: Run) -> None:
        """Say what ranks have told."""
        for word in run.state.told:
            if word.topic == "memory":
                run.note(f"memory: rank {word.rank} {word.text}")

    def fit_end(self, run: Run) -> None:
        """Bring the ranks' peaks together, and what they hold by kind. Collective."""
        backend = backends.load(run.spec.framework)
        rows = run.control.gather((reading.peak_bytes(run), reading.memory(run, backend, backend.allocators())))
        run.memory = {**run.memory, "peak": [peak for peak, _ in rows], "measured": [held for _, held in rows]}
