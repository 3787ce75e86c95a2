"""Decode plain PNG files of one size together: 8-bit grey or RGB, without transparency, interlacing or orientation.

Owns their chunks and scanlines; leaves other files to `hvdtrain.data.pictures`.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

_BEGIN = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_HEAD = struct.Struct(">IIBBBBBI")  # width, height, depth, colour type, compression, filter, interlacing, CRC
_HEAD_END = len(_BEGIN) + _HEAD.size
_CHUNK, _CRC = struct.Struct(">I4s"), struct.Struct(">I")
_COLOURS = {0: 1, 2: 3}  # colour type -> channels: grey, RGB
_MODES = {1: "L", 3: "RGB"}
_IGNORED = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tIME": 7}
"""Chunks that change no stored pixel, and their bytes. Others may turn a picture: eXIf, and texts that hold Exif."""
_LAST_FILTER = 4
_BLOCK, _STORED = 65535, struct.Struct("<BHH")  # most bytes of a stored block; its head: last one, n, n inverted


class Scanlines:
    """The unpacked lines of a PNG of ``channels``, each after its filter's byte; ``shape`` of the picture wanted."""

    __slots__ = ("lines", "channels", "shape")
    dtype = np.dtype(np.uint8)

    def __init__(self, lines: bytes, H: int, W: int, channels: int) -> None:
        self.lines, self.channels, self.shape = lines, channels, (H, W, channels)


def scanlines(data: bytes, most: int) -> Scanlines | None:
    """Return the scanlines of a PNG of up to ``most`` pixels; None where it is not plain, or damaged."""
    if not data.startswith(_BEGIN) or len(data) < _HEAD_END:
        return None
    W, H, depth, colour, *methods, crc = _HEAD.unpack_from(data, len(_BEGIN))
    C = _COLOURS.get(colour, 0)
    if depth != 8 or not C or any(methods) or not 0 < W * H <= most or crc != zlib.crc32(data[12:_HEAD_END - 4]):
        return None
    packed = _packed(data)
    # All rows at once: row by row, as libpng and Pillow do, zlib takes about twice as long for short rows.
    inflate, n = _zlib().decompressobj(), H * (1 + W * C)
    try:
        lines = inflate.decompress(packed, n + 1)  # the byte more: else the checksum would not be read
    except _zlib().error:
        return None
    whole = len(lines) == n and inflate.eof and max(lines[::1 + W * C]) <= _LAST_FILTER
    return Scanlines(lines, H, W, C) if whole else None


@lru_cache(maxsize=1)
def _zlib() -> Any:
    """Return the module that unpacks: isal's takes half the time of zlib."""
    try:
        return importlib.import_module("isal.isal_zlib")
    except ImportError:
        return zlib


def _packed(data: bytes) -> bytes:
    """Return the content of the IDAT chunks, whose checksum zlib verifies; b"" for a file that is not plain."""
    parts, at, stop = list[bytes](), _HEAD_END, len(data) - 12
    while at <= stop:
        n, kind = _CHUNK.unpack_from(data, at)
        begin, at = at + 8, at + 12 + n
        if kind == b"IEND":
            return b"".join(parts)
        if kind == b"IDAT":
            parts.append(data[begin:begin + n])
        elif parts or _IGNORED.get(kind) != n or zlib.crc32(data[begin - 4:begin + n]) != _CRC.unpack_from(
                data, begin + n)[0]:
            break
    return b""


def image_of(pngs: Sequence[Scanlines]) -> Any:
    """Return a Pillow image of PNGs of one size and number of channels, stacked with a row of zeros between them.

    The filters of a picture's first line take the line above for zeros, which that row is.
    """
    from PIL import Image

    H, W, _ = pngs[0].shape
    C = pngs[0].channels
    lines = bytes(1 + W * C).join([png.lines for png in pngs])
    return Image.frombytes(_MODES[C], (W, len(pngs) * (H + 1) - 1), _stored(lines), "zip", _MODES[C])


def _stored(lines: bytes) -> bytes:
    """Return zlib's format without compression, and without a checksum: Pillow's decoder reads up to the last line."""
    parts = [b"\x78\x01"]
    for at in range(0, len(lines), _BLOCK):
        n = min(_BLOCK, len(lines) - at)
        parts += [_STORED.pack(at + n == len(lines), n, _BLOCK - n), lines[at:at + n]]
    return b"".join(parts)


def pixels_of(pngs: Sequence[Scanlines]) -> np.ndarray:
    """Return uint8 (n, H, W, C) of PNGs of one size and ``channels`` C."""
    H, W, _ = pngs[0].shape
    n, C = len(pngs), pngs[0].channels
    found = np.frombuffer(image_of(pngs).tobytes(), np.uint8).reshape(-1, W, C)
    return np.lib.stride_tricks.as_strided(found, (n, H, W, C), (found.strides[0] * (H + 1), *found.strides))
