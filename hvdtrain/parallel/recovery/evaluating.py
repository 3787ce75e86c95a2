"""Evaluation on a rank that may run out of memory: its micro-batch again in smaller parts, for exact metrics."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hvdtrain.core.protocols import Batch, Evaluator
from hvdtrain.core.protocols.types import Shortage, first_line
from hvdtrain.parallel.recovery.recovery import Recovery, parts, stopped

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import StepBatch


class RecoveringEvaluator:
    """Adds batches to ``evaluator``'s totals at step ``step``. ``shortages``: those met so far, in their order.

    ``lost``: no smaller size is left. The rank adds nothing more then, but goes on through the data with all others.
    """

    def __init__(self, evaluator: Evaluator, recovery: Recovery, step: int) -> None:
        self._evaluator, self._recovery, self._step = evaluator, recovery, step
        self.shortages: list[Shortage] = []
        self.lost = False

    def add(self, batch: StepBatch) -> None:
        """Add this rank's part of one global batch, in parts that fit.

        Errors: `UserError`, on this rank alone, where the run is to end when memory lacks.
        """
        due: deque[Batch] = deque(batch.micros)
        while due and not self.lost:
            first, *rest = parts(due.popleft(), self._recovery.evaluation.limit)
            due.extendleft(reversed(rest))
            why = self._tried(first)
            if not why:
                continue
            size = len(first[0])
            then = self._recovery.evaluation.lower(size)
            self.shortages.append(Shortage(self._step, "evaluation", size, then, why))
            self.lost = then < 0
            due.appendleft(first)

    def ended(self) -> list[Shortage]:
        """Return the shortages, once `Evaluator.totals` was called.

        A rank that computes with others cannot add a part again by itself: its evaluator says what it was short of.
        Errors: as `add`.
        """
        evaluator: Any = self._evaluator
        short = getattr(evaluator, "short", None)
        if short is not None:
            evaluator.short, (size, why) = None, short
            if not self._recovery.in_evaluation:
                raise stopped(size, "evaluation", why, self._recovery.because)
            self.shortages.append(Shortage(self._step, "evaluation", size, self._recovery.evaluation.lower(size), why))
        return self.shortages

    def _tried(self, micro: Batch) -> str:
        """"" where ``micro`` was added, else why memory lacked; then none of it was added."""
        def caught(error: Exception) -> None:
            if not self._recovery.in_evaluation:
                raise stopped(len(micro[0]), "evaluation", first_line(error), self._recovery.because) from error

        return self._recovery.attempt(lambda: self._evaluator.add(micro), caught)[1]
