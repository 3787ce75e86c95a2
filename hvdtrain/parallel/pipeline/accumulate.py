"""Gradient accumulation: forward and backward of one micro-batch after the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hvdtrain.core.protocols import GradientSink, Stage, StepGradients

if TYPE_CHECKING:
    from hvdtrain.core.protocols.types import StepBatch
    from hvdtrain.parallel.recovery.attempt import MemoryGuard


class Accumulate:
    """`hvdtrain.core.protocols.Schedule` over a ``stage`` that is the whole model. ``guard``: refuses micro-batches
    without memory.
    """

    def __init__(self, stage: Stage, guard: MemoryGuard | None = None) -> None:
        self.stage, self._guard = stage, guard

    def gradients(self, batch: StepBatch, scale: float, sink: GradientSink) -> StepGradients:
        """Sum the micro-batches' gradients; zeros on a rank without any."""
        stage, guard, totals, waited_s = self.stage, self._guard, [], 0.0
        stage.begin()
        for i, micro in enumerate(batch.micros, 1):
            if guard is not None:
                guard.check(len(micro[0]))
            totals.append(stage.run(micro, scale, i == len(batch.micros), sink))
            waited_s += stage.waited_s
            following = batch.micros[i] if i < len(batch.micros) else batch.coming()
            if following:  # backward is queued by now, so that a device has something to do meanwhile
                stage.ahead(following)
            if guard is not None:
                guard.ran(len(micro[0]))
        if not batch.micros:
            stage.nothing(sink)
            waited_s += stage.waited_s
        waited_s += sink.waited_s
        begin = time.perf_counter()
        grads = sink.collect()
        return StepGradients(grads, totals, waited_s + time.perf_counter() - begin)
