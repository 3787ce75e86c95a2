"""Run a few samples through a model partitioned over ranks, stage by stage, before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from hvdtrain.backends.loss_coupling import Evaluate, LossValue
from hvdtrain.backends.misfit import told
from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Batch, Cargo, Control, PipelineStage
from hvdtrain.engine.run import Run
from hvdtrain.parallel.recovery import attempt


class Turn(NamedTuple):
    """The chunk ``number`` of copy ``copy``, on ``rank``; the next one is on rank ``to``, -1: it is the last."""

    copy: int
    number: int
    rank: int
    to: int


def turns(layout: Layout) -> list[Turn]:
    """Return the chunks of all copies, each after the one before it."""
    found = []
    for copy, ranks in enumerate(layout.mesh.copies):
        n = len(layout.chunks(copy))
        found += [Turn(copy, k, ranks[k % len(ranks)], ranks[(k + 1) % len(ranks)] if k + 1 < n else -1)
                  for k in range(n)]
    return sorted(found, key=lambda turn: (turn.number, turn.copy))


class Walk:
    """A try of the replica's ``batch`` on this rank's chunks. ``agreeing``: exceptions are `UserError` on all ranks."""

    def __init__(self, run: Run, backend: Any, batch: Batch, training: bool, agreeing: bool = False) -> None:
        self._run, self._backend, self._batch, self._training = run, backend, batch, training
        self._agreeing = agreeing
        assert run.parts.layout is not None
        self._layout: Layout = run.parts.layout
        self._came: Cargo | None = None
        self._over = False

    def go(self) -> None:
        """Take all turns; collective. Errors: `UserError` on every rank; other exceptions pass through."""
        control: Control = self._run.control
        walk = turns(self._layout)
        for number in range(max(turn.number for turn in walk) + 1):
            now = [turn for turn in walk if turn.number == number]
            mine = next((turn for turn in now if turn.rank == control.rank), None)
            gave = agreed(control, lambda: self._computed(mine), "first sample")  # called at once
            for turn in now:
                self._pass_on(control, turn, gave if turn is mine else None)

    def _computed(self, mine: Turn | None) -> Cargo | None:
        if mine is None or self._over:
            return None
        run, stage = self._run, cast(PipelineStage, self._run.parts.stage)
        chunk, came = mine.number // len(self._layout.mesh.ranks), self._came if mine.number else None

        def compute() -> Cargo | None:
            if not self._training:
                return stage.evaluate(chunk, came, self._batch)
            if mine.to >= 0:
                return stage.forward(chunk, 0, came, self._batch)
            stage.loss(chunk, 0, came, self._batch, 1.0)
            return None

        try:
            with told(run.spec.model, self._batch, not self._training):
                gave, why = attempt(compute, self._backend.out_of_memory, self._backend.free_cached)
        except Exception as error:
            if self._agreeing:
                raise UserError(str(error)) from None
            raise
        if why and self._agreeing:
            raise UserError(why).of_kind("oom")
        return gave  # None: the first step tells what memory does not suffice for: it may hold what is needed

    def _pass_on(self, control: Control, turn: Turn, gave: Cargo | None) -> None:
        """Bring what a chunk gave to the next one; collective."""
        if turn.to < 0:
            return
        note = control.gather(None if gave is None else ([(a.shape, a.dtype.str) for a in gave.arrays], gave.dtypes,
                                                         gave.form))[turn.rank]
        if note is None:  # it ran out of memory there: nothing more is tried
            self._over = self._over or turn.copy == self._layout.mesh.copy
            return
        heads, dtypes, form = note
        if turn.rank == turn.to:
            self._came = gave
            return
        arrays = [np.ascontiguousarray(a) for a in gave.arrays] if gave is not None else [
            np.empty(shape, dtype) for shape, dtype in (heads if control.rank == turn.to else ())]
        control.send([array.reshape(-1) for array in arrays], turn.rank, turn.to)
        if control.rank == turn.to:
            self._came = Cargo(tuple(arrays), tuple(dtypes), form)


def try_stages(run: Run, backend: Any, batches: Sequence[Batch], training: bool) -> list[str]:
    """Try ``batches`` one after the other and leave everything as it was; collective.

    Replicas may have different numbers of batches: the others wait. Returns what was written to here, by name.
    """
    written: list[str] = []
    most = max(run.control.gather(len(batches)))
    for i in range(most):
        batch = batches[min(i, len(batches) - 1)]
        with backend.untouched(run.parts, batch):
            stage = cast(PipelineStage, run.parts.stage)
            stage.begin()
            try:
                Walk(run, backend, batch, training).go()
            finally:
                stage.drop()
                run.parts.measure_names()  # what it has counted is none of an evaluation's
                written += run.parts.buffers.noticed()
                run.parts.buffers.discard()
                stage.rewind()
    return written


@contextlib.contextmanager
def evaluating(run: Run, backend: Any, pool: Batch) -> Iterator[Evaluate]:
    """Yield a function that evaluates the loss of samples of ``pool``, in evaluation mode; leave everything as it was.

    Collective: every rank gets the same value, of the same ``pool``. Random generators run on between evaluations.
    """
    stage, evaluator, control = cast(PipelineStage, run.parts.stage), run.parts.evaluator, run.control
    narrow = any(name != "fp32" for name in run.parts.precision.names)

    def evaluate(numbers: Sequence[int], training: bool) -> LossValue:
        if training:
            raise NotImplementedError("a step's forward is not repeated for other numbers of samples")
        stage.begin()
        try:
            Walk(run, backend, tuple(array[list(numbers)] for array in pool), False, agreeing=True).go()
            losses = control.gather(evaluator.totals().get("loss"))
        finally:
            stage.drop()
            evaluator.totals()
            run.parts.buffers.discard()
        total, weight = next(loss for loss in losses if loss is not None)
        return LossValue(float(total), float(weight), eps=2.0**-8 if narrow else 2.0**-23)

    with backend.untouched(run.parts, ()):
        yield evaluate
