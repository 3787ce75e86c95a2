"""``cutout: L``: set a square of L pixels a side to zero, its centre anywhere in the picture.

Source: T. DeVries, G. Taylor, arXiv 1708.04552, 2017. Part of the square may lie outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.data.augment.draw import Uniform, smaller_than, whole


def check(value: Any) -> None:
    whole("cutout", value, "pixels a side")


def apply(x: np.ndarray, value: int, uniform: Uniform) -> np.ndarray:
    extents = np.array(x.shape[1:3])
    smaller_than("cutout", value, int(2 * extents.max()), x)
    starts = np.floor(uniform(2) * extents).astype(np.int64) - value // 2
    holes = [(starts[:, i, None] <= np.arange(extent)) & (np.arange(extent) < starts[:, i, None] + value)
             for i, extent in enumerate(extents)]
    return np.where((holes[0][:, :, None] & holes[1][:, None, :])[..., None], x.dtype.type(0), x)
