"""Read this rank's share of each global batch of a stream, in the stream's own order: `StreamWalk`.

Decides which ranks read (``data.readers``) and sums over the ranks what a step holds. `hvdtrain.data.host_reader` moves
rows between the ranks of a host.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from hvdtrain.cluster.control import agreed, every_rank
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.mesh import spans
from hvdtrain.core.protocols import Control
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.batches import Bounds, LocalBatch, WeightFn, emptied
from hvdtrain.data.host_reader import MOST_AHEAD, HostReader
from hvdtrain.data.stream import Arrays, Stream, between, fingerprint, joined, pieces
from hvdtrain.data.stream_state import CANNOT, Positions
from hvdtrain.data.workers.worker import generators_kept

_NONE = np.empty(0, np.int64)
_UNEVEN = "the ranks' streams differ in length: steps continue with the remaining samples"
_DIFFERENT = ("the ranks read different streams: each takes its share of what it reads, so samples are lost "
              "or repeated; use the same seed for the shuffle and do not split the stream by rank (a stream that draws "
              "random numbers for each sample needs a seed too)")
KEPT_BATCHES = 4  # consumed batches whose positions a save may still want
HEAD_ROWS = 16  # samples at the start of a stream's epoch that are compared after a resumption


class StreamWalk:
    """Walk a stream, which the ranks read alike or receive from one reader per host, and whose end they find together.

    ``even``: give a rank whose stream has ended arrays (0, ...) of the shapes that it had. ``unlike``: why the samples
    of the epoch cannot be verified, the same on all ranks. ``head``: (epoch, checksum) of the first `HEAD_ROWS` samples
    of the latest epoch that this rank has opened. ``most``: as of `SourceWalk`. ``readers``: the key ``data.readers``.
    ``ahead``: batches that a rank fetches before they are computed.
    """

    samples, begins = None, 0

    def __init__(self, data: Stream, global_batch: int, rank: int, control: Control, even: bool, most: int = 0,
                 readers: str = "each", ahead: int = 0) -> None:
        self._data, self._global_batch, self._even, self._most = data, global_batch, even, most
        self._rank, self._control, self._everyone = rank, control, every_rank(control)
        self._empty: Arrays = ()
        self.decodes = 0
        self._warned: set[str] = set()
        self.unlike = ""
        self.head: tuple[int, int] | None = None
        self.positions = Positions(data)
        self._peeked: tuple[tuple[int, int], list[Arrays] | None, Generator[list[Arrays], None, None]] | None = None
        self._rows: list[np.ndarray] = []
        self._readers, self._ahead, self._sample_s = readers, ahead, 0.0
        self._settled = readers == "each" or self._everyone.size == 1
        self._checks = self._everyone.size > 1  # of whole batches, over several readers
        self._host: HostReader | None = None
        self._tried: Arrays = ()
        self._number = 0

    @property
    def reads(self) -> bool:
        """Return whether this rank reads the stream, and does not receive its rows."""
        return self._host is None or self._host.reads

    def settle(self) -> str:
        """Decide which ranks read the stream; return a note about it, "" for none. Collective, the first time."""
        if self._settled:
            return ""
        self._settled = True
        carrier = self._everyone.shared_carrier()
        own = [self._everyone.rank] if carrier is None else sorted(carrier.ranks)
        rows = self._everyone.gather((self._rank, own))
        hosts = sorted({tuple(ranks) for _, ranks in rows if len(ranks) > 1})
        because = ("each rank has its host, or its memory, to itself" if not hosts
                   else f"data.prefetch is above {MOST_AHEAD}" if self._ahead > MOST_AHEAD
                   else self._rank_dependent() if self._readers == "auto" else "")
        if because:
            return f"data.readers: each rank reads the whole stream: {because}" if hosts else ""
        if carrier is not None:
            places = {rank: rows[rank][0] for rank in own}
            self._host = HostReader(carrier, self._everyone.rank, places, self._everyone.timeout_s, self._ahead)
        self._checks = len(hosts[0]) < self._everyone.size
        self._try_out()
        who = ", ".join(f"rank {ranks[0]} for rank{'s' * (len(ranks) > 2)} {spans(ranks[1:])}" for ranks in hosts[:8])
        return f"data.readers: one rank of a host reads the stream for the others: {who}"

    def order(self, epoch: int, shuffle: bool) -> None:
        """Return None: a stream has its own order."""

    def _rank_dependent(self) -> str:
        """Return why the ranks may not read the same stream, by its start; "" where they do. Collective."""
        def drawn() -> bool:
            with generators_kept() as drew:
                self.sample(1, Cursor())
                return drew()

        drew = agreed(self._everyone, drawn, "data")
        starts = self._everyone.gather((fingerprint(tuple(self._rows)), drew))
        if any(drew for _, drew in starts):
            return "it draws from the global random generators, which are the rank's"
        return "the ranks read different samples at its start" if len(set(starts)) > 1 else ""

    def _try_out(self) -> None:
        """Give the ranks that do not read the first batch, to try their model on. Collective."""
        host = self._host
        agreed(self._everyone, lambda: self.sample(1, Cursor()) if self.reads else None, "data")
        if host is None:
            return
        if host.reads:
            assert self._peeked is not None and self._peeked[1] is not None
            parts = self._peeked[1]
            n = sum([len(part[0]) for part in parts])
            self._tried = joined(parts)
            host.send(0, parts, n, 0, lambda place: (0, n))
            return
        self._tried = next(host.rows(0)).arrays
        peeked, self._peeked, self._rows = self._peeked, None, []
        if peeked is not None:
            peeked[2].close()

    def replay(self, cursor: Cursor) -> str:
        """Open the stream at ``cursor``; return what it costs to reach it, "" where it begins there or can seek."""
        if not cursor.samples or hasattr(self._data, "chunks_from"):
            return ""
        why = _seek(self, cursor) if self.reads else self.positions.why
        if not why:
            return ""
        took_s = cursor.samples * self._sample_s
        about = f", about {took_s:.2g} s as at its start" if took_s else ""
        return (f"resume: {why}, so {count(cursor.samples, 'sample')} of epoch {cursor.epoch} "
                f"are read again and dropped{about}")

    def batches(self, cursor: Cursor, shuffle: bool, bounds: Bounds) -> Generator[LocalBatch, None, None]:
        """Yield this rank's shares from ``cursor`` to the end of its epoch; a stream does its own shuffling."""
        self._number += 1
        return self._read(cursor, bounds, self._number) if self.reads else self._received(cursor, self._number)

    def _read(self, cursor: Cursor, bounds: Bounds, number: int) -> Generator[LocalBatch, None, None]:
        host = self._host
        with (contextlib.closing(self._continued(cursor)) as batches,
              contextlib.nullcontext() if host is None else host.walk(number)):
            for step, parts in enumerate(batches, cursor.step):
                at = cursor.samples + (step - cursor.step) * self._global_batch
                if self._most:
                    parts = between(parts, 0, max(0, self._most - at))
                n = sum([len(part[0]) for part in parts])
                if not n:
                    return
                if self._checks:
                    parts = [joined(parts)]
                check = fingerprint(parts[0]) if self._checks else 0
                if host is not None:
                    host.send(number, parts, n, check, partial(bounds, step, n))
                low, high = bounds(step, n)
                mine = joined(between(parts, low, high))
                yield LocalBatch(n, high - low, mine, check, np.arange(at + low, at + high))

    def _received(self, cursor: Cursor, number: int) -> Generator[LocalBatch, None, None]:
        assert self._host is not None
        for i, (n, check, low, high, arrays) in enumerate(self._host.rows(number)):
            at = cursor.samples + i * self._global_batch
            yield LocalBatch(n, high - low, arrays, check, np.arange(at + low, at + high))

    def totalled(self, batches: Iterator[LocalBatch], cursor: Cursor,
                 weight_fn: WeightFn | None) -> Iterator[LocalBatch]:
        """Yield batches until all streams have ended; `UserError` for an epoch without samples. Collective, unless one
        rank reads for all others: then each knows the totals, and waits for nobody but the reader.
        """
        known = self._host is not None and not self._checks and weight_fn is None
        first, self.unlike = True, ""
        while True:
            batch, error = self._next(batches, weight_fn)
            if known:
                n_global, weight, alike, same, failed = batch.n, float(batch.n), True, True, error is not None
            else:
                n_global, weight, alike, same, failed = _summed(self._control, self._everyone, batch, error)
            if failed:
                agreed(self._everyone, partial(_raise, error), "data")
            if n_global == 0:
                if first and cursor.samples == 0:
                    raise _no_samples(cursor.epoch)
                return
            if not alike:
                self._refute(_UNEVEN)
                batch = replace(batch, numbers=None)
            elif not same:
                self._refute(_DIFFERENT)
            first, counts_P = False, None
            if self._even:
                batch = self._shaped(batch)
                counts_P = None if alike else self._control.gather(batch.n_local)
            # Where some have ended, the longest stream still reads whole batches: keep its position.
            consumed = n_global if alike else self._global_batch
            self.positions.forget(cursor.samples - KEPT_BATCHES * self._global_batch)
            cursor = cursor.advance(consumed)
            yield replace(batch, n_global=n_global, weight=weight, consumed=consumed, counts_P=counts_P)

    def _next(self, batches: Iterator[LocalBatch], weight_fn: WeightFn | None) -> tuple[LocalBatch, UserError | None]:
        """Return the next batch, without samples at the end of the stream and with an error of this rank."""
        last = LocalBatch(0, 0, (), numbers=_NONE)
        try:
            with contextlib.nullcontext() if self._host is None else self._host.waiting():
                return next(batches, last).weighed(weight_fn), None
        except UserError as error:
            return last, error

    def sample(self, n: int, cursor: Cursor) -> Arrays:
        """Return ``n`` samples of the batch at ``cursor``, with which `batches` continues: one opening.

        Where one rank of a host reads, of the first batch of the run: a replay would hold up the others.
        """
        if self._tried:
            return tuple(np.resize(array, (n, *array.shape[1:])) for array in self._tried)
        place = (cursor.epoch, cursor.samples)
        if self._peeked is None or self._peeked[0] != place:
            begin, before, batches = time.perf_counter(), self.decodes, self._continued(cursor)
            self._peeked = (place, next(batches, None), batches)
            if self.decodes > before:  # chunks may be larger than the batch
                self._sample_s = (time.perf_counter() - begin) / (self.decodes - before)
        parts = self._peeked[1]
        if parts is None:
            raise _no_samples(cursor.epoch)
        return tuple(np.resize(array, (n, *array.shape[1:])) for array in joined(between(parts, 0, n)))

    def check_alike(self, control: Control) -> None:
        """Do nothing: `totalled` compares each batch, where the stream is read anyway."""

    def compare(self, control: Control, epoch: int) -> int:
        """Return 0: `totalled` has compared all batches."""
        return 0

    def _opened(self, cursor: Cursor) -> Generator[list[Arrays], None, None]:
        seek = getattr(self._data, "chunks_from", None) if cursor.samples else None
        self.positions.rewind()
        chunks = self._data.chunks(cursor.epoch) if seek is None else seek(cursor.epoch, cursor.samples)
        try:
            if seek is None:
                noted = self.positions.noted(self._headed(_counted(self, chunks), cursor.epoch), cursor.epoch, 0)
                yield from pieces(noted, self._global_batch, cursor.samples)
            else:
                yield from pieces(_counted(self, chunks), self._global_batch)
        finally:
            if hasattr(chunks, "close"):
                chunks.close()

    def _headed(self, chunks: Iterable[Arrays], epoch: int) -> Iterator[Arrays]:
        """Yield ``chunks`` and set ``head`` once their first samples have been read."""
        n, self.head, self._rows = 0, None, []
        for chunk in chunks:
            if n < HEAD_ROWS and isinstance(chunk, tuple) and all(map(np.ndim, chunk)):
                for row in zip(*(array[:HEAD_ROWS - n] for array in chunk)):
                    self._rows, n = [*self._rows, *map(np.asarray, row)], n + 1
                self.head = (epoch, fingerprint(tuple(self._rows))) if n == HEAD_ROWS else None
            yield chunk

    def _continued(self, cursor: Cursor) -> Generator[list[Arrays], None, None]:
        """Yield the pieces of batches from ``cursor``, from what `sample` has opened where that is of its epoch."""
        # Some streams have another order when they are opened again: a resumed run must not open its epoch twice.
        peeked, self._peeked = self._peeked, None
        first = -1 if peeked is None or peeked[0][0] != cursor.epoch else peeked[0][1]
        if first != cursor.samples and (not 0 <= first <= cursor.samples or hasattr(self._data, "chunks_from")):
            if peeked is not None:
                peeked[2].close()
            yield from self._opened(cursor)
        elif peeked is not None and peeked[1] is not None:
            with contextlib.closing(peeked[2]) as rest:
                chunks = itertools.chain(peeked[1], itertools.chain.from_iterable(rest))
                yield from pieces(chunks, self._global_batch, cursor.samples - peeked[0][1])

    def _shaped(self, batch: LocalBatch) -> LocalBatch:
        """Give ``batch`` arrays (0, ...) of the stream's shapes where the stream has ended on this rank only."""
        if batch.arrays:
            self._empty = self._empty or emptied(batch.arrays)
            return batch
        if not self._empty:
            raise UserError(f"rank {self._rank}'s stream has no sample, and with sync_batchnorm "
                            "every rank runs the model", "at least one sample on every rank",
                            "give every rank the same stream, or set sync_batchnorm: false")
        return replace(batch, arrays=self._empty)

    def _refute(self, text: str) -> None:
        self.unlike = self.unlike or text.partition(":")[0]
        if self._rank == 0 and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)


def _counted(walk: StreamWalk, chunks: Iterable[Arrays]) -> Iterator[Arrays]:
    """Yield ``chunks`` and count their samples in ``decodes``, those that are dropped to reach a place too."""
    for chunk in chunks:
        if isinstance(chunk, tuple) and chunk and np.ndim(chunk[0]):  # `pieces` refuses others
            walk.decodes += len(chunk[0])
            if walk._host is not None and walk._number:
                walk._host.reading(walk._number)
        yield chunk


def _seek(walk: StreamWalk, cursor: Cursor) -> str:
    """Open the stream at ``cursor`` by one of its states; return "" or why it has to be read again."""
    positions = walk.positions
    mark = positions.find(cursor.epoch, cursor.samples)
    if mark is None:
        return str((positions.restored or {}).get("why") or positions.why or CANNOT)
    if walk._peeked is not None:
        walk._peeked[2].close()
        walk._peeked = None
    chunks = positions.chunks_at(mark, partial(_counted, walk))
    batches = pieces(chunks, walk._global_batch, cursor.samples - mark.samples)
    try:
        walk._peeked = (cursor.epoch, cursor.samples), next(batches, None), batches
    except Exception as error:  # of the user's code, or of a state that does not fit: a replay needs none
        chunks.close()
        return f"the stream's state cannot be used ({type(error).__name__}: {error})"
    return ""


def _summed(control: Control, everyone: Control, batch: LocalBatch,
            error: UserError | None) -> tuple[int, float, bool, bool, bool]:
    """Return samples and weight of a step over the ranks of ``control``, and whether the batches that ``everyone`` has
    read have one length and one checksum, and any rank an error.
    """
    mine = np.array([batch.n_local, batch.own_weight, batch.n, batch.n ** 2, batch.check, batch.check ** 2,
                     error is not None], np.float64)
    sums, size = control.sum(mine), everyone.size
    read = sums[2:] if everyone is control else everyone.sum(mine[2:])
    seen, seen2, checks, checks2, failed = map(int, read)
    # No variance over ranks.
    return int(sums[0]), float(sums[1]), size * seen2 == seen ** 2, size * checks2 == checks ** 2, failed > 0


def _no_samples(epoch: int) -> UserError:
    return UserError(f"the stream has no samples in epoch {epoch}", "samples in every epoch",
                     "give a dataset that can be iterated again, not an exhausted generator")


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error
