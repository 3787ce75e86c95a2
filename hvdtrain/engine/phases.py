"""The phases of a step, each a context manager that is made once for a run and entered in every step.

Owns what a phase feeds: the heartbeat, the time breakdown and traces, the bound of its waits, and the totals that
`balance` and the meter read. The order of phases is `hvdtrain.engine.loop`'s.
"""

from __future__ import annotations

from time import perf_counter

from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.core.protocols.run import Position
from hvdtrain.core.protocols.types import StepBatch
from hvdtrain.core.timeline import StepTotals, Timeline, span


class StepPhase(span):
    """One phase; ``begin_s`` and ``end_s`` of its latest body are by `time.perf_counter`.

    ``beat``: its name in the heartbeat; the watchdog times those of `pulse.COMPUTING`. ``cause``: in the time
    breakdown. ``at``: whose step the heartbeat publishes, None where the step before stays published. ``totals``: what
    its seconds are added to, under its name. ``bounded``: what the body waits for, at most ``bound_s``.
    """

    __slots__ = ("begin_s", "end_s", "_beat", "_at", "_totals", "_bound", "_bounded")

    def __init__(self, name: str, cause: str, beat: str, at: Position | None = None, totals: StepTotals | None = None,
                 bounded: str = "", bound_s: float = 0.0) -> None:
        super().__init__(name, cause)
        self.begin_s = self.end_s = 0.0
        self._beat, self._at, self._totals, self._bounded = beat, at, totals, bounded
        self._bound = deadline(bound_s, bounded) if bounded else None

    def __enter__(self) -> StepPhase:
        at, bound = self._at, self._bound
        step = None if at is None else at.cursor.step
        self.begin_s = perf_counter()
        pulse.at(self._beat, step)
        if bound is not None:
            bound.what = f"{self._bounded} of step {step}"
            bound.__enter__()
        span.__enter__(self)  # super() takes longer, in each phase of each step
        return self

    def __exit__(self, *error: object) -> None:
        span.__exit__(self)
        if self._bound is not None:
            self._bound.__exit__()
        self.end_s = perf_counter()
        if self._totals is not None:
            self._totals.add(self.name, self.end_s - self.begin_s)


class RunPhases:
    """Every phase of a run, in the order of a step; `finish` or `lose` adds a step to the timeline's totals."""

    def __init__(self, timeline: Timeline, state: Position, bound_s: float) -> None:
        self._totals = totals = timeline.totals
        self.data = StepPhase("data", "input", "data", totals=totals)
        # The bound covers backward too: a transport inside TensorFlow's graph waits for the other ranks in there.
        self.gradients = StepPhase("gradients", "compute", "backward and exchange", state,
                                   bounded="backward and gradient exchange", bound_s=bound_s)
        self.vote = StepPhase("vote", "compute", "vote")  # looks at the gradient, and waits for a device's loss
        self.update = StepPhase("update", "update", "update", totals=totals)
        self.checkpoint = StepPhase("checkpoint", "checkpoint", "checkpoint", state)
        self.evaluation = StepPhase("evaluation", "evaluation", "evaluation", state)

    def finish(self, batch: StepBatch, waited_s: float, device_s: float | None) -> None:
        """Count a step that is over. ``waited_s``: of its gradients, for other ranks.

        ``device_s``: of computing, where the host's clock cannot tell computing from waiting.
        """
        totals, begin_s, voted_s = self._totals, self.gradients.begin_s, self.vote.end_s
        updated_s = max(voted_s, self.update.end_s)  # a step without an update leaves the end of the one before
        compute_s = self.gradients.end_s - begin_s - waited_s if device_s is None else min(device_s, voted_s - begin_s)
        totals.add("compute", compute_s)
        totals.add("wait", voted_s - begin_s - compute_s)
        totals.step(updated_s - begin_s, batch.n_global, batch.n_local, len(batch.micros))

    def lose(self) -> None:
        """Count a step that is to be repeated."""
        self._totals.lose(perf_counter() - self.gradients.begin_s)
