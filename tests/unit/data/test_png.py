"""Plain PNGs: decoded together they have Pillow's pixels, and whatever is not plain or damaged is left to Pillow."""

import importlib
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from hvdtrain.data import png as png_module
from hvdtrain.data.pictures import decode, parsed, stacked
from hvdtrain.data.png import Scanlines, scanlines
from hvdtrain.data.sources import Unreadable

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
MOST = 1 << 20


def chunk(kind, data, crc=0):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ crc)


def png(pixels, *more, filters=None, after=(), idats=1, head=(8, 0, 0, 0), level=6):
    """Return a PNG of uint8 (H, W, C), whose lines have random ``filters`` where given, with chunks ``more``."""
    H, W, C = pixels.shape
    lines, above = [], np.zeros((W + 1) * C, np.int64)
    for y, row in enumerate(pixels.reshape(H, W * C)):
        x = np.concatenate([np.zeros(C, np.int64), row])
        left, up, corner = x[:-C], above[C:], above[:-C]
        p = left + up - corner
        near = np.where((abs(p - left) <= abs(p - up)) & (abs(p - left) <= abs(p - corner)), left,
                        np.where(abs(p - up) <= abs(p - corner), up, corner))
        kind = 0 if filters is None else filters[y % len(filters)]
        predicted = [0 * up, left, up, (left + up) // 2, near][kind]
        lines.append(bytes([kind]) + ((x[C:] - predicted) % 256).astype(np.uint8).tobytes())
        above = x
    packed = zlib.compress(b"".join(lines), level)
    ends = [len(packed) * i // idats for i in range(idats + 1)]
    depth, *methods = head
    return b"".join([b"\x89PNG\r\n\x1a\n",
                     chunk(b"IHDR", struct.pack(">IIBB3B", W, H, depth, 2 if C == 3 else 0, *methods)), *more,
                     *(chunk(b"IDAT", packed[low:high]) for low, high in zip(ends, ends[1:])), *after,
                     chunk(b"IEND", b"")])


def by_pillow(data, channels, size=None):
    return decode(io.BytesIO(data), 0, size, channels)


@given(some.integers(1, 5), some.integers(1, 300), some.integers(1, 60), some.sampled_from([1, 3]),
       some.lists(some.integers(0, 4), min_size=1, max_size=9), some.integers(1, 4), some.integers(0, 2**32))
def test_pixels_are_pillows(n, W, H, channels, filters, idats, seed):
    rng = np.random.default_rng(seed)
    stored = [int(each) for each in rng.choice([1, channels], n)]
    pixels = [rng.integers(0, 256, (H, W, C), dtype=np.uint8) // int(rng.integers(1, 60)) for C in stored]
    files = [png(each, chunk(b"gAMA", struct.pack(">I", 22000)), filters=filters, idats=idats) for each in pixels]
    found = [parsed(io.BytesIO(data), 0, None, channels) for data in files]
    assert all(isinstance(each, Scanlines) and each.shape == (H, W, channels) for each in found)
    together = stacked(found, channels)
    assert np.array_equal(together, np.stack([by_pillow(data, channels) for data in files]))
    assert all(np.array_equal(one, np.broadcast_to(each, one.shape)) for one, each in zip(together, pixels))


def test_resized_and_grey_pictures_are_pillows():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 31, 3), dtype=np.uint8)
    for data in (png(pixels, filters=[4, 2]), png(pixels[..., :1], filters=[3, 1])):
        for size, channels in (((9, 12), 3), ((9, 12), 1), (None, 1), (None, 3), ((40, 31), 3)):
            found = stacked([parsed(io.BytesIO(data), 0, size, channels)], channels)[0]
            assert np.array_equal(found, by_pillow(data, channels, size)), (size, channels)


def test_more_than_is_decoded_at_once_beside_others():
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (5, 130, 120, 3), dtype=np.uint8)
    files = [png(each, filters=[0, 1, 2, 3, 4]) for each in pixels]
    out = io.BytesIO()
    Image.fromarray(pixels[2]).convert("RGBA").save(out, "png")
    files[2] = out.getvalue()
    found = [parsed(io.BytesIO(data), 0, None, 3) for data in files]
    assert [isinstance(each, Scanlines) for each in found] == [True, True, False, True, True]
    assert np.array_equal(stacked(found, 3), pixels)


def test_what_is_not_plain_is_left_to_pillow():
    pixels = np.full((3, 4, 3), 7, np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    text = chunk(b"tEXt", b"Raw profile type exif\0\nexif\n8\n00")
    others = {"eXIf": png(pixels, turned), "eXIf behind": png(pixels, after=[turned]), "text": png(pixels, text),
              "tRNS": png(pixels, chunk(b"tRNS", bytes(6))), "16 bits": png(pixels, head=(16, 0, 0, 0)),
              "interlaced": png(pixels, head=(8, 0, 0, 1)), "damaged gAMA": png(pixels, chunk(b"gAMA", bytes(4), 1)),
              "short gAMA": png(pixels, chunk(b"gAMA", bytes(3))), "no filter": png(pixels)[:-12],
              "cut": png(pixels)[:-20], "empty": b"", "signature": png(pixels)[:16],
              "filter 5": png(pixels).replace(b"IDAT", b"IDAU"), "large": png(np.zeros((1025, 1024, 1), np.uint8))}
    assert scanlines(png(pixels), MOST) is not None
    assert [name for name, data in others.items() if scanlines(data, MOST) is not None] == []
    assert parsed(io.BytesIO(others["eXIf behind"]), 0, None, 3).shape == (4, 3, 3)
    assert scanlines(png(np.zeros((1025, 1024, 1), np.uint8)), MOST + 1024) is not None


def test_filters_and_lengths_that_do_not_exist():
    head = png(np.zeros((2, 2, 1), np.uint8))[:33]
    for lines, plain in ((bytes(6), True), (b"\0\0\0\5\0\0", False), (bytes(5), False), (bytes(7), False),
                         (bytes(1 << 22), False)):
        data = head + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
        assert (scanlines(data, MOST) is not None) == plain, len(lines)


@pytest.mark.parametrize("package", ["isal", "zlib"])
def test_each_damaged_byte_is_found_or_changes_nothing(package, monkeypatch):
    if package == "isal":
        pytest.importorskip("isal", reason="isal is not installed")
    module = importlib.import_module("isal.isal_zlib" if package == "isal" else "zlib")
    monkeypatch.setattr(png_module, "_zlib", lambda: module)
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    whole = png(pixels, filters=[1, 4, 2])
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= int(rng.integers(1, 256))
        png_found = scanlines(bytes(damaged), MOST)
        if png_found is not None:  # in a checksum of packed data, which has one of its own, or at the end
            assert np.array_equal(stacked([png_found], 3)[0], pixels), at
        assert scanlines(whole[:at], MOST) is None, at
        try:
            found = parsed(io.BytesIO(bytes(damaged)), 0, None, 3)
        except Unreadable:
            with pytest.raises(Unreadable):
                by_pillow(bytes(damaged), 3)
            continue
        assert np.array_equal(stacked([found], 3)[0], by_pillow(bytes(damaged), 3)), at
