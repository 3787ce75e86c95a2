"""A rank's part of a step in smaller micro-batches; pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvdtrain.data.feed import StepBatch
from hvdtrain.data.sampler import micro_batches


def largest(batch: StepBatch) -> int:
    """Return the samples of its largest micro-batch; 0 without any."""
    return max((len(micro[0]) for micro in batch.micros), default=0)


def recut(batch: StepBatch, limit: int) -> StepBatch:
    """Return ``batch`` in micro-batches of at most ``limit`` samples (0: any), itself where it has no larger one.

    The same samples in the same order, so that their sum is the same gradient up to rounding.
    """
    if not limit or largest(batch) <= limit:
        return batch
    whole = [np.concatenate(arrays) for arrays in zip(*batch.micros)]
    bounds = micro_batches(batch.n_local, 1, limit)
    return replace(batch, micros=[tuple(array[a:b] for array in whole) for a, b in bounds])
