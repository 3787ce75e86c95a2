"""Record the course of a run: start, steps, evaluations, checkpoints, end; others use `Run.record`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdtrain.core import records
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.meter import Meter, meter_of
from hvdtrain.engine.run import Run
from hvdtrain.parallel.pipeline.plan import facts
from hvdtrain.planning.batch.meter import Reading


class Recorder(Callback):
    """Makes the records that every run has; ``meter``: what compares the ranks, where there are several."""

    @classmethod
    def make(cls, run: Run, earlier: Mapping[str, Callback]) -> Callback:
        return cls(meter_of(run, earlier))

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter

    def fit_start(self, run: Run) -> None:
        per_epoch = run.feed.steps_per_epoch
        run.record("start", schema=records.VERSION, world_size=run.control.size, hosts=run.topology.describe(),
                   pipeline=facts(run.parts.layout, run.config),
                   notes=list(run.notes), framework=run.spec.framework, model=run.spec.name, wire=run.collectives.name,
                   memory=run.memory, config=run.config.to_dict(), epochs=run.config.epochs,
                   steps=_steps(per_epoch, run.config.epochs, run.config.max_steps), pid=os.getpid())

    def epoch_start(self, run: Run) -> None:
        run.records.flush(run)

    def step_end(self, run: Run) -> None:
        """Loss, rate, speed and phase seconds so far, where a report wants this step."""
        if not run.records.wanted(run) or not run.updated:  # each step asks whose turn it is
            return
        s, reading = run.state, self._reading()
        run.record("step", epoch=s.cursor.epoch, samples=s.cursor.samples, loss=s.loss, grad_norm=s.grad_norm,
                   lr=run.parts.optimizer.learning_rate(), samples_per_s=s.samples_per_s,
                   phases_s=dict(run.timeline.totals.seconds),
                   percent_of_solo=None if reading is None else reading.percent)

    def non_finite(self, run: Run) -> None:
        run.record("non_finite", ranks=list(run.state.outcome.bad_ranks))

    def eval_end(self, run: Run) -> None:
        run.record("eval", epoch=run.state.cursor.epoch, metrics=dict(run.state.metrics),
                   samples_per_s=run.state.samples_per_s, unread=run.setup.eval_unread)

    def checkpoint(self, run: Run) -> None:
        run.record("checkpoint")

    def fit_end(self, run: Run) -> None:
        reading = self._reading()
        if reading is not None:
            run.record("meter", percent_of_solo=reading.percent, step_s=reading.step_s, lost_percent=reading.lost,
                       ranks=[vars(row) for row in reading.rows], advice=reading.sentence)
        run.record("end", epoch=run.state.cursor.epoch, stop=run.state.stop, metrics=dict(run.state.metrics),
                   ledger=run.ledger, memory=run.memory)

    def _reading(self) -> Reading | None:
        return None if self._meter is None else self._meter.reading


def _steps(per_epoch: int | None, epochs: int, limit: int) -> int | None:
    """Return steps of the whole run; None where the data has no length and there is no limit."""
    total = None if per_epoch is None else per_epoch * epochs
    return min((x for x in (total, limit or None) if x), default=None)
