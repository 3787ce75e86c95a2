"""Pairs (sum, weight) of a loss or metric: what a model file's ``task`` and ``metrics`` return, looked at.

Owns the look, in the same words on every backend, and the mean of a pair. Knows shapes, no framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError

Pair = tuple[Any, Any]


def checked_pair(found: Any, origin: str = "task", expected: str = "(loss_sum, weight)") -> Pair:
    """``found``, if it is two single numbers; `UserError` otherwise."""
    whole = isinstance(found, (tuple, list)) or getattr(found, "shape", None) == (2,)
    if not whole or len(found) != 2:
        length = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        raise UserError(f"{origin} returned a {type(found).__name__}{length}", expected, "mend the model file")
    for value, what in zip(found, ("a loss" if origin == "task" else "a sum", "a weight")):
        shape = _shape(value)
        if shape or not (hasattr(value, "shape") or isinstance(value, (int, float))):
            raise UserError(f"{origin} returned {what} of type {type(value).__name__} and shape {shape}",
                            f"{expected}, each a scalar", "sum over the samples in the model file")
    return found[0], found[1]


def _shape(value: Any) -> tuple[Any, ...]:
    try:
        return tuple(getattr(value, "shape", ()))
    except ValueError:  # a graph leaves even the number of dimensions open
        return ()


def of_model_file(task: Callable[..., Any], metrics: Callable[..., Any] | None, *args: Any,
                  **more: Any) -> dict[str, Pair]:
    """Return (sum, weight) of "loss" and of each metric that a model file computes from ``args``.

    Errors: `UserError` where ``metrics`` returns no dict of pairs.
    """
    pairs = {"loss": checked_pair(task(*args, **more))}
    if metrics is not None:
        found = metrics(*args, **more)
        if not isinstance(found, Mapping):
            raise UserError(f"metrics returned a {type(found).__name__}", "a dict of name: (sum, weight)",
                            "mend the model file's metrics")
        for name, pair in found.items():
            pairs[name] = checked_pair(pair, f"metric {name!r}", "(sum, weight)")
    return pairs


class Totals:
    """Running sums of pairs by name, float64[2] each."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}

    def add(self, pairs: Mapping[str, Pair]) -> None:
        """Add one batch's pairs of numbers or scalar tensors; all of them, or none where reading one fails."""
        self._sums |= {name: self._sums.get(name, 0.0) + np.array([float(total), float(weight)])
                       for name, (total, weight) in pairs.items()}

    def take(self) -> dict[str, np.ndarray]:
        """Return the sums by name; they start anew."""
        sums, self._sums = self._sums, {}
        return sums


def means(totals: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return sum / weight by name, NaN where the weight is 0."""
    return {name: float(s / w) if w else math.nan for name, (s, w) in totals.items()}
