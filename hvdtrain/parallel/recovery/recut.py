"""A rank's part of a step in smaller micro-batches; pure."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.core.protocols import Batch
from hvdtrain.core.protocols.types import StepBatch
from hvdtrain.planning.batch.sampler import micro_batches


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
