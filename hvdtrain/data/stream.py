"""Data that can only be read in order: the `Stream` contract, regrouping into global batches, checksums of batches.

`hvdtrain.data.feed` cuts batches over ranks; the backends' ``data.py`` make streams of framework objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.core.errors import UserError

Arrays = tuple[np.ndarray, ...]

HASHED_BYTES, HASHED_ELEMENTS = 1 << 20, 1 << 16
"""Bytes of an array that `fingerprint` reads in full (0.2 ms), and elements of a larger one (1 ms)."""


@runtime_checkable
class Stream(Protocol):
    """Samples in an order of their own, which may depend on ``epoch`` and fixed seeds, never on the rank."""

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        """Yield tuples of arrays (B, ...) of one B each; arity, trailing shapes and dtypes stay the same."""


def rebatch(chunks: Iterable[Arrays], global_batch: int, skip_samples: int = 0) -> Iterator[Arrays]:
    """Regroup ``chunks`` into global batches after a skip; `UserError` for chunks that do not fit one another."""
    held: list[Arrays] = []
    held_n = 0
    layout: list[tuple] = []
    for chunk in chunks:
        n = _checked(chunk, layout)
        skipped = min(skip_samples, n)
        skip_samples -= skipped
        while n - skipped > 0:
            taken = min(global_batch - held_n, n - skipped)
            held.append(tuple(array[skipped:skipped + taken] for array in chunk))
            held_n, skipped = held_n + taken, skipped + taken
            if held_n == global_batch:
                yield _joined(held)
                held, held_n = [], 0
    if held:
        yield _joined(held)


def fingerprint(batch: Arrays) -> int:
    """Return a 16-bit checksum of ``batch``; of large arrays of evenly spaced elements (`HASHED_ELEMENTS`)."""
    crc = 0
    for array in batch:
        every = _stride(array)
        crc = zlib.crc32(np.ascontiguousarray(array if every == 1 else array.flat[::every]).tobytes(), crc)
    return crc & 0xFFFF


def rows_hashed(array: np.ndarray) -> int:
    """Return the number of rows of ``array`` that `fingerprint` reads."""
    return min(len(array), -(-array.size // _stride(array)))


def on_disk(array: Any) -> bool:
    """Return whether reading ``array`` reads a file."""
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False


def _stride(array: np.ndarray) -> int:
    return 1 if array.nbytes <= HASHED_BYTES else array.size // HASHED_ELEMENTS | 1  # odd: no fixed columns


def _joined(pieces: list[Arrays]) -> Arrays:
    return pieces[0] if len(pieces) == 1 else tuple(np.concatenate(column) for column in zip(*pieces))


def _checked(chunk: Arrays, layout: list[tuple]) -> int:
    """Return a chunk's sample count; the first chunk sets ``layout``, which the others must keep."""
    fits = isinstance(chunk, tuple) and all(isinstance(array, np.ndarray) and array.ndim for array in chunk)
    if not fits or not chunk:
        raise UserError(f"a stream gave a {type(chunk).__name__} as a chunk",
                        "a tuple of numpy arrays whose first axis counts samples", "fix the stream's chunks()")
    if len({len(array) for array in chunk}) > 1:
        raise UserError(f"a stream's chunk holds arrays of {[len(array) for array in chunk]} samples",
                        "one number of samples in all of them", "fix the stream's chunks()")
    found = [(array.shape[1:], str(array.dtype)) for array in chunk]
    if not layout:
        layout.extend(found)
    elif found != layout:
        raise UserError(f"a stream's chunk has sample shapes and dtypes {found}",
                        f"those of its first chunk, {layout}",
                        "pad, crop or cast the samples to one shape and dtype")
    return len(chunk[0])
