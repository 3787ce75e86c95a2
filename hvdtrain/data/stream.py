"""Data that can only be read in order: the `Stream` contract, its shuffle buffer, global batches, their checksums.

`hvdtrain.data.feed` cuts batches over ranks; the backends' ``data.py`` make streams of framework objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.core.errors import UserError

Arrays = tuple[np.ndarray, ...]

HASHED_BYTES, HASHED_ELEMENTS = 1 << 20, 1 << 16
"""Bytes of an array that `fingerprint` reads in full (0.2 ms), and elements of a larger one (1 ms)."""


@runtime_checkable
class Stream(Protocol):
    """Samples in an order of their own, which may depend on ``epoch`` and fixed seeds, never on the rank.

    Optional: ``chunks_from(epoch, samples)``, or ``state_dict()``, the place after the latest chunk, with
    ``load_state_dict(state)``, after which the next ``chunks(epoch)`` begins there.
    """

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        """Yield tuples of arrays (B, ...) of one B each; arity, trailing shapes and dtypes stay the same."""


def rebatch(chunks: Iterable[Arrays], global_batch: int, skip_samples: int = 0) -> Iterator[Arrays]:
    """Regroup ``chunks`` into global batches after a skip; `UserError` for chunks that do not fit one another."""
    yield from map(joined, pieces(chunks, global_batch, skip_samples))


def pieces(chunks: Iterable[Arrays], global_batch: int,
           skip_samples: int = 0) -> Generator[list[Arrays], None, None]:
    """Yield the pieces of ``chunks`` of which each global batch consists, without copies. Errors: as of `rebatch`."""
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
                yield held
                held, held_n = [], 0
    if held:
        yield held


class ShuffledStream:
    """A stream whose samples pass a buffer of ``n``: each new one takes the place of one drawn at random, which leaves.

    The order depends on (``seed``, epoch) and the stream's order only, not on its chunks. A sample leaves after ``n``
    others on average, and never more than ``n`` before its turn.
    """

    def __init__(self, stream: Stream, n: int, seed: int) -> None:
        self.wraps, self._n, self._seed = stream, n, seed

    def __getattr__(self, name: str) -> Any:
        if name in ("wraps", "chunks_from", "state_dict", "load_state_dict"):
            # Not while it is unpickled; a buffer has no place to begin at, and no state of its stream has its rows.
            raise AttributeError(name)
        return getattr(self.wraps, name)

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        draw = np.random.Generator(np.random.Philox(key=np.array([self._seed % 2**64, epoch], np.uint64)))
        held: Arrays = ()
        n, layout = 0, list[tuple]()
        for chunk in self.wraps.chunks(epoch):
            k = _checked(chunk, layout)
            held = held or tuple(np.empty((self._n, *array.shape[1:]), array.dtype) for array in chunk)
            kept = min(k, self._n - n)
            for buffer, array in zip(held, chunk):
                buffer[n:n + kept] = array[:kept]
            n += kept
            if k > kept:
                yield _exchanged(held, tuple(array[kept:] for array in chunk), draw)
        if n:
            order_n = np.argsort(draw.random(n), kind="stable")
            yield tuple(buffer[order_n] for buffer in held)


def _exchanged(held: Arrays, rows: Arrays, draw: np.random.Generator) -> Arrays:
    """Put each of ``rows`` to a random place of the full buffer ``held``; return what was there."""
    left = tuple(np.empty_like(array) for array in rows)
    for i, at in enumerate((draw.random(len(rows[0])) * len(held[0])).astype(np.int64).tolist()):
        for buffer, array, out in zip(held, rows, left):
            out[i] = buffer[at]
            buffer[at] = array[i]
    return left


def fingerprint(batch: Arrays) -> int:
    """Return a 16-bit checksum of ``batch``; of large arrays of evenly spaced elements (`HASHED_ELEMENTS`)."""
    crc = 0
    for array in batch:
        every = _stride(array)
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat  # a view is read ten times as fast
        crc = zlib.crc32(np.ascontiguousarray(array if every == 1 else flat[::every]).tobytes(), crc)
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


def joined(parts: list[Arrays]) -> Arrays:
    """Return the rows of ``parts`` one after the other."""
    return parts[0] if len(parts) == 1 else tuple(np.concatenate(column) for column in zip(*parts))


def between(parts: list[Arrays], low: int, high: int) -> list[Arrays]:
    """Return the pieces of rows [low, high) of ``parts``; one without rows where there are none."""
    found, at = [], 0
    for part in parts:
        n = len(part[0])
        first, last = max(0, low - at), min(n, high - at)
        if first < last:
            found.append(part if last - first == n else tuple(array[first:last] for array in part))
        at += n
    return found or [tuple(array[:0] for array in parts[0])]


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
