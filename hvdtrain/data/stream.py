"""Data that can only be read in order: the `Stream` contract, its shuffle buffer, global batches, their checksums.

`hvdtrain.data.feed` cuts batches over ranks; the backends' ``data.py`` make streams of framework objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdtrain.core.errors import UserError

Arrays = tuple[np.ndarray, ...]

_NONE = np.empty(0, np.int64)

HASHED_BYTES, HASHED_ELEMENTS = 1 << 20, 1 << 16
"""Bytes of an array that `fingerprint` reads in full (0.2 ms), and elements of a larger one (1 ms)."""


@runtime_checkable
class Stream(Protocol):
    """Samples in an order of their own, which may depend on ``epoch`` and fixed seeds, never on the rank.

    Optional: ``chunks_from(epoch, samples)``, or ``state_dict()``, the place after the latest chunk, with
    ``load_state_dict(state)``, after which the next ``chunks(epoch)`` begins there.

    Two optional members let hosts divide its files: ``num_shards``, their number, and ``shard(num_shards, index)``, the
    stream of every sample in one part of them, as of ``datasets.IterableDataset``. Ranks that have the same
    ``identity``, a text that determines the samples and their order, do not read the start of the stream to compare it.
    """

    def chunks(self, epoch: int) -> Iterator[Arrays]:
        """Yield tuples of arrays (B, ...) of one B each; arity, trailing shapes and dtypes stay the same."""


def rebatch(chunks: Iterable[Arrays], global_batch: int, skip_samples: int = 0) -> Iterator[Arrays]:
    """Regroup ``chunks`` into global batches after a skip; `UserError` for chunks that do not fit one another."""
    yield from map(joined, pieces(chunks, global_batch, skip_samples))


def pieces(chunks: Iterable[Arrays], global_batch: int, skip_samples: int = 0) -> Iterator[list[Arrays]]:
    """Yield the pieces of ``chunks`` of which each global batch consists, without copies. Errors: as of `rebatch`."""
    queue = RowQueue((0, chunk) for chunk in after(chunks, skip_samples, []))
    while batch := queue.take(global_batch)[0]:
        yield batch


def after(chunks: Iterable[Arrays], samples: int, layout: list[tuple]) -> Iterator[Arrays]:
    """Yield ``chunks`` without their first ``samples`` rows. Errors: as of `rebatch`.

    ``layout``: shapes and types that the chunks must keep; the first one sets it where it is empty.
    """
    for chunk in chunks:
        n = _checked(chunk, layout)
        skipped = min(samples, n)
        samples -= skipped
        if n > skipped:
            yield tuple(array[skipped:] for array in chunk) if skipped else chunk


class RowQueue:
    """Rows of ``chunks``, which come as (number of the first row, chunk), by any number of them."""

    def __init__(self, chunks: Iterator[tuple[int, Arrays]]) -> None:
        self._chunks = chunks
        self._next: tuple[int, Arrays] | None = None

    def take(self, n: int) -> tuple[list[Arrays], list[tuple[int, int]]]:
        """Return the next ``n`` rows, fewer at the end, in pieces; and their numbers in runs (first number, rows)."""
        parts, runs = list[Arrays](), list[tuple[int, int]]()
        while n and (ahead := self._next or next(self._chunks, None)):
            first, chunk = ahead
            taken = min(n, len(chunk[0]))
            left = taken < len(chunk[0])
            parts.append(tuple(array[:taken] for array in chunk) if left else chunk)
            if runs and sum(runs[-1]) == first:
                first, before = runs.pop()
                runs.append((first, before + taken))
            else:
                runs.append((first, taken))
            self._next = (sum(runs[-1]), tuple(array[taken:] for array in chunk)) if left else None
            n -= taken
        return parts, runs


def numbers_of(runs: Sequence[tuple[int, int]], low: int, high: int) -> np.ndarray:
    """Return the numbers, int64[high - low], of rows [low, high) of ``runs`` (`RowQueue.take`)."""
    if len(runs) == 1:
        return np.arange(runs[0][0] + low, runs[0][0] + high)
    return np.concatenate([_NONE, *(np.arange(first, first + n) for first, n in runs)])[low:high]


SHARD_BITS = 40
"""Bits of a row's number that give its place in its shard of the stream; those above give the shard."""


def divides(stream: Any, n: int) -> bool:
    """Return whether ``stream`` can be divided into ``n`` shards by its files."""
    return callable(getattr(stream, "shard", None)) and int(getattr(stream, "num_shards", 0)) >= n


class ShuffledStream:
    """A stream whose samples pass a buffer of ``n``: each new one takes the place of one drawn at random, which leaves.

    The order depends on (``seed``, epoch) and the stream's order only, not on its chunks. A sample leaves after ``n``
    others on average, and never more than ``n`` before its turn.
    """

    def __init__(self, stream: Any, n: int, seed: int) -> None:
        self.wraps, self._n, self._seed = stream, n, seed

    def __getattr__(self, name: str) -> Any:
        if name in ("wraps", "chunks_from", "state_dict", "load_state_dict"):
            # Not while it is unpickled; a buffer has no place to begin at, and no state of its stream has its rows.
            raise AttributeError(name)
        return getattr(self.wraps, name)

    def shard(self, num_shards: int, index: int) -> ShuffledStream:
        """Return a shard of the stream, through a buffer of its own."""
        return ShuffledStream(self.wraps.shard(num_shards, index), self._n, self._seed)

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
