"""Open a stream, or shards of its files, at a position: `StreamReading`, `ShardPosition`.

Keeps what was opened to try a model on, so that no epoch is opened twice. `hvdtrain.data.stream_readers`
decides which rank reads which shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.stream import SHARD_BITS, Arrays, Stream, after, divides, fingerprint
from hvdtrain.data.stream_state import CANNOT, Mark, Positions

HEAD_ROWS = 16
"""Samples at the start of a stream's epoch that are compared after a resumption, and between shards."""
_CHUNK = 64


def chunk_sizes() -> Iterator[int]:
    """Return how many single samples to stack for each chunk: at first those that all ranks may read to compare."""
    return itertools.chain([HEAD_ROWS], itertools.repeat(_CHUNK))


_REMOTE = ("s3://", "gs://", "gcs://", "hf://", "https://", "hdfs://", "abfs://", "abfss://", "az://", "adl://")
"""Addresses that name the same file on all hosts."""
_HEAD, _WINDOW = 1 << 22, 1 << 14
"""Bytes that are compared at the start of the first file, and at the start, middle and end of each of `_PROBED`."""
_PROBED = 64


def files_identity(names: Iterable[str]) -> str:
    """Return a hash of the files' names, sizes and samples of their bytes; "" without files, or for one unknown here.

    Hosts may have files of their own, with the same names and sizes.
    """
    names = list(names)
    if not names:
        return ""
    found, every = hashlib.sha256(), -(-len(names) // _PROBED)
    for i, name in enumerate(names):
        found.update(f"{len(name)} {name} ".encode(errors="surrogateescape"))
        if name.startswith(_REMOTE):
            continue
        if not os.path.isfile(name):
            return ""
        size = os.path.getsize(name)
        found.update(f"{size} ".encode())
        if i % every == 0:
            with open(name, "rb") as file:
                for at, n in ((0, _WINDOW if i else _HEAD), (size // 2, _WINDOW), (max(0, size - _WINDOW), _WINDOW)):
                    file.seek(at)
                    found.update(file.read(n))
    return found.hexdigest()


class Opened(NamedTuple):
    """Chunks that were read at ``samples`` of ``epoch``, and the ``rest`` of that epoch."""

    epoch: int
    samples: int
    chunks: list[Arrays]
    rest: Generator[Arrays, None, None]


class StreamReading:
    """Reading of ``data`` in whole, which is shard 0 of 1, or of shards of its files.

    ``decodes``: samples read, those that are dropped to reach a position too. ``sample_s``: seconds that one took at
    its start; 0 before. ``heads``: by the number of shards, (epoch, checksum) of the first `HEAD_ROWS` samples of the
    epoch that this rank has opened last, of shard 0. ``positions``: states of the stream in whole, if it has such.
    ``seen`` is called for each chunk.
    """

    def __init__(self, data: Stream, seen: Callable[[], None]) -> None:
        self.data: Any = data
        self.positions = Positions(data)
        self.decodes, self.sample_s = 0, 0.0
        self.heads: dict[int, tuple[int, int]] = {}
        self._seen = seen
        self._shards: dict[tuple[int, int], Stream] = {}
        self._opened: dict[tuple[int, int], Opened] = {}

    def stream(self, index: int, of: int) -> Stream:
        """Return shard ``index`` of ``of``, the same object each time. Errors: `UserError` where there is none."""
        if of == 1:
            return self.data
        if (index, of) not in self._shards:
            if not divides(self.data, of):
                files = getattr(self.data, "num_shards", 0)
                raise UserError(f"the run is within an epoch whose files were divided into {of} shards, and the data "
                                f"has {count(files, 'file')} to divide", "the data that the epoch began with",
                                "resume with that data, or from a checkpoint at the end of an epoch")
            shard = self.data.shard(of, index)
            if not isinstance(shard, Stream):
                raise UserError(f"shard({of}, {index}) of the stream returned a {type(shard).__name__}",
                                "a stream of the same kind", "return an object with chunks(epoch)")
            self._shards[index, of] = shard
        return self._shards[index, of]

    def seeks(self, of: int) -> bool:
        """Return whether the stream, or its shards, can begin within an epoch."""
        return hasattr(self.stream(0, of), "chunks_from")

    def start(self, index: int, of: int, epoch: int, samples: int, least: int) -> list[Arrays]:
        """Return the chunks with ``least`` samples or more from a position, with which `chunks` continues."""
        opened = self._opened.get((index, of))
        if opened is None or (opened.epoch, opened.samples) != (epoch, samples):
            begin, before = time.perf_counter(), self.decodes
            if not samples or of > 1 or self.seeks(of) or self.seek(epoch, samples, least):
                rest = self.chunks(index, of, epoch, samples)
                self._opened[index, of] = Opened(epoch, samples, _filled(rest, least), rest)
            opened = self._opened[index, of]
            if self.decodes > before:  # chunks may be larger than what is wanted
                self.sample_s = (time.perf_counter() - begin) / (self.decodes - before)
        opened.chunks.extend(_filled(opened.rest, least - sum(len(chunk[0]) for chunk in opened.chunks)))
        return opened.chunks

    def seek(self, epoch: int, samples: int, least: int) -> str:
        """Open the whole stream at a position by one of its states, as `start` does; return "" or why that fails."""
        opened = self._opened.get((0, 1))
        if opened is not None and (opened.epoch, opened.samples) == (epoch, samples):
            return ""
        mark = self.positions.find(epoch, samples)
        if mark is None:
            return str((self.positions.restored or {}).get("why") or self.positions.why or CANNOT)
        if opened is not None:
            self._opened.pop((0, 1)).rest.close()
        rest = self._from_state(mark, samples)
        try:
            self._opened[0, 1] = Opened(epoch, samples, _filled(rest, least), rest)
        except Exception as error:  # of the user's code, or of a state that does not fit: a replay needs none
            rest.close()
            return f"the stream's state cannot be used ({type(error).__name__}: {error})"
        return ""

    def _from_state(self, mark: Mark, samples: int) -> Generator[Arrays, None, None]:
        with contextlib.closing(self.positions.chunks_at(mark, self._counted)) as chunks:
            yield from after(chunks, samples - mark.samples, [])

    def close(self, but: Iterable[tuple[int, int]] = ()) -> None:
        """Close what `start` has opened, except the shards (index, of) ``but``."""
        for key in set(self._opened) - set(but):
            self._opened.pop(key).rest.close()

    def numbered(self, shards: Sequence[int], epoch: int,
                 taken: Sequence[int]) -> Generator[tuple[int, Arrays], None, None]:
        """Yield (number of the first row, chunk) of one shard after the other, each from its position in ``taken``."""
        layout: list[tuple] = []
        for index in shards:
            number = (index << SHARD_BITS) + taken[index]
            with contextlib.closing(self.chunks(index, len(taken), epoch, taken[index])) as chunks:
                for chunk in after(chunks, 0, layout):
                    yield number, chunk
                    number += len(chunk[0])

    def chunks(self, index: int, of: int, epoch: int, samples: int) -> Generator[Arrays, None, None]:
        """Yield the chunks of a shard from a position on, from what `start` has opened where that is of its epoch."""
        # Some streams have another order when they are opened again: a resumed run must not open its epoch twice.
        stream, opened = self.stream(index, of), self._opened.pop((index, of), None)
        ahead = -1 if opened is None or opened.epoch != epoch else samples - opened.samples
        if opened is not None and (ahead == 0 or ahead > 0 and not hasattr(stream, "chunks_from")):
            with contextlib.closing(opened.rest) as rest:
                yield from after(itertools.chain(opened.chunks, rest), ahead, [])
            return
        if opened is not None:
            opened.rest.close()
        seek = getattr(stream, "chunks_from", None) if samples else None
        if of == 1:
            self.positions.rewind()
        chunks = stream.chunks(epoch) if seek is None else seek(epoch, samples)
        try:
            counted = self._counted(chunks)
            if seek is None:
                counted = self._headed(counted, of, epoch) if index == 0 else counted
                counted = self.positions.noted(counted, epoch, 0) if of == 1 else counted
            yield from after(counted, samples if seek is None else 0, [])
        finally:
            if hasattr(chunks, "close"):
                chunks.close()

    def _counted(self, chunks: Iterable[Arrays]) -> Iterator[Arrays]:
        for chunk in chunks:
            if _fits(chunk):
                self.decodes += len(chunk[0])
                self._seen()
            yield chunk

    def _headed(self, chunks: Iterable[Arrays], of: int, epoch: int) -> Iterator[Arrays]:
        """Yield ``chunks`` and enter ``heads`` once their first samples have been read."""
        read: list[Arrays] | None = []
        self.heads.pop(of, None)
        for chunk in chunks:
            if read is not None and _fits(chunk):
                rows, n = first_rows([*read, chunk])
                read = [*read, tuple(array[:HEAD_ROWS] for array in chunk)]
                if n == HEAD_ROWS:
                    self.heads[of], read = (epoch, fingerprint(rows)), None
            yield chunk


class ShardPosition:
    """Position within an epoch: ``taken``, the samples consumed of each shard; of one where the stream is whole."""

    def __init__(self) -> None:
        self.taken = [0]
        self._at = (0, 0)

    def restored(self, cursor: Cursor, taken: Sequence[int]) -> None:
        """Stand at ``cursor``, where ``taken`` samples of each shard were consumed; none: the stream was whole."""
        self._at = (cursor.epoch, cursor.samples)
        self.taken = [int(n) for n in taken] or [cursor.samples]

    def saved(self, cursor: Cursor) -> dict[str, list[int]]:
        """Return what a checkpoint at ``cursor`` keeps beside it: nothing where the cursor is the position."""
        return {"shards": list(self.taken)} if len(self.taken) > 1 and cursor.samples else {}

    def at(self, cursor: Cursor, shards: int) -> list[int]:
        """Return the samples taken of each shard at ``cursor``; ``shards``: of an epoch that begins there."""
        if not cursor.samples:
            return [0] * shards
        if self._at == (cursor.epoch, cursor.samples):
            return list(self.taken)
        assert shards == 1, "a position within a divided epoch that no step and no checkpoint has left"
        return [cursor.samples]

    def begin(self, cursor: Cursor, shards: int) -> None:
        """Stand at ``cursor``."""
        self.restored(cursor, self.at(cursor, shards))

    def advance(self, consumed: int, taken: Sequence[int]) -> None:
        """Move on by ``consumed`` samples, ``taken`` of each shard."""
        self._at = (self._at[0], self._at[1] + consumed)
        whole = len(self.taken) == 1
        self.taken = [self._at[1]] if whole else [n + more for n, more in zip(self.taken, taken, strict=True)]

    def counted(self, runs: Iterable[tuple[int, int]]) -> list[int]:
        """Return the samples of each shard in ``runs`` of numbers; [] where the stream is whole."""
        taken = [0] * len(self.taken)
        for first, n in runs if len(taken) > 1 else ():
            taken[first >> SHARD_BITS] += n
        return taken if len(taken) > 1 else []

    def ranges(self, samples: int) -> list[tuple[int, int]]:
        """Return the numbers [low, high) of the epoch's first ``samples`` samples, in ranges."""
        shards = self.taken if len(self.taken) > 1 else [samples]
        return [(i << SHARD_BITS, (i << SHARD_BITS) + n) for i, n in enumerate(shards)]


def _filled(rest: Iterator[Arrays], least: int) -> list[Arrays]:
    """Return the first chunks of ``rest`` with ``least`` samples or more together."""
    chunks, n = list[Arrays](), 0
    while n < least and (chunk := next(rest, None)) is not None:
        chunks.append(chunk)
        n += len(chunk[0])
    return chunks


def first_rows(chunks: Iterable[Arrays]) -> tuple[Arrays, int]:
    """Return the arrays of the first `HEAD_ROWS` samples, row by row, whatever the chunks, and how many these are."""
    rows = list(itertools.islice((row for chunk in chunks for row in zip(*chunk)), HEAD_ROWS))
    return tuple(np.asarray(array) for row in rows for array in row), len(rows)


def _fits(chunk: Any) -> bool:
    """Return whether ``chunk`` has rows that can be counted; others are refused where they are used."""
    return isinstance(chunk, tuple) and bool(chunk) and all(map(np.ndim, chunk))
