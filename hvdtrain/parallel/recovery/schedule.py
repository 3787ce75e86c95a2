"""A schedule whose rank may run out of memory in the middle of a step, and still enters what the others wait in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import GradientSink, Schedule, Stage, StepGradients
from hvdtrain.core.protocols.types import Lost, first_line
from hvdtrain.parallel.recovery.recovery import Recovery, largest, no_repeat, stopped

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import StepBatch


class Recovering:
    """`hvdtrain.core.protocols.Schedule` around ``schedule`` over ``stage``.

    A rank that ran out hands over poison for every bucket whose exchange it has not begun yet, in their order, so that
    no rank waits for it: between the error and the vote lies no collective that the other ranks do not enter too.
    """

    def __init__(self, schedule: Schedule, stage: Stage, recovery: Recovery) -> None:
        self._schedule, self._stage, self._recovery = schedule, stage, recovery

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> StepGradients:
        """Sum the gradients of ``batch``, or give poison and say in ``lost`` why.

        Errors: `UserError`, on this rank alone, where memory lacks and the step cannot be repeated: the exchange of a
        bucket broke off midway, memory lacks for the poison too, or the run is to end with that.
        """
        recovery, fits, own = self._recovery, True, True

        def answers(error: BaseException) -> bool:
            if isinstance(error, Lost) or recovery.answers(error):
                return True
            if error.__cause__ is not None and recovery.out_of_memory(error.__cause__):
                raise no_repeat("a step", first_line(error)) from error  # such as an update that is half made
            return False

        def caught(error: Exception) -> None:
            nonlocal fits, own
            if isinstance(error, Lost):
                fits, own = error.fits, error.own
                return
            fits = not isinstance(error, UserError)
            if not recovery.shrinks:
                raise stopped(largest(batch), "training", first_line(error), recovery.because) from error

        done, why = recovery.attempt(lambda: self._schedule.gradients(batch, scale, sink), caught, answers)
        if done is not None:
            return done
        if sink.owed() is None:
            raise no_repeat("the exchange of gradients", why)
        lost = recovery.ran_out(batch, why, fits) if own else None  # else another rank of the copy tells it
        with recovery.once("what ends a step that is to be repeated"):
            self._stage.nothing(sink, poison=True)
            begin = time.perf_counter()
            grads = sink.collect()
        waited_s = self._stage.waited_s + sink.waited_s + time.perf_counter() - begin
        return StepGradients(grads, [], waited_s, lost)
