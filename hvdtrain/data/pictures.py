"""Decode pictures with Pillow to uint8 (H, W, C), and normalise them to float32.

Owns decoding, resizing, normalisation, layout, and `load_picture` for serving; finds no files. Pillow is imported with
the first picture.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.png import Scanlines, image_of, pixels_of, scanlines
from hvdtrain.data.sources import Unreadable, shown
from hvdtrain.planning.batch.sampler import at_least

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
LAYOUTS = ("channels_last", "channels_first")

_TOGETHER = 96 << 10  # bytes of pixels that are decoded at once: malloc maps larger arrays anew, page by page
_WHOLE = 1 << 24  # bytes of a PNG up to which it is read as a whole
_ORIENTATION = 0x0112  # Exif's tag
_MODES = {1: "L", 3: "RGB"}

Picture = np.ndarray | Scanlines
"""A decoded picture, uint8 (H, W, C), or the scanlines of one."""


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

    def undone(self, x: np.ndarray) -> np.ndarray:
        """Return normalised pictures (n, H, W, C) in [0, 1] again."""
        return np.clip(x * np.array(self.std, x.dtype) + np.array(self.mean, x.dtype), 0, 1)

    def again(self, x: np.ndarray) -> np.ndarray:
        """Return (x - mean) / std of pictures (n, H, W, C) in [0, 1]."""
        return (x - np.array(self.mean, x.dtype)) / np.array(self.std, x.dtype)


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


def load_picture(file: str | os.PathLike[str] | bytes | BinaryIO, size: Any = 0, *, channels: int = 3, mean: Any = None,
                 std: Any = None, layout: str = "channels_last") -> np.ndarray:
    """Return one picture as training with ``data.name: folder`` reads it, for serving.

    Decode to 8-bit RGB (grey for ``channels`` 1), turned as Exif says. A JPEG is first decoded at a half, a quarter or
    an eighth, if both its sides stay twice the larger side of ``size``. Take the largest area in the middle with the
    proportions of ``size``, and resize it in one step with Pillow's ``BILINEAR``: a triangle filter whose support grows
    with the reduction (antialiased), rounded to 8 bits. Then (pixel / 255 - ``mean``) / ``std``.

    Args:
        file: A path, the bytes of a PNG, JPEG, WebP or BMP file, or a binary file object.
        size: N for N x N, or [H, W], in pixels; 0: as stored. With the other arguments: as ``data.args`` in training.
        channels: 3, or 1 for grey.
        mean: A number, or one for each channel, in units of [0, 1]; None: 0.
        std: The same; None: 1.
        layout: ``channels_last`` or ``channels_first``.

    Returns:
        float32 (H, W, C), or (C, H, W) with channels_first.

    Raises:
        UserError: For an argument out of range, and `Unreadable` for a file that cannot be read.
    """
    scale, wanted = Normalisation.of(mean, std, channels_of(channels), layout), checked_size(size)
    path: Any = io.BytesIO(file) if isinstance(file, bytes) else file
    path = path if hasattr(path, "read") else os.fsencode(path)
    return scale(decode(path, 0, wanted, channels)[None])[0]


def size_of(path: bytes, number: int) -> tuple[int, int]:
    """Return (H, W) of a picture as shown, from its header; `Unreadable` as in `decode`."""
    with _opened(path, number) as image:
        W, H = image.size
        return (W, H) if _orientation(image) > 4 else (H, W)


def decode(path: bytes | BinaryIO, number: int, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    """Return a picture as uint8 (H, W, C) in sRGB as stored, C 3, or 1 for grey.

    ``size`` (H, W): scale until both sides are covered, and crop the middle; a JPEG may be decoded at a half, a quarter
    or an eighth first. Turned as Exif says; transparency is dropped; 16 bits become 8. Errors: `Unreadable`, with
    ``number``, for a file that is missing, damaged, of another format or above `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    with _opened(path, number) as image:
        return _pixels(image, size, channels)


def parsed(file: bytes | io.BytesIO, number: int, size: tuple[int, int] | None, channels: int) -> Picture:
    """Return what `decode` returns, or the scanlines of a PNG, which `stacked` decodes together with others."""
    data = _content(file) if isinstance(file, bytes) else file.getvalue()
    png = scanlines(data, _pillow().MAX_IMAGE_PIXELS or _WHOLE * 1000)
    if png is None:
        return decode(file, number, size, channels)
    if (size is None or size == png.shape[:2]) and png.channels in (1, channels):
        png.shape = (*png.shape[:2], channels)
        return png
    return _fitted(_in_mode(image_of([png]), _MODES[channels]), size, channels)


def stacked(pictures: Sequence[Picture], channels: int) -> np.ndarray:
    """Return uint8 (n, H, W, C) of pictures of one size that `parsed` has returned; grey ones fill all ``channels``."""
    H, W, _ = pictures[0].shape
    pixels = np.empty((len(pictures), H, W, channels), np.uint8)
    pngs: dict[int, list[tuple[int, Scanlines]]] = {}
    for row, picture in enumerate(pictures):
        if isinstance(picture, Scanlines):
            pngs.setdefault(picture.channels, []).append((row, picture))
        else:
            pixels[row] = picture
    for stored, group in pngs.items():
        n = max(1, _TOGETHER // (H * W * stored))
        for some in (group[i:i + n] for i in range(0, len(group), n)):
            pixels[[row for row, _ in some]] = pixels_of([png for _, png in some])
    return pixels


def _content(path: bytes) -> bytes:
    """Return the bytes of a file named as a PNG; b"" for another one, and where `decode` has to report why not."""
    if not path[-4:].lower() == b".png":
        return b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        size = os.fstat(fd).st_size
        return os.read(fd, size) if size <= _WHOLE else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(path: bytes | BinaryIO, number: int) -> Iterator[Any]:
    """Give the body the picture; whatever Pillow's decoders stumble over is `Unreadable`."""
    image_module = _pillow()
    most = image_module.MAX_IMAGE_PIXELS
    try:
        stream: Any = open(path, "rb") if isinstance(path, bytes) else contextlib.nullcontext(path)
        with stream as file, image_module.open(file, formats=FORMATS) as image:
            if most and image.width * image.height > most:  # Pillow itself only warns, up to twice as many
                raise ValueError(f"it has {image.width} x {image.height} pixels, more than "
                                 f"PIL.Image.MAX_IMAGE_PIXELS ({most})")
            yield image
    except (MemoryError, UserError):
        raise
    except Exception as error:
        place = shown(path) if isinstance(path, bytes) else "the given bytes"
        raise Unreadable(number, place, _reason(error)) from None


def _pixels(image: Any, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    turned = _orientation(image)
    if size is not None:
        longest = 2 * max(size)
        image.draft(None, (longest, longest))  # of JPEGs alone
    image = _rgb(image, _MODES[channels])
    if turned > 1:
        image = image.transpose({2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}[turned])  # by Image.Transpose's numbers
    return _fitted(image, size, channels)


def _fitted(image: Any, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    from PIL import ImageOps

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
    return _in_mode(image, mode)


def _in_mode(image: Any, mode: str) -> Any:
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
        return "it is not a PNG, JPEG, WebP, BMP or PPM image, or its beginning is damaged"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = " ".join(str(error).split())[:200].rstrip(".")
    return said or type(error).__name__


def _pillow() -> Any:
    try:
        from PIL import Image, WebPImagePlugin  # noqa: F401  (else the first picture would load all of Pillow's)
    except ImportError as error:
        raise UserError(f"images need Pillow, which cannot be imported: {error}", "Pillow installed",
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
