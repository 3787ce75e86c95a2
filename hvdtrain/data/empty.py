"""Micro-batches without samples, which `Feed` makes with ``even_micros``: what a model computes on instead.

Owns the stand-in alone. Knows no framework.

Models need not take arrays of no samples: reshaping to (0, -1) is undefined, and TensorFlow 2.21's convolutions on a
CPU (oneDNN) return their input's shape. So a rank runs one sample in their place, its loss multiplied by 0, and layers
that take statistics over ranks leave it out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.core.protocols import Batch


class StandIn:
    """One sample of the latest batch that had any; before the first, one of zeros."""

    def __init__(self) -> None:
        self._sample: Batch = ()

    def saw(self, batch: Batch) -> None:
        """Keep the first sample of ``batch``."""
        self._sample = tuple(array[:1] for array in batch)

    def instead(self, batch: Batch) -> Batch:
        """Arrays (1, ...) for ``batch``, whose arrays are (0, ...)."""
        if [_kind(array) for array in self._sample] == [_kind(array) for array in batch]:
            return self._sample
        return tuple(np.zeros((1, *array.shape[1:]), array.dtype) for array in batch)


def _kind(array: Any) -> tuple[Any, ...]:
    return array.dtype, *array.shape[1:]
