"""``flip: S``: mirror a picture left to right with probability S."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.data.augment.draw import Uniform, share


def check(value: Any) -> None:
    share("flip", value)


def apply(x: np.ndarray, value: float, uniform: Uniform) -> np.ndarray:
    chosen_n = uniform(1)[:, 0] < value
    flipped = x.copy()
    flipped[chosen_n] = x[chosen_n, :, ::-1]
    return flipped
