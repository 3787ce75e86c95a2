"""``resized_crop: A``: crop a random area of each picture, and scale it to the picture's own size.

Source: C. Szegedy et al., "Going deeper with convolutions", CVPR 2015; the draws are those of torchvision's
RandomResizedCrop. ``A`` is the smallest part of the area, or {scale: [A, 1], ratio: [3/4, 4/3]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.data.augment.draw import Uniform

RATIO = (3 / 4, 4 / 3)
TRIES = 10
"""Draws of an area that may not fit into a picture; then the largest area in the middle is taken."""
_KEYS = ("scale", "ratio")


def check(value: Any) -> None:
    """Raise `UserError` unless ``value`` is 0 (off), a part of the area, or a mapping {scale, ratio}."""
    for key in value if isinstance(value, Mapping) else ():
        if key not in _KEYS:
            raise UserError(f"data.augment.resized_crop has an entry {key!r}", nearest(str(key), _KEYS),
                            "correct data.augment.resized_crop")
    if not value:
        return
    for name, (low, high), most in zip(_KEYS, ranges(value), (1, np.inf)):
        if not 0 < low <= high <= most:
            raise UserError(f"data.augment.resized_crop: {name} is {[low, high]}", "two numbers above 0, in order"
                            + (", of 1 at most" if most == 1 else ""), "correct data.augment.resized_crop")


def ranges(value: Any) -> list[tuple[float, float]]:
    """Return [(least, largest part of the area), (least, largest width / height)]; NaN for what is no number."""
    given = value if isinstance(value, Mapping) else {"scale": (value, 1.0)}
    pairs = [given.get("scale", (0.08, 1.0)), given.get("ratio", RATIO)]
    return [tuple(map(float, pair)) if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(  # type: ignore[misc]
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in pair) else (np.nan, np.nan) for pair in pairs]


def apply(x: np.ndarray, value: Any, uniform: Uniform) -> np.ndarray:
    """Return (n, H, W, C) of the same type, by bilinear interpolation, which only enlarges."""
    top_n, left_n, height_n, width_n = areas(x.shape[1:3], value, uniform)
    wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    for axis, (start_n, length_n) in ((1, (top_n, height_n)), (2, (left_n, width_n))):
        below, above, part = _places(start_n, length_n, x.shape[axis], wide.dtype)
        index, part = ((below, part[:, :, None, None]) if axis == 1 else (below, part[:, None, :, None]))
        low = np.take_along_axis(wide, _expanded(index, axis), axis)
        high = np.take_along_axis(wide, _expanded(above, axis), axis)
        wide = low + (high - low) * part
    return (np.rint(wide) if x.dtype.kind in "iu" else wide).astype(x.dtype)


def areas(size: tuple[int, ...], value: Any, uniform: Uniform) -> tuple[np.ndarray, ...]:
    """Return int64[n] (top, left, height, width) of each sample's area of a picture of ``size`` (H, W)."""
    H, W = size
    scale, ratio = ranges(value)
    numbers = uniform(2 * TRIES + 2)
    area = (scale[0] + (scale[1] - scale[0]) * numbers[:, :TRIES]) * H * W
    aspect = np.exp(np.log(ratio[0]) + (np.log(ratio[1]) - np.log(ratio[0])) * numbers[:, TRIES:-2])
    width, height = (np.rint(np.sqrt(each)).astype(np.int64) for each in (area * aspect, area / aspect))
    fits = (width >= 1) & (width <= W) & (height >= 1) & (height <= H)
    rows, first = np.arange(len(numbers)), fits.argmax(1)
    bound = min(max(W / H, ratio[0]), ratio[1])  # of the whole picture, within the bounds
    whole = (H, min(W, max(1, round(H * bound)))) if bound < W / H else (min(H, max(1, round(W / bound))), W)
    height_n, width_n = (np.where(fits.any(1), drawn[rows, first], middle)
                         for drawn, middle in ((height, whole[0]), (width, whole[1])))
    free = [np.where(fits.any(1), (numbers[:, at] * (side - length + 1)).astype(np.int64), (side - length) // 2)
            for at, side, length in ((-2, H, height_n), (-1, W, width_n))]
    return free[0], free[1], height_n, width_n


def _places(start_n: np.ndarray, length_n: np.ndarray, size: int,
            dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each of ``size`` pixels (n, size), the two pixels of the picture beside it and the second's part."""
    at = (np.arange(size) + 0.5) * (length_n[:, None] / size) - 0.5  # centres of pixels
    at = np.clip(at, 0, length_n[:, None] - 1)
    below = np.floor(at).astype(np.int64)
    above = np.minimum(below + 1, length_n[:, None] - 1)
    return below + start_n[:, None], above + start_n[:, None], (at - below).astype(dtype)


def _expanded(index: np.ndarray, axis: int) -> np.ndarray:
    return index[:, :, None, None] if axis == 1 else index[:, None, :, None]
