"""Weigh global batches (law 1): gradients are summed, never averaged; the loss is divided once by the global weight W.

For global batch t with samples (or valid tokens) of total weight W, divided over ranks r and micro-batches m::

    loss_t = (1 / W) * sum_r sum_m loss_sum[r, m]        grad_t = sum_r sum_m grad(loss_sum[r, m] / W)

The sum over r is the collective; unequal ranks, a short last batch and a rank with nothing are the same formula.
Source: torchtitan's train step (global-token normalisation); for unequal ranks, PyTorch issue 67253.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch


def loss_scale(weight: float) -> float:
    """Return 1 / W, or 0 for a global batch of weight 0 (every token masked): its gradient is zero."""
    if not (math.isfinite(weight) and weight >= 0):
        raise UserError(f"the global weight of a batch is {weight}", "a finite number of 0 or more",
                        "check the model file's weight(batch)")
    return 1.0 / weight if weight > 0 else 0.0


def check_weight(counted: float, weight: float) -> None:
    """Raise `UserError` where the tasks of all ranks counted another weight than the W of the loss."""
    if abs(counted - weight) > 1e-3 * max(abs(counted), abs(weight)):
        raise UserError(f"task counted a weight of {counted:g} where the loss was divided by {weight:g}",
                        "equal weights from task(model, batch) and weight(batch)",
                        "define weight(batch) in the model file; without it the weight is the number of samples")


SEARCHED_LABELS = 2**24
"""Labels in memory that are searched at the start for ignored ones; with more of them every step is weighed."""


class LabelWeight:
    """Return the weight of a numpy batch under a loss that ignores a label, or weighs labels by their class.

    Sum of the class weights (1 without any) over the labels that count, divided by the labels per sample: a batch whose
    labels all count weighs its number of samples. ``labels``: batch -> targets (B, ...); floating ones weigh 1 per
    sample. ``ignored``: the label that does not count. ``class_weights``: float64[C], or None.
    """

    def __init__(self, labels: Callable[[Sequence[np.ndarray]], Any], ignored: int,
                 class_weights: np.ndarray | None = None) -> None:
        self._labels, self._ignored, self._class_weights = labels, ignored, class_weights

    def __call__(self, batch: Sequence[np.ndarray]) -> float:
        labels = np.asarray(self._labels(batch))
        if labels.dtype.kind not in "iu" or not labels.size:
            return float(len(labels))
        labels = labels.astype(np.int64, copy=False)
        counted = labels[labels != self._ignored]
        total: float = counted.size
        if self._class_weights is not None:  # a label without a weight is refused by the loss
            known = counted[(counted >= 0) & (counted < len(self._class_weights))]
            total = float(self._class_weights[known].sum())
        return total / (labels.size / len(labels))

    def varies(self, data: Any, samples: Sequence[np.ndarray]) -> bool:
        """Return whether batches of ``data``, or ``samples`` of it, may not weigh their number of samples."""
        whole = getattr(data, "arrays", None)
        if not samples:  # of a stream, whose steps take a sum over ranks anyway
            return True
        labels = np.asarray(self._labels(whole if isinstance(whole, tuple) else samples))
        if labels.dtype.kind not in "iu" or labels.dtype.kind == "u" and self._ignored < 0 and \
                self._class_weights is None:
            return False
        if self._class_weights is not None or not isinstance(whole, tuple) or labels.size > SEARCHED_LABELS:
            return True
        return bool((labels == self._ignored).any())


class PlaceholderSample:
    """Stand in for a batch without samples: the first sample of the latest batch that had any, else zeros.

    Models need not take arrays of no samples: reshape(0, -1) is undefined, and TensorFlow 2.21's convolutions on a CPU
    return their input's shape. The placeholder's loss is multiplied by 0.
    """

    def __init__(self) -> None:
        self._sample: Batch = ()

    def saw(self, batch: Batch) -> None:
        """Keep the first sample of ``batch``."""
        self._sample = tuple(array[:1] for array in batch)

    def instead(self, batch: Batch) -> Batch:
        """Return arrays (1, ...) for ``batch``, whose arrays are (0, ...)."""
        if [_kind(array) for array in self._sample] == [_kind(array) for array in batch]:
            return self._sample
        return tuple(np.zeros((1, *array.shape[1:]), array.dtype) for array in batch)


def _kind(array: Any) -> tuple[Any, ...]:
    return array.dtype, *array.shape[1:]
