"""Decode pictures with Pillow to uint8 (H, W, C), and normalise them to float32.

Owns decoding, resizing, normalisation and layout; finds no files. Pillow is imported with the first picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.sources import Unreadable, shown
from hvdtrain.planning.batch.sampler import at_least

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
LAYOUTS = ("channels_last", "channels_first")

_ORIENTATION = 0x0112  # Exif's tag
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Normalisation:
    """Convert bytes to float32 in ``layout``: (pixel / 255 - mean) / std of each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    layout: str = "channels_last"

    @classmethod
    def of(cls, mean: Any, std: Any, channels: int, layout: str) -> Normalisation:
        """Return the one for ``mean`` and ``std`` (None, a number, or one per channel); `UserError` for others."""
        if layout not in LAYOUTS:
            raise UserError(f"data.args.layout is {layout!r}", f"one of {', '.join(LAYOUTS)}",
                            "set data.args.layout: channels_last")
        return cls(_each("mean", 0.0 if mean is None else mean, channels),
                   _each("std", 1.0 if std is None else std, channels), layout)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 (n, H, W, C), or (n, C, H, W) with channels_first, of uint8 (n, H, W, C)."""
        n, H, W, C = pixels.shape
        x = np.divide(pixels, np.float32(255), dtype=np.float32).reshape(n * H, W * C)  # long rows: numpy's fast loops
        if any(self.mean):
            x -= np.tile(np.array(self.mean, np.float32), W)
        if any(value != 1 for value in self.std):
            x /= np.tile(np.array(self.std, np.float32), W)
        x = x.reshape(n, H, W, C)
        return x if self.layout == "channels_last" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _each(name: str, given: Any, channels: int) -> tuple[float, ...]:
    values = list(given) if isinstance(given, (tuple, list)) else [given] * channels
    whole = all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values)
    if not whole or len(values) != channels or name == "std" and min(values) <= 0:
        above = " above 0" if name == "std" else ""
        raise UserError(f"data.args.{name} is {given!r}", f"a number{above}, or {channels} of them, one for a channel",
                        f"correct data.args.{name}")
    return tuple(float(value) for value in values)


def checked_size(size: Any) -> tuple[int, int] | None:
    """Return (H, W) of ``data.args.size``: N for (N, N), or [H, W]; None for 0, pictures as they are."""
    if size == 0 and not isinstance(size, bool):
        return None
    sides = list(size) if isinstance(size, (tuple, list)) and len(size) == 2 else [size, size]
    for side in sides:
        at_least("data.args.size", side, 1)
    return sides[0], sides[1]


def size_of(path: bytes, number: int) -> tuple[int, int]:
    """Return (H, W) of a picture as shown, from its header; `Unreadable` as in `decode`."""
    try:
        with open(path, "rb") as file, _opened(file) as image:
            W, H = image.size
            return (W, H) if _orientation(image) > 4 else (H, W)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # whatever Pillow's decoders stumble over
        raise Unreadable(number, shown(path), _reason(error)) from None


def decode(path: bytes, number: int, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    """Return a picture as uint8 (H, W, C) in sRGB as stored, C 3, or 1 for grey.

    ``size`` (H, W): scale until both sides are covered, and crop the middle; a JPEG may be decoded at a half, a quarter
    or an eighth first. Turned as Exif says; transparency is dropped; 16 bits become 8. Errors: `Unreadable`, with
    ``number``, for a file that is missing, damaged, of another format or above `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    try:
        with open(path, "rb") as file, _opened(file) as image:
            return _pixels(image, size, channels)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # whatever Pillow's decoders stumble over
        raise Unreadable(number, shown(path), _reason(error)) from None


def _opened(file: Any) -> Any:
    image_module = _pillow()
    image = image_module.open(file, formats=FORMATS)
    most = image_module.MAX_IMAGE_PIXELS
    if most and image.width * image.height > most:  # Pillow itself only warns, up to twice as many
        raise ValueError(f"it has {image.width} x {image.height} pixels, more than PIL.Image.MAX_IMAGE_PIXELS ({most})")
    return image


def _pixels(image: Any, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    from PIL import ImageOps

    turned = _orientation(image)
    if size is not None:
        longest = 2 * max(size)
        image.draft(None, (longest, longest))  # of JPEGs alone
    image = _rgb(image, _MODES[channels])
    if turned > 1:
        image = image.transpose({2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}[turned])  # by Image.Transpose's numbers
    if size is not None and image.size != size[::-1]:
        image = ImageOps.fit(image, size[::-1], method=2)  # bilinear
    # Pillow's own way to numpy asks it more than once what kind of picture this is.
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, channels)


def _rgb(image: Any, mode: str) -> Any:
    if image.mode.startswith("I"):  # Pillow would cut 16 bits off at 255
        from PIL import Image

        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    image.load()
    return image if image.mode == mode else image.convert(mode)


def _orientation(image: Any) -> int:
    """Return Exif's orientation, 1 (none) to 8."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged notes about a picture are no damage of the picture
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _reason(error: Exception) -> str:
    if type(error).__name__ == "UnidentifiedImageError":
        return "it is no PNG, JPEG, WebP or BMP picture, or its beginning is damaged"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = " ".join(str(error).split())[:200].rstrip(".")
    return said or type(error).__name__


def _pillow() -> Any:
    try:
        from PIL import Image, WebPImagePlugin  # noqa: F401  (else the first picture would load all of Pillow's)
    except ImportError as error:
        raise UserError(f"pictures need Pillow, which cannot be imported: {error}", "it beside numpy",
                        'run pip install "hvdtrain[data]"') from None
    return Image


def channels_of(channels: Any) -> int:
    if channels not in _MODES or isinstance(channels, bool):
        raise UserError(f"data.args.channels is {channels!r}", "3 (colours) or 1 (grey)", "set data.args.channels: 3")
    return int(channels)


def first_size(paths: Iterable[bytes]) -> tuple[tuple[int, int], bytes]:
    """Return (H, W) and path of the first readable one of ``paths``; else raise the first `Unreadable`."""
    failed: list[Unreadable] = []
    for number, path in enumerate(paths):
        try:
            return size_of(path, number), path
        except Unreadable as error:
            failed.append(error)
    raise failed[0]
