"""Repetition of steps and evaluations of a rank that runs out of memory, in smaller micro-batches.

`attempt` catches the error.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch, Evaluator, GradientSink, Schedule, Stage, StepGradients
from hvdtrain.core.protocols.types import Ceiling, Lost, Shortage, StepBatch, first_line
from hvdtrain.parallel.recovery.attempt import MemoryGuard, T, attempt
from hvdtrain.planning.batch.sampler import micro_batches

LESS = ("give it less to hold: a smaller micro_batch, remat: auto, data_parallel: zero or model_parallel; see "
        "python -m hvdtrain plan --memory")


class Recovery:
    """Ceilings of a rank's micro-batches, and what to do about a shortage. ``free``: frees what a framework caches.

    ``shrinks``, ``in_evaluation``: whether training and evaluation continue with smaller micro-batches; ``because``:
    why not. ``guard``: checks a host's memory before each micro-batch; None on devices. ``taken_back``: called when a
    step is repeated, for what callbacks have counted. ``ceilings``: rank -> largest micro-batch in training, of those
    that ran out; the same on every rank once announced. ``copy``: ranks of one copy of a partitioned model, which all
    follow.
    """

    def __init__(self, out_of_memory: Callable[[BaseException], bool], free: Callable[[], None] = lambda: None,
                 shrinks: bool = True, in_evaluation: bool = True, because: str = "on_oom is stop") -> None:
        self.out_of_memory, self.free, self.because = out_of_memory, free, because
        self.shrinks, self.in_evaluation = shrinks, in_evaluation
        self.training, self.evaluation = Ceiling(), Ceiling()
        self.ceilings: dict[int, int] = {}
        self.guard: MemoryGuard | None = None
        self.copy: tuple[int, ...] = ()
        self.taken_back: list[Callable[[], None]] = []

    @property
    def limit(self) -> int:
        """Samples of this rank's largest micro-batch in training; 0: it never ran out."""
        return self.training.limit

    def cut(self, batch: StepBatch) -> StepBatch:
        """Return ``batch`` in micro-batches that fit."""
        return recut(batch, self.limit)

    def answers(self, error: BaseException) -> bool:
        """Return whether a smaller micro-batch may help against ``error`` in a forward or backward.

        So it may with a `UserError` under a micro-batch that was made smaller: BatchNorm takes no single sample.
        """
        return self.out_of_memory(error) or self.training.lowered and isinstance(error, UserError)

    def attempt(self, compute: Callable[[], T], caught: Callable[[Exception], None] | None = None,
                out_of_memory: Callable[[BaseException], bool] | None = None) -> tuple[T | None, str]:
        """Call `hvdtrain.parallel.recovery.attempt.attempt` with this rank's ``out_of_memory`` and ``free``."""
        return attempt(compute, out_of_memory or self.out_of_memory, self.free, caught)

    def ran_out(self, batch: StepBatch, why: str, fits: bool = True) -> Shortage:
        """Decide how ``batch`` is tried again. Without ``fits`` no smaller size would do."""
        size = largest(batch)
        then = self.training.lower(size) if fits else -1
        return Shortage(batch.cursor_before.step, "training", size, then, why)

    @contextlib.contextmanager
    def once(self, what: str) -> Iterator[None]:
        """Turn a lack of memory within the body, which cannot be repeated, into `no_repeat`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError) or not self.out_of_memory(error):
                raise
            raise no_repeat(what, first_line(error)) from error


def no_repeat(what: str, why: str) -> UserError:
    """Return the error of a rank that runs out where its step cannot be repeated; a supervisor may restart."""
    return UserError(f"out of memory in {what}, which cannot be repeated ({why})",
                     "room for it", LESS).of_kind("oom")


def stopped(size: int, phase: str, why: str, because: str) -> UserError:
    """Return the error of a rank that runs out where the run is to end with that."""
    return UserError(f"out of memory in {phase} with micro-batches of {size} ({why})",
                     f"room for them, since {because}", LESS).of_kind("oom")


def largest(batch: StepBatch) -> int:
    """Return the samples of its largest micro-batch; 0 without any."""
    return max((len(micro[0]) for micro in batch.micros), default=0)


def parts(micro: Batch, limit: int) -> list[Batch]:
    """Return ``micro``, arrays (b, ...), in nearly equal parts of at most ``limit`` samples (0: any), in its order.

    The parts are views: memory is what lacks.
    """
    if not limit or len(micro[0]) <= limit:
        return [micro]
    return [tuple(array[a:b] for array in micro) for a, b in micro_batches(len(micro[0]), 1, limit)]


def recut(batch: StepBatch, limit: int) -> StepBatch:
    """Return ``batch`` in micro-batches of at most ``limit`` samples (0: any), itself where it has no larger one.

    The same samples in the same order, so that their sum is the same gradient up to rounding.
    """
    if not limit or largest(batch) <= limit:
        return batch
    return replace(batch, micros=[part for micro in batch.micros for part in parts(micro, limit)])


if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import StepBatch


class Recovering:
    """`hvdtrain.core.protocols.Schedule` around ``schedule`` over ``stage``.

    A rank out of memory sends poison for every bucket that it has not begun, in order, so that no rank waits in vain:
    it enters the same collectives as the others before the agreement.
    """

    def __init__(self, schedule: Schedule, stage: Stage, recovery: Recovery) -> None:
        self._schedule, self._stage, self._recovery = schedule, stage, recovery

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> StepGradients:
        """Sum the gradients of ``batch``, or send poison and report the shortage in ``lost``.

        Errors: `UserError`, on this rank alone, if the step cannot be repeated: the exchange of a bucket broke off,
        memory lacks for the poison too, or ``on_oom`` is stop.
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


if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import StepBatch


class RecoveringEvaluator:
    """Adds batches to ``evaluator``'s totals at step ``step``. ``shortages``: those so far, in order.

    ``lost``: no smaller size is left. The rank adds nothing more then, but goes through the data with all others.
    """

    def __init__(self, evaluator: Evaluator, recovery: Recovery, step: int) -> None:
        self._evaluator, self._recovery, self._step = evaluator, recovery, step
        self.shortages: list[Shortage] = []
        self.lost = False

    def add(self, batch: StepBatch) -> None:
        """Add this rank's share of one global batch, in parts that fit. Errors: `UserError`, on this rank alone, to end
        the run.
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
        """Return the shortages, after `Evaluator.totals`. Errors: as `add`.

        A rank of a pipeline cannot repeat a part alone: its evaluator reports the shortage.
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
