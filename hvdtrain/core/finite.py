"""Predicates on arrays of weights: finite or not, and where the first number is that is not. Numpy only."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np


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


def spoken(name: str) -> str:
    """Return a parameter's own name, without the place and the type that a checkpoint adds to it.

    >>> spoken("00002/dense/kernel"), spoken("blocks.0.weight#bfloat16")
    ('dense/kernel', 'blocks.0.weight')
    """
    return re.sub(r"^\d{5}/", "", name).removesuffix("#bfloat16")
