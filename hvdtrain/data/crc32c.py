"""Compute CRC-32C (Castagnoli) of bytes with numpy, where the standard library has CRC-32 with another polynomial only.

A CRC is linear: bytes in blocks of 64 are looked up in tables by position, and the blocks' results combined in the same
way, 16 at a time.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reversed
_BLOCK = 64  # bytes that are looked up by position
_SHORT = 48  # bytes up to which a loop is faster
_CHUNK = 1 << 10  # blocks that are looked up at a time: what they need fits into a cache of the processor
_MASK = 0xA282EAD8
_CHECK = 0xE3069283  # of the text 123456789


def masked(data: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated, plus a constant (TensorFlow, lib/hash/crc32c.h)."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of ``data``.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    native = _native()
    if native is not None:
        return native(data)
    if len(data) <= _SHORT:
        state, table = 0xFFFFFFFF, _byte_list()
        for byte in data:
            state = table[(state ^ byte) & 255] ^ state >> 8
        return state ^ 0xFFFFFFFF
    # Zeros before the first byte do not change a state of 0; the initial state of ones is that of inverted first bytes.
    lead = -len(data) % _BLOCK
    padded = np.zeros(lead + len(data), np.uint8)
    padded[lead:] = np.frombuffer(data, np.uint8)
    padded[lead:lead + 4] ^= 255
    level = 0
    states = _looked_up(padded.reshape(-1, _BLOCK), 0)
    while len(states) > 1:
        level += 1
        states = np.concatenate([np.zeros(-len(states) % (_BLOCK // 4), np.uint32), states])
        states = _looked_up(states.astype("<u4").view(np.uint8).reshape(-1, _BLOCK), level)
    return int(states[0]) ^ 0xFFFFFFFF


@lru_cache(maxsize=None)
def _native() -> Callable[[bytes], int] | None:
    """Return the function of a package with instructions of the processor for it, where one is installed and right."""
    for package, name in (("google_crc32c", "value"), ("crc32c", "crc32c")):
        with contextlib.suppress(ImportError, AttributeError):
            function: Callable[[bytes], int] = getattr(importlib.import_module(package), name)
            if function(b"123456789") == _CHECK:
                return function
    return None


def _looked_up(blocks: np.ndarray, level: int) -> np.ndarray:
    """Return the state uint32[n] after each block uint8 (n, 64), from 0."""
    table = _tables(level).reshape(-1)
    base = np.arange(_BLOCK, dtype=np.intp) * 256
    found = [np.bitwise_xor.reduce(table.take(blocks[at:at + _CHUNK] + base), axis=1)
             for at in range(0, len(blocks), _CHUNK)]
    return found[0] if len(found) == 1 else np.concatenate(found)


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
    """Return uint32 (64, 256): the state at a block's end of each byte in it; of ``level`` above 0, of 16 states.

    The states of level L belong to blocks of 64 * 16^(L - 1) bytes.
    """
    if level == 0:
        rows = [_bytes()]
        while len(rows) < _BLOCK:
            rows.append(_shifted(rows[-1], _shift(0)))
        return np.stack(rows[::-1])
    group = np.arange(256, dtype=np.uint32)[None] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    groups = [group]
    while len(groups) < _BLOCK // 4:
        groups.append(_shifted(groups[-1], _shift(6 + 4 * (level - 1))))
    return np.concatenate(groups[::-1])
