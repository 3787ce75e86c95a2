"""``tfrecord``: TFRecord files of tf.Example, read without TensorFlow through an index of offsets.

The format: length (uint64), its masked CRC-32C, data, its masked CRC-32C. A tf.Example is a protocol buffer: a map from
names to lists of bytes, floats or whole numbers (TensorFlow, core/example/{example,feature}.proto).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from hvdtrain.core.resolve import not_installed
from hvdtrain.data.cells import Damage
from hvdtrain.data.formats import ShardFormat, read_at, source_of
from hvdtrain.data.index import Index, refuse_packed
from hvdtrain.data.sources import Source

_HEAD, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_KINDS = (1, 2, 3)  # fields of a tf.Feature: lists of bytes, of floats, of whole numbers
_SHORT = 32  # bytes of whole numbers up to which a loop is faster


def make(split: str, **args: Any) -> Source | None:
    """Return the samples of TFRecord files; x and y are features of tf.Example; `hvdtrain.data.formats.FileOptions`."""
    _crc32c()
    return source_of(TfrecordFormat(), split, args)


@lru_cache(maxsize=1)
def _crc32c() -> ModuleType:
    try:
        import google_crc32c
    except ModuleNotFoundError:
        raise not_installed("data.name tfrecord", "google-crc32c", "tfrecord") from None
    return google_crc32c


def masked(data: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated, plus a constant (TensorFlow, lib/hash/crc32c.h)."""
    crc: int = _crc32c().value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TfrecordFormat(ShardFormat):
    """Records of tf.Example. A place: the byte where the record begins, the length of its data."""

    kind, endings = "tfrecord", "TFRecord files, such as 'DIR/*.tfrecord'"

    def names(self, path: str) -> list[str]:
        refuse_packed(path)
        index = self.scan(path, (), Path(), 1)
        if not len(index.places_nk):
            return []
        if index.damaged:
            raise Damage(next(iter(index.damaged.values())))
        with self.open(path, Path()) as file:
            return list(_features(self.read(file, index.places_nk[0].tolist())))

    def scan(self, path: str, names: tuple[str, ...], target: Path, most: int = 0) -> Index:
        """Return the places of all records, or of the first ``most``."""
        refuse_packed(path)
        places, at, size = list[tuple[int, int]](), 0, os.path.getsize(path)
        with self.open(path, target) as file:
            while at < size and not 0 < most <= len(places):
                head = os.pread(file.fileno(), _HEAD.size, at)
                whole = len(head) == _HEAD.size
                length, crc = _HEAD.unpack(head) if whole else (0, 0)
                if whole and masked(head[:8]) != crc:
                    why = (f"the checksum of its length is wrong: the {size - at} bytes from here on cannot be read, "
                           "or the file is no TFRecord")
                elif not whole or at + _HEAD.size + length + _CRC.size > size:
                    why = "the file is truncated here"
                else:
                    places.append((at, length))
                    at += _HEAD.size + length + _CRC.size
                    continue
                return Index(np.array([*places, (at, -1)], np.int64), {at: why})
        return Index(np.array(places, np.int64).reshape(-1, 2))

    def read(self, file: Any, place_k: Sequence[int]) -> bytes:
        found = read_at(file, place_k[0] + _HEAD.size, place_k[1] + _CRC.size)
        data = found[:-_CRC.size]
        if masked(data) != _CRC.unpack(found[-_CRC.size:])[0]:
            raise Damage("its checksum is wrong")
        return data

    def values(self, found: bytes, names: tuple[str, ...]) -> Sequence[Any]:
        features = _features(found, names)
        return [features.get(name) for name in names]


def _features(data: bytes, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the features of a tf.Example by name: bytes, or an array, of one value a number. ``names``: only these.

    As protocol buffers have it, unknown fields are skipped and an entry without a name has the name "".
    """
    try:
        found = {}
        for number, start, stop in _fields(data, 0, len(data)):
            for field, entry, end in _fields(data, start, stop) if number == 1 else ():
                if field != 1:
                    continue
                pair = {key: (at, last) for key, at, last in _fields(data, entry, end)}
                name = _text(data, *pair.get(1, (0, 0))).decode()
                if not names or name in names:
                    found[name] = _feature(data, *pair.get(2, (0, 0)))
        return found
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise Damage(f"it is no tf.Example: {error or type(error).__name__}") from None


def _feature(data: bytes, start: int, stop: int) -> Any:
    value: Any = None
    for number, at, end in _fields(data, start, stop):
        if number not in _KINDS:
            continue
        values = [(low, high) for field, low, high in _fields(data, at, end) if field == 1]
        if number == 1:
            texts = [_text(data, low, high) for low, high in values]
            value = texts[0] if len(texts) == 1 else texts or None
            continue
        found = [_numbers(data, low, high, number) for low, high in values]
        array = found[0] if len(found) == 1 else np.concatenate(found) if found else np.zeros(0, np.int64)
        value = (array[0] if len(array) == 1 else array) if len(array) else None
    return value  # the last, where a writer has given several of a oneof


T = TypeVar("T", bytes, memoryview)


def _text(data: T, start: int, stop: int) -> T:
    if stop < 0:
        raise ValueError("a whole number in place of bytes")
    return data[start:stop]


def _numbers(data: bytes, start: int, stop: int, number: int) -> np.ndarray:
    """Return a packed list, or one value that is not packed, of floats (``number`` 2) or whole numbers (3)."""
    if number == 2:
        return np.frombuffer(_text(memoryview(data), start, stop), "<f4").astype(np.float32)
    if stop < 0:
        return np.array([start], np.uint64).view(np.int64)
    if stop - start <= _SHORT:
        found, at = list[int](), start
        while at < stop:
            value, at = _varint(data, at)
            found.append(value)
        if at > stop:
            raise ValueError("a whole number is cut off")
        return np.array(found, np.uint64).view(np.int64)
    octets = np.frombuffer(data, np.uint8, stop - start, start)
    last = np.flatnonzero(octets < 128)
    if not len(last) or last[-1] != len(octets) - 1:
        raise ValueError("a whole number is cut off")
    starts = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(len(octets)) - np.repeat(starts, last - starts + 1)
    words = (octets & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(words, starts).view(np.int64)


def _fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """Return (number, first byte, end) of each field of the protocol buffer ``data[at:end]``; (number, value, -1) of an
    int. Offsets and no views: each of them would be one more object to make.
    """
    if end < 0:
        raise ValueError("a whole number in place of a message")
    found = []
    while at < end:
        tag, at = data[at], at + 1
        if tag > 127:  # most numbers have one byte, and a call takes longer than the rest of this loop
            tag, at = _varint(data, at - 1)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            if at > end:
                raise ValueError("a field is cut off")
            found.append((tag >> 3, value, -1))
            continue
        if kind == 2:
            length, at = data[at], at + 1
            if length > 127:
                length, at = _varint(data, at - 1)
        elif not (length := {1: 8, 5: 4}.get(kind, 0)):
            raise ValueError(f"a field of wire type {kind}")
        if at + length > end:
            raise ValueError("a field is cut off")
        found.append((tag >> 3, at, at + length))
        at += length
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a variable-length number and the position after it."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    found, shift = byte & 127, 7
    while True:
        at += 1
        byte = data[at]
        found |= (byte & 127) << shift
        if byte < 128:
            return found & 0xFFFFFFFFFFFFFFFF, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
