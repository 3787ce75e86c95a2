"""``tfrecord``: TFRecord files of tf.Example, read without TensorFlow through an index of offsets.

The format: length (uint64), its masked CRC-32C, data, its masked CRC-32C. A tf.Example is a protocol buffer: a map from
names to lists of bytes, floats or whole numbers (TensorFlow, core/example/{example,feature}.proto).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.cells import Damage
from hvdtrain.data.crc32c import masked
from hvdtrain.data.formats import ShardFormat, read_at, refuse_packed, source_of
from hvdtrain.data.index import Index
from hvdtrain.data.sources import Source

_HEAD, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_SHORT = 32  # bytes of whole numbers up to which a loop is faster


def make(split: str, **args: Any) -> Source | None:
    """Return the samples of TFRecord files; x and y are features of tf.Example; `hvdtrain.data.formats.FileOptions`."""
    return source_of(TfrecordFormat(), split, args)


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
            return list(_features(_data(file, index.places_nk[0])))

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

    def values(self, file: Any, place_k: np.ndarray, names: tuple[str, ...]) -> Sequence[Any]:
        found = _features(_data(file, place_k), names)
        return [found.get(name) for name in names]


def _data(file: Any, place_k: np.ndarray) -> bytes:
    at, length = place_k.tolist()
    found = read_at(file, at + _HEAD.size, length + _CRC.size)
    data = found[:length]
    if masked(data) != _CRC.unpack(found[length:])[0]:
        raise Damage("its checksum is wrong")
    return data


def _features(data: bytes, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the features of a tf.Example by name: bytes, or an array, of one value a number. ``names``: only these."""
    try:
        found = {}
        for number, features in _fields(memoryview(data)):
            for _, entry in _fields(features) if number == 1 else ():
                pair = dict(_fields(entry))
                name = bytes(pair[1]).decode()
                if not names or name in names:
                    found[name] = _feature(pair.get(2, memoryview(b"")))
        return found
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise Damage(f"it is no tf.Example: {error or type(error).__name__}") from None


def _feature(data: memoryview) -> Any:
    for number, values in _fields(data):
        if number == 1:
            texts = [bytes(value) for _, value in _fields(values)]
            return texts[0] if len(texts) == 1 else texts or None
        found = [_numbers(value, number) for _, value in _fields(values)]
        array = np.concatenate(found) if found else np.zeros(0, np.int64)
        return (array[0] if len(array) == 1 else array) if len(array) else None
    return None


def _numbers(value: Any, number: int) -> np.ndarray:
    """Return a packed list, or one value that is not packed, of floats (``number`` 2) or whole numbers (3)."""
    if number == 2:
        return np.frombuffer(value, "<f4").astype(np.float32)
    if isinstance(value, int):
        return np.array([value], np.uint64).view(np.int64)
    if len(value) <= _SHORT:
        found, at = list[int](), 0
        while at < len(value):
            number, at = _varint(value, at)
            found.append(number)
        return np.array(found, np.uint64).view(np.int64)
    octets = np.frombuffer(value, np.uint8)
    last = np.flatnonzero(octets < 128)
    if not len(last) or last[-1] != len(octets) - 1:
        raise ValueError("a whole number is cut off")
    starts = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(len(octets)) - np.repeat(starts, last - starts + 1)
    words = (octets & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(words, starts).view(np.int64)


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a protocol buffer: an int, or the bytes of a length-delimited or fixed-width field."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            length, at = _varint(data, at)
        elif not length:
            raise ValueError(f"a field of wire type {kind}")
        if at + length > len(data):
            raise ValueError("a field is cut off")
        yield tag >> 3, data[at:at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a variable-length number and the position after it."""
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
