"""``crop: P``: pad each picture with P pixels of zeros on every side and crop its size from a random place."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.data.augment.draw import Uniform, smaller_than, whole


def check(value: Any) -> None:
    whole("crop", value, "pixels of padding")


def apply(x: np.ndarray, value: int, uniform: Uniform) -> np.ndarray:
    """Return (n, H, W, C) of the same type; each of the (2 P + 1)^2 places is as likely."""
    n, height, width, channels = x.shape
    smaller_than("crop", value, min(height, width), x)
    top_n, left_n = (uniform(2) * (2 * value + 1)).astype(np.int64).T
    padded = np.pad(x, ((0, 0), (value, value), (value, value), (0, 0))).reshape(n, height + 2 * value, -1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width * channels, axis=2)
    rows = top_n[:, None] + np.arange(height)
    return windows[np.arange(n)[:, None], rows, left_n[:, None] * channels].reshape(x.shape)
