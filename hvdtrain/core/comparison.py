"""Compare the weights of trainings: largest difference and its tolerance, equal bits, entries that are not finite.

Owns the measure that `python -m hvdtrain verify` and the tests share. numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvdtrain.core.errors import UserError

LEAST, MOST = 1e-5, 1e-4
"""Bounds of the tolerance. A gradient that is wrong by one sample of some hundred is beyond the upper one."""

TIMES = 4.0
"""Tolerance as a multiple of one process's own rounding: cuts of the same batch were seen to differ threefold."""

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of the same results: ``value``; ``noise``: of one process with other micro-batches."""

    value: float = LEAST
    noise: float = 0.0

    @classmethod
    def of(cls, noise: float) -> Tolerance:
        """Return `TIMES` the ``noise``, within `LEAST` and `MOST`. Pure."""
        return cls(min(max(TIMES * noise, LEAST), MOST), noise)


def tolerance(reference: Weights, train: Callable[[int], Weights], parts: int = 1) -> Tolerance:
    """Measure how far rounding alone takes the training that ended with ``reference``.

    ``train(accumulate)``: the weights of the same training, where it was done, with its batch cut into ``accumulate``
    micro-batches; ``reference`` was cut into ``parts``. Called for two other cuts.
    """
    return Tolerance.of(max(largest_difference(reference, train(parts + more))[0] for more in (1, 2)))


def largest_difference(a: Weights, b: Weights) -> tuple[float, str]:
    """Return the largest max|a-b| / max|a| over tensors, and that tensor's name; infinite where one is not finite."""
    if set(a) != set(b):
        raise UserError(f"the runs' weights have different names: {sorted(set(a) ^ set(b))[:4]}",
                        "the same model in every run", "make the model's callable deterministic")
    worst = (0.0, "")
    for name in a:
        if a[name].shape != b[name].shape:
            raise UserError(f"{name} has shape {b[name].shape} in one run", f"{a[name].shape}, as in the first",
                            "make the model's callable deterministic")
        if not np.isfinite(a[name]).all() or not np.isfinite(b[name]).all():
            return float("inf"), name
        scale = float(np.abs(a[name]).max(initial=0)) or 1.0
        diff = float(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)).max(initial=0)) / scale
        if diff > worst[0]:
            worst = (diff, name)
    return worst


def same_bits(a: Weights, b: Weights) -> bool:
    """Return whether all tensors are equal to the bit."""
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


class Origin(NamedTuple):
    """``when``: its turn among the forwards and backwards of a micro-batch in the copy's chunks; ``what``: in words."""

    when: int
    what: str


def finite(name: str, array: np.ndarray) -> bool:
    """Return whether no entry is NaN or infinite; bfloat16 travels as its bits, under a name that says so."""
    if name.endswith("#bfloat16"):
        return not bool((array & 0x7F80 == 0x7F80).any())  # an exponent of ones
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def has_nan(name: str, array: np.ndarray) -> bool:
    """Return whether an entry is NaN; bfloat16 as in `finite`."""
    if name.endswith("#bfloat16"):
        return bool((array & 0x7FFF > 0x7F80).any())
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def plain_name(name: str) -> str:
    """Return a parameter's own name, without the place and the type that a checkpoint adds to it.

    >>> plain_name("00002/dense/kernel"), plain_name("blocks.0.weight#bfloat16")
    ('dense/kernel', 'blocks.0.weight')
    """
    return re.sub(r"^\d{5}/", "", name).removesuffix("#bfloat16")
