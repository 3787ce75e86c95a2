"""``color_jitter: S``: change brightness, contrast, saturation and hue of each picture, in this order.

``S`` is the strength of the first three, or {brightness, contrast, saturation, hue}: factors are uniform in
[max(0, 1 - S), 1 + S], the hue moves by up to ``hue`` (0 to 0.5) of a turn. Formulas: torchvision's ColorJitter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError, nearest
from hvdtrain.data.augment.draw import Uniform

NAMES = ("brightness", "contrast", "saturation", "hue")
GREY = (0.2989, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601, rounded as Pillow and torchvision do


def check(value: Any) -> None:
    """Raise `UserError` unless ``value`` is a strength of 0 (off) or more, or a mapping of strengths."""
    for key in value if isinstance(value, Mapping) else ():
        if key not in NAMES:
            raise UserError(f"data.augment.color_jitter has an entry {key!r}", nearest(str(key), NAMES),
                            "correct data.augment.color_jitter")
    for name, strength in zip(NAMES, strengths(value)):
        most = 0.5 if name == "hue" else np.inf
        if not isinstance(strength, (int, float)) or isinstance(strength, bool) or not 0 <= strength <= most:
            raise UserError(f"data.augment.color_jitter: {name} is {strength!r}", "a number of 0 (off) or more"
                            + (", 0.5 at most" if name == "hue" else ""), "correct data.augment.color_jitter")


def strengths(value: Any) -> list[Any]:
    """Return the strengths of `NAMES`."""
    given = value if isinstance(value, Mapping) else dict.fromkeys(NAMES[:3], value)
    return [given.get(name, 0) for name in NAMES]


def apply(x: np.ndarray, value: Any, uniform: Uniform) -> np.ndarray:
    """Return (n, H, W, C) of the same type, C 1 or 3: uint8, or floats in [0, 1]. Grey has no saturation and hue."""
    refuse_range(x)
    if x.shape[3] not in (1, 3):
        raise UserError(f"data.augment.color_jitter: the images have {x.shape[3]} channels", "1 or 3",
                        "leave color_jitter out")
    bytes_ = x.dtype == np.uint8
    wide = x.astype(np.float32) / 255 if bytes_ else x
    strong, numbers = strengths(value), uniform(len(NAMES))[:, :, None, None, None]
    factors = [np.asarray(max(0, 1 - s) + (1 + s - max(0, 1 - s)) * numbers[:, i], wide.dtype)
               for i, s in enumerate(strong[:3])]
    if strong[0]:
        wide = np.clip(wide * factors[0], 0, 1)
    if strong[1]:
        wide = _blended(wide, _grey(wide).mean((1, 2, 3), keepdims=True, dtype=np.float64), factors[1])
    if strong[2] and x.shape[3] == 3:
        wide = _blended(wide, _grey(wide), factors[2])
    if strong[3] and x.shape[3] == 3:
        wide = _turned(wide, (2 * numbers[:, 3] - 1) * strong[3])
    return (np.rint(wide * 255) if bytes_ else wide).astype(x.dtype)


def refuse_range(x: np.ndarray) -> None:
    """Raise `UserError` unless ``x`` is uint8 or floats in [0, 1]."""
    if x.dtype != np.uint8 and (x.dtype.kind != "f" or x.size and not 0 <= x.min() <= x.max() <= 1):
        what = f"run from {x.min():.4g} to {x.max():.4g}" if x.dtype.kind == "f" else f"are {x.dtype}"
        raise UserError(f"data.augment.color_jitter: the pixels {what}", "uint8, or floats from 0 to 1",
                        "normalise the images in the model, or by data.args.mean and std of a data set by name")


def _grey(x: np.ndarray) -> np.ndarray:
    return x @ np.asarray(GREY, x.dtype)[:, None] if x.shape[3] == 3 else x


def _blended(x: np.ndarray, other: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return np.clip(factor * x + (1 - factor) * other.astype(x.dtype), 0, 1)


def _turned(x: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Return RGB pictures whose hue is moved by ``turns`` (n, 1, 1, 1), by HSV and back."""
    high, low = x.max(3), x.min(3)
    span = high - low
    part = np.where(span > 0, span, 1)
    red, green, blue = ((high - x[..., i]) / part for i in range(3))
    hue = np.where(x[..., 0] == high, blue - green, np.where(x[..., 1] == high, 2 + red - blue, 4 + green - red)) / 6
    hue = (hue + turns[..., 0]) % 1 * 6
    saturation = span / np.where(high > 0, high, 1)
    # One channel: V (1 - S max(0, min(k, 4 - k, 1))) with k = (n + 6 H) mod 6; n = 5, 3, 1 for red, green, blue.
    turned = [high * (1 - saturation * np.clip(np.minimum(k, 4 - k), 0, 1)) for n in (5, 3, 1)
              for k in ((n + hue) % 6,)]
    return np.clip(np.stack(turned, 3), 0, 1).astype(x.dtype)
