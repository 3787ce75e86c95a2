"""Compute CRC-32C (Castagnoli) of bytes with numpy, where the standard library has CRC-32 with another polynomial only.

A CRC is the remainder of a polynomial: bytes are first folded by a sparse multiple of the CRC's polynomial, which takes
XORs of long arrays alone. The few thousand that remain are looked up in tables by position.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reversed
_FOLD = (5685, 1362, 426)
"""(a, b, c) with x^8a = x^8b + x^8c + 1 modulo the polynomial, and so for 2a, 2b, 2c: squares of sums are sums of
squares. Found by search; of those with a below 6000 the one with the largest a - b, the bytes that a fold removes."""
_BLOCK = 256  # bytes that are looked up by position
_SHORT = 48  # bytes up to which a loop is faster
_TOGETHER = 1 << 19  # bytes that are folded together: they fit into a cache of the processor
_CHUNK = 128  # blocks that are looked up together, for the same reason
_MASK = 0xA282EAD8
_CHECK = 0xE3069283  # of the text 123456789


def masked(data: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated, plus a constant (TensorFlow, lib/hash/crc32c.h)."""
    return _masked(crc32c(data))


def masked_each(data_n: Sequence[bytes]) -> list[int]:
    """Return `masked` of each of ``data_n``; of several at once it takes a third of the time."""
    crcs = [0] * len(data_n)
    for group in [[i] for i in range(len(data_n))] if _native() is not None else _groups(data_n):
        if len(group) == 1 or len(data_n[group[0]]) <= _SHORT:
            found = [crc32c(data_n[i]) for i in group]
        else:
            found = _crcs([data_n[i] for i in group])
        for i, crc in zip(group, found):
            crcs[i] = _masked(crc)
    return crcs


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of ``data``.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    native = _native()
    if native is not None:
        return native(data)
    if len(data) > _SHORT:
        return _crcs([data])[0]
    state, table = 0xFFFFFFFF, _byte_list()
    for byte in data:
        state = table[(state ^ byte) & 255] ^ state >> 8
    return state ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _groups(data_n: Sequence[bytes]) -> Iterator[list[int]]:
    """Yield indices of ``data_n`` of similar length: shorter ones are padded."""
    group: list[int] = []
    for i in sorted(range(len(data_n)), key=lambda i: len(data_n[i])):
        if group and (len(data_n[i]) > 1.5 * len(data_n[group[0]]) or len(data_n[i]) * len(group) > _TOGETHER):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _crcs(data_n: Sequence[bytes]) -> list[int]:
    """Return the CRC-32C of each of ``data_n``, which have 4 bytes at least."""
    # Zeros before the first byte do not change a state of 0; the initial state of ones is that of inverted first bytes.
    rows = np.zeros((len(data_n), _BLOCK + max(map(len, data_n))), np.uint8)
    for row, data in zip(rows, data_n):
        row[-len(data):] = np.frombuffer(data, np.uint8)
        row[-len(data):][:4] ^= 255
    left = _folded(rows[:, _BLOCK:]).shape[1]
    at = rows.shape[1] - left
    lead = -left % _BLOCK
    rows[:, at - lead:at] = 0
    blocks = rows[:, at - lead:].reshape(-1, _BLOCK)
    states = np.concatenate([_looked_up(blocks[i:i + _CHUNK], _tables(0)) for i in range(0, len(blocks), _CHUNK)])
    if len(states) > len(rows):
        octets = states.astype("<u4").view(np.uint8).reshape(len(rows), -1)
        states = _looked_up(octets, _tables(1)[-octets.shape[1]:])
    return (states ^ np.uint32(0xFFFFFFFF)).tolist()


def _folded(rows: np.ndarray) -> np.ndarray:
    """Return the last bytes of each of ``rows``, to which the others are added so that its CRC stays the same."""
    while (left := rows.shape[1]) > _FOLD[0]:
        scale = 1 << ((left - 1) // _FOLD[0]).bit_length() - 1
        a, b, c = (scale * each for each in _FOLD)
        n = min(a - b, left - a)
        for shift in (a - b, a - c, a):
            part = rows[:, shift:shift + n]
            np.bitwise_xor(part, rows[:, :n], out=part)
        rows = rows[:, n:]
    return rows


@lru_cache(maxsize=None)
def _native() -> Callable[[bytes], int] | None:
    """Return the function of a package with instructions of the processor for it, where one is installed and right."""
    for package, name in (("google_crc32c", "value"), ("crc32c", "crc32c")):
        with contextlib.suppress(ImportError, AttributeError):
            function: Callable[[bytes], int] = getattr(importlib.import_module(package), name)
            if function(b"123456789") == _CHECK:
                return function
    return None


def _looked_up(blocks: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the state uint32[n] after each block uint8 (n, k), from 0; ``table`` uint32 (k, 256)."""
    places = blocks + np.arange(0, 256 * len(table), 256, dtype=np.intp)
    return np.bitwise_xor.reduce(table.reshape(-1).take(places), axis=1)


@lru_cache(maxsize=None)
def _bytes() -> np.ndarray:
    """Return uint32[256]: the state after a byte, from 0."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


@lru_cache(maxsize=None)
def _byte_list() -> list[int]:
    return [int(each) for each in _bytes()]


def _shifted(states: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return states after zero bytes; ``shift`` uint32 (4, 256): of each byte of a state."""
    return (shift[0][states & 255] ^ shift[1][states >> 8 & 255] ^ shift[2][states >> 16 & 255]
            ^ shift[3][states >> 24])


@lru_cache(maxsize=None)
def _shift(log2_bytes: int) -> np.ndarray:
    """Return the table of `_shifted` for 2^``log2_bytes`` zero bytes."""
    states = np.arange(256, dtype=np.uint32)[None] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if log2_bytes == 0:
        return _bytes()[states & 255] ^ states >> 8
    half = _shift(log2_bytes - 1)
    return _shifted(_shifted(states, half), half)


@lru_cache(maxsize=None)
def _tables(level: int) -> np.ndarray:
    """Return uint32 (k, 256): the state at a block's end of each byte in it (0), or of each byte of blocks' states (1).
    """
    if level == 0:
        rows = [_bytes()]
        while len(rows) < _BLOCK:
            rows.append(_shifted(rows[-1], _shift(0)))
        return np.stack(rows[::-1])
    group = np.arange(256, dtype=np.uint32)[None] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    groups = [group]
    while len(groups) * _BLOCK < _FOLD[0]:
        groups.append(_shifted(groups[-1], _shift(_BLOCK.bit_length() - 1)))
    return np.concatenate(groups[::-1])
