"""``mixup: A``: the mean of two samples, pictures and classes, by a weight from Beta(A, A).

Source: H. Zhang et al., "mixup: Beyond empirical risk minimization", ICLR 2018. A partner is drawn from the whole set
rather than from the batch, so that no picture depends on the ranks.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.data.augment.draw import beta, uniform_of, whole
from hvdtrain.data.sources import ArraySource, Source

_KEYS = ("alpha", "classes")


def check(value: Any) -> None:
    """Raise `UserError` unless ``value`` is a number of 0 (off) or more, or a mapping {alpha, classes}."""
    if isinstance(value, Mapping):
        for key in value:
            if key not in _KEYS:
                raise UserError(f"data.augment.mixup has an entry {key!r}", nearest(str(key), _KEYS),
                                "correct data.augment.mixup")
        whole("mixup.classes", value.get("classes", 0), "classes")
    alpha = alpha_of(value)
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 <= alpha < math.inf:
        raise UserError(f"data.augment.mixup is {alpha!r}", "alpha of Beta(alpha, alpha), 0 or more, such as 0.2, or "
                        "{alpha: 0.2, classes: 10}", "correct data.augment.mixup")


def alpha_of(value: Any) -> Any:
    """Return the Beta distribution's parameter; 0 is off."""
    return value.get("alpha", 0.2) if isinstance(value, Mapping) else value


def classes_of(value: Any, source: Source) -> int:
    """Return the number of classes, as configured, known to the source, or of its targets; else `UserError`."""
    told = value.get("classes", 0) if isinstance(value, Mapping) else 0
    known: Any = told or getattr(source, "classes", 0)
    if known:
        return int(known) if isinstance(known, numbers.Integral) else len(known)
    if isinstance(source, ArraySource) and len(source.arrays) > 1 and len(source):
        y = source.arrays[1]
        if y.dtype.kind in "iu":
            return int(y.max()) + 1
        return y.shape[-1] if y.ndim == 2 else 0
    raise UserError("data.augment.mixup does not know how many classes the data has", "their number",
                    "set data.augment.mixup.classes in addition to data.augment.mixup.alpha")


def partners(numbers_n: np.ndarray, samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return int64[n]: for each sample the one of ``samples`` that it is mixed with (it may be itself)."""
    uniform = uniform_of(numbers_n, seed, epoch, "mixup partner")
    return (uniform(1)[:, 0] * samples).astype(np.int64)


def weights(numbers_n: np.ndarray, alpha: float, seed: int, epoch: int) -> np.ndarray:
    """Return float64[n] from Beta(alpha, alpha): each sample's own weight; its partner has the rest."""
    return beta(uniform_of(numbers_n, seed, epoch, "mixup weight"), alpha)


def mix(own: np.ndarray, other: np.ndarray, weights_n: np.ndarray) -> np.ndarray:
    """Return weight * own + (1 - weight) * other of arrays (n, ...), rounded where they are whole numbers."""
    weights = weights_n.reshape(-1, *[1] * (own.ndim - 1)).astype(np.float64 if own.dtype.itemsize > 4 else np.float32)
    mixed = weights * own + (1 - weights) * other
    return (np.rint(mixed) if own.dtype.kind in "iu" else mixed).astype(own.dtype)


def shares(y: np.ndarray, classes: int) -> np.ndarray:
    """Return float32 (n, C): one-hot of class numbers, or shares as they are; `UserError` for other targets."""
    if y.dtype.kind == "f" and y.ndim == 2 and y.shape[1] == classes > 1:
        return y.astype(np.float32)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise UserError(f"data.augment.mixup: the targets are {y.dtype} of shape {list(y.shape)}",
                        "one class number for each sample", "leave mixup out")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise UserError(f"data.augment.mixup: class numbers run from {low} to {high}", f"0..{classes - 1}",
                        "number the classes from 0, or set data.augment.mixup.classes")
    return (y[:, None] == np.arange(classes)).astype(np.float32)
