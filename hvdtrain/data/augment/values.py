"""Checks of an augmentation's value, shared by their files."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError


def whole(name: str, value: Any, of_what: str) -> None:
    """Raise `UserError` unless ``value`` is a whole number of 0 (off) or more."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise UserError(f"data.augment.{name} is {value!r}", f"a whole number of {of_what}, 0 or more",
                        f"correct data.augment.{name}")


def smaller_than(name: str, value: int, limit: int, x: np.ndarray) -> None:
    """Raise `UserError` unless ``value`` is below ``limit``, from which on nothing may be left of pictures ``x``."""
    if value >= limit:
        raise UserError(f"data.augment.{name} is {value}, and the pictures have {x.shape[1]} x {x.shape[2]} pixels",
                        f"less than {limit}, so that something of them is left", f"correct data.augment.{name}")


def share(name: str, value: Any) -> None:
    """Raise `UserError` unless ``value`` is a number from 0 (off) to 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise UserError(f"data.augment.{name} is {value!r}", "a probability from 0 to 1",
                        f"correct data.augment.{name}")
