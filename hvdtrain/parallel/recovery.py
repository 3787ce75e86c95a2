"""Repetition of steps and evaluations of a rank that runs out of memory, in smaller micro-batches."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hvdtrain.cluster.machine import memory
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols import Batch, Evaluator, GradientSink, Schedule, Stage, StepGradients
from hvdtrain.core.protocols.types import Ceiling, Lost, Shortage, StepBatch, first_line
from hvdtrain.core.units import format_bytes
from hvdtrain.planning.batch.sampler import micro_batches

LESS = ("reduce its memory: a smaller micro_batch, remat: auto, data_parallel: zero or model_parallel; see "
        "python -m hvdtrain plan --memory")


class Recovery:
    """Ceilings of a rank's micro-batches, and what to do about a shortage. ``free``: frees what a framework caches.

    ``shrinks``, ``in_evaluation``: whether training and evaluation continue with smaller micro-batches; ``because``:
    why not. ``guard``: checks a host's memory before each micro-batch; None on devices. ``taken_back``: called when a
    step is repeated, for what callbacks have counted. ``ceilings``: rank -> largest micro-batch in training, of those
    that ran out; the same on every rank once announced. ``copy``: ranks of one copy of a partitioned model.
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
        """Call `hvdtrain.parallel.recovery.attempt` with this rank's ``out_of_memory`` and ``free``."""
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
                     "enough memory", LESS).of_kind("oom")


def stopped(size: int, phase: str, why: str, because: str) -> UserError:
    """Return the error of a rank that runs out where the run is to end with that."""
    return UserError(f"out of memory in {phase} with micro-batches of {size} ({why})",
                     f"memory for them, since {because}", LESS).of_kind("oom")


def largest(batch: StepBatch) -> int:
    """Return the samples of its largest micro-batch; 0 without any."""
    return max((len(micro[0]) for micro in batch.micros), default=0)


def parts(micro: Batch, limit: int) -> list[Batch]:
    """Return ``micro``, arrays (b, ...), in nearly equal parts of at most ``limit`` samples (0: any), as views."""
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


class Recovering:
    """`hvdtrain.core.protocols.Schedule` around ``schedule`` over ``stage``.

    A rank out of memory sends poison for every bucket that it has not begun, in order, so that no rank waits in vain:
    it enters the same collectives as the others before the agreement.
    """

    origin = None

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
        with recovery.once("the end of a step that is repeated"):
            self._stage.nothing(sink, poison=True)
            begin = time.perf_counter()
            grads = sink.collect()
        waited_s = self._stage.waited_s + sink.waited_s + time.perf_counter() - begin
        return StepGradients(grads, [], waited_s, lost)


class RecoveringEvaluator:
    """Adds batches to ``evaluator``'s totals at step ``step``. ``shortages``: those so far, in order.

    ``lost``: no smaller size is left. The rank adds nothing more then, but goes through the data with all others.
    """

    def __init__(self, evaluator: Evaluator, recovery: Recovery, step: int) -> None:
        self._evaluator, self._recovery, self._step = evaluator, recovery, step
        self.shortages: list[Shortage] = []
        self.lost = False
        self._places: list[int] = []  # of each micro-batch that was added: the number of its global batch
        self._global = 0

    def add(self, batch: StepBatch) -> None:
        """Add this rank's share of a global batch, in parts that fit. `UserError` on this rank alone ends the run."""
        due: deque[Batch] = deque(batch.micros)
        while due and not self.lost:
            first, *rest = parts(due.popleft(), self._recovery.evaluation.limit)
            due.extendleft(reversed(rest))
            why = self._tried(first)
            if not why:
                self._places.append(self._global)
                continue
            size = len(first[0])
            then = self._recovery.evaluation.lower(size)
            self.shortages.append(Shortage(self._step, "evaluation", size, then, why))
            self.lost = then < 0
            due.appendleft(first)
        self._global += 1

    def totals(self) -> dict[str, Any]:
        """Return the evaluator's totals; states get the places of this rank's batches in the data."""
        found = self._evaluator.totals()
        for total in found.values():
            if not isinstance(total, np.ndarray):
                total.places = tuple(self._places)
        return found

    def ended(self) -> list[Shortage]:
        """Return the shortages, after `totals`; a rank of a pipeline reports one, else errors are `add`'s."""
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


T = TypeVar("T")


def attempt(compute: Callable[[], T], out_of_memory: Callable[[BaseException], bool], free: Callable[[], None],
            caught: Callable[[Exception], None] | None = None) -> tuple[T | None, str]:
    """Return (what ``compute`` returns, ""), or (None, why) where memory did not suffice; not collective.

    ``out_of_memory``: whether an error, or what a `UserError` was made of, says that memory lacked; other errors pass
    through. ``free``: gives back what a framework keeps for itself. ``caught``: called with the error, in place of
    which it may raise another one.
    """
    try:
        return compute(), ""
    except Exception as error:
        causes = (error, error.__cause__) if isinstance(error, UserError) and error.__cause__ else (error,)
        short = next(filter(out_of_memory, causes), None)
        if short is None:
            raise
        if caught is not None:
            caught(error)
        why = first_line(short)
        del causes, short
    # Out of the handler: the error's frames, which hold the tensors of the pass, are gone by now.
    clean_up(free)
    return None, why


def attempt_halving(compute: Callable[[int], T], samples: int, out_of_memory: Callable[[BaseException], bool],
                    free: Callable[[], None], least: int = 1) -> tuple[T, int, str]:
    """Return (what ``compute(n)`` returns, n, why n is not ``samples``) for the first n of ``samples``, a half, a
    quarter, ... and ``least`` that memory suffices for; not collective.

    Errors: `UserError` where memory does not suffice for ``least``.
    """
    n, first = samples, ""
    while True:
        value, why = attempt(lambda: (compute(n),), out_of_memory, free)  # called at once
        if value is not None:
            return value[0], n, first and f"out of memory with {samples} samples ({first})"
        first = first or why
        if n <= least:
            raise UserError(f"out of memory with {count(n, 'sample')} while the model is measured ({why})",
                            "memory for the model and one sample", "use a smaller model, precision bf16, or a device "
                            "with more memory")
        n = max(least, n // 2)


def clean_up(free: Callable[[], None]) -> None:
    """Give memory back that nothing needs. The error that told of its lack must be forgotten by now."""
    gc.collect()
    free()
    memory.give_back()


EVERY_S, RARELY = 0.25, 400
"""Micro-batches of a size that has run are looked at so often: others on the host may take more meanwhile. A look that
takes long, as where processor time is rationed, waits so many times as long for the next."""


class MemoryGuard:
    """Refuses a micro-batch that this host has no memory for: the kernel would end the process instead.

    ``local``: ranks of this host, which share what is left. ``estimated``: bytes of this process by samples of a
    micro-batch; None before one has run. ``held``, ``peak``, ``left``: its bytes now, at most, and still free.
    """

    def __init__(self, local: int = 1, held: Callable[[], int] = memory.resident_bytes,
                 peak: Callable[[], int] = memory.peak_resident_bytes,
                 left: Callable[[], int | None] = memory.left_alive_bytes) -> None:
        self.estimated: Callable[[int], int] | None = None
        self.off = False  # where no smaller micro-batch is an answer, no forecast ends a run
        self._local, self._held, self._peak, self._left = local, held, peak, left
        self._base = self._before = self._most = self._ran = 0
        self._next_look = float("-inf")

    def check(self, samples: int) -> None:
        """Raise `MemoryError` if a micro-batch of so many samples would take more than is left."""
        if self.off:
            return
        now = time.monotonic()
        if samples <= self._ran and now < self._next_look:
            return
        held, left = self._held(), self._left()
        if not self._ran:
            self._base, self._before = held, self._peak()
        else:
            self._base = min(self._base, held)  # what was measured at the start may have left something behind
            self._most = max(self._most, self._taken(self._ran))  # the optimizer's state came with the first update
        took_s = time.monotonic() - now
        self._next_look = now + max(EVERY_S, RARELY * took_s)
        wanted = self.wanted(samples) - held
        if left is not None and wanted > left // self._local:
            ranks = f" for {self._local} ranks" if self._local > 1 else ""
            raise MemoryError(f"a micro-batch of {samples} would take {format_bytes(wanted)} more than "
                              f"this process uses, and {format_bytes(left)} is left{ranks}")

    def ran(self, samples: int) -> None:
        """Note the memory of a micro-batch that has run."""
        if samples > self._ran:
            self._most, self._ran = self._taken(samples), samples

    def _taken(self, samples: int) -> int:
        """Return the most bytes held since the first check, with micro-batches of so many samples.

        An earlier peak, of reading data say, hides all below it; then the estimate counts.
        """
        peak = self._peak()
        return peak if peak > self._before else max(self._held(), self.estimated(samples) if self.estimated else 0)

    def wanted(self, samples: int) -> int:
        """Return the bytes that this process will hold at most; 0 if unknown."""
        if self._ran:
            return self._base + (self._most - self._base) * samples // self._ran
        return self.estimated(samples) if self.estimated else 0
