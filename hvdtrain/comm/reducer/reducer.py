"""Reducer: drives compressors over collectives, starting each full bucket in order and collecting the sums.

Owns the order of collectives and their names (law 5), and what compressors remember. Runs eagerly and while TensorFlow
traces, where a handle's ``wait`` returns a symbolic tensor.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hvdtrain.comm.reducer.transport import Asker, TracedBucket, Transfer, Transport
from hvdtrain.comm.reducer.transport import transfer as transfer_of
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Array, Collectives, Compressor, Ops
from hvdtrain.core.protocols.types import Bucket, Shards, itemsize
from hvdtrain.core.timeline import Taker, current


class Reducer:
    """Sum of every bucket of a step over the ranks.

    ``begin`` opens a step. ``start(i, flat_N)`` may be called in any order, buckets are sent by index, so that all
    ranks issue the same sequence. ``finish`` returns the summed vectors by bucket. ``state``: what the compressor
    remembers; ``stage``: its stage of warm-up in this step. ``wires``: transport of each bucket. ``ops_of_place``:
    array operations of each of the rank's devices, where there are several. ``among``: collectives of each group
    (`Bucket.group`) that is not all ranks of ``collectives``; all are of one kind and size. ``shards``: of each bucket,
    where this rank wants its shard of the sums alone; [] where it wants the sums.
    """

    def __init__(self, buckets: Sequence[Bucket], compressor: Compressor, collectives: Collectives,
                 ops: Ops, ops_of_place: Sequence[Ops] = (), among: Mapping[str, Collectives] | None = None) -> None:
        self.buckets = list(buckets)
        self.collectives = collectives
        self.compressor = compressor
        self.ops, self.ops_of_place, self.among = ops, ops_of_place, dict(among or {})
        self.stage = compressor.stage(0)
        self._check()
        own = [ops_of_place[b.place] if ops_of_place else ops for b in self.buckets]
        self.state = CompressorState(compressor, self.buckets, own)
        self.wires = [Transport(self.among.get(b.group, collectives), ops) for b, ops in zip(self.buckets, own)]
        self.shards: list[Shards] = []
        self._taker: Taker | None = None
        self._asker = Asker()
        self._reset()

    def _check(self) -> None:
        """Raise `UserError` where compressor, collectives and parameters do not go together."""
        taken, wire = self.compressor.dtypes, self.collectives
        dtypes = {b.dtype for b in self.buckets}
        if taken is None and dtypes - wire.dtypes:
            raise UserError(f"there are parameters of type {min(dtypes - wire.dtypes)}", f"types that {wire.name} can "
                            "sum: " + ", ".join(sorted(wire.dtypes)), "cast the model to one of them")
        if taken is not None and dtypes - taken:
            raise UserError(f"compression {self.compressor.name} with parameters of type {min(dtypes - taken)}",
                            f"gradients of type {', '.join(sorted(taken))}", "set compression: none")
        lacking = self.compressor.reductions - wire.reductions
        if lacking:
            raise UserError(f"{min(lacking)} over {wire.name}, which does not offer it",
                            "a Horovod that was built with MPI or NCCL", "set exchange.adasum: false")

    def _reset(self) -> None:
        self._full: dict[int, Array] = {}
        self._started, self._broken = 0, False
        self._running: dict[int, Transfer] = {}
        self._watched: dict[int, TracedBucket] = {}

    def buffer(self, bucket: Bucket) -> Array:
        """Return zeros for a bucket, in the collectives' memory if they sum it without a copy or compressor."""
        if not self.compressor.in_place or not self.collectives.host:
            return self.ops.zeros(bucket.n, bucket.dtype)
        wire = self.wires[bucket.index].collectives
        return self.ops.buffer(bucket.n, bucket.dtype, wire.buffer(bucket.n, bucket.dtype))

    def begin(self) -> None:
        """Open a step, and drop what an earlier one that failed has left."""
        self.stage = self.state.begin()
        self._reset()
        timeline = current()
        # Graph nodes are called once, to be traced: what stamps them is the backend's.
        self._taker = None if timeline is None or self.collectives.in_graph else timeline.taker
        self._looked()  # what was summed between steps does not count

    def squares(self, sums: Sequence[Array]) -> float:
        """Return the sum of squares over this rank's part of ``sums``; over all ranks that of the whole gradient.

        NaN or infinite where any element is. Taken by the transport, if it looked at these sums.
        """
        n_looked, squares = self._looked()
        if self.compressor.in_place and n_looked == sum(b.n for b in self.buckets) and n_looked:
            return squares
        return float(sum_squares(self.ops, self.own_parts(sums)))

    def own_parts(self, sums: Sequence[Array]) -> list[Array]:
        """Return this rank's part of each bucket's sum; those of all ranks are the whole gradient, once."""
        return [part for x, bucket, wire in zip(sums, self.buckets, self.wires)
                for part in own_parts([x], [bucket], wire.rank, wire.size)]

    def _looked(self) -> tuple[int, float]:
        found = [wire.looked() for wire in dict.fromkeys((self.collectives, *self.among.values()))]
        return sum(n for n, _ in found), sum(squares for _, squares in found)

    def owed(self) -> list[int] | None:
        """Return the buckets whose exchange has not begun, to be started from now on; None where one has broken off.

        The latter is so after an error in `start` beyond the bucket's first request, in `take`, `close` or `finish`.
        """
        self._full.clear()
        return None if self._broken else list(range(self._started, len(self.buckets)))

    def start(self, index: int, flat_N: Array, group_name: str = "") -> None:
        """Hand over a full bucket, to be exchanged after those before it; ``group_name``: in place of its group."""
        assert index not in self._full and index >= self._started, f"bucket {index} was passed twice"
        self._full[index] = flat_N
        if self._taker is not None:
            bucket = self.buckets[index]
            nbytes = bucket.n * itemsize(bucket.dtype)
            self._watched[index] = TracedBucket(self._taker, nbytes, self.collectives.overlaps, self._asker)
        while self._started in self._full:
            i = self._started
            bucket, full_N = self.buckets[i], self._full.pop(i)
            name = f"{group_name}.b{i}" if group_name else bucket.name
            transfer = transfer_of(self.wires[i], self.compressor, bucket, full_N, self.state.of(i), self.stage, name,
                                   self._watched.get(i), self.shards[i] if self.shards else None)
            try:
                transfer.begin()
            except BaseException:
                self._broken = transfer.asked
                raise
            self._running[i] = transfer
            self._started += 1

    def take(self, index: int) -> Array:
        """Complete one bucket by itself, all before it being complete, and return its sum; `close` ends the step."""
        transfer = self._running[index]
        with self._breaking():
            while not transfer.done:
                transfer.advance()
        total_N, state = transfer.result
        transfer.result = None, state
        return total_N

    def close(self) -> None:
        """End a step whose buckets were all taken by `take`."""
        assert self._started == len(self.buckets), f"{self._started} of {len(self.buckets)} buckets were passed"
        with self._breaking():
            self.state.write([transfer.result[1] for _, transfer in sorted(self._running.items())])
        self._reset()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Note an error that comes through the body: it is unknown then what other ranks still wait for."""
        try:
            yield
        except BaseException:
            self._reset()
            self._broken = True
            raise

    def finish(self, finite_only: bool = False) -> list[Array]:
        """Complete every bucket and return the sums, by bucket; every bucket must have been handed over.

        ``finite_only``: the state of a bucket whose sum is not finite stays as it was.
        """
        assert self._started == len(self.buckets), f"{self._started} of {len(self.buckets)} buckets were passed"
        with self._breaking():
            while any(not t.done for t in self._running.values()):
                for i in range(len(self.buckets)):
                    self._running[i].advance()
            results = [transfer.result for _, transfer in sorted(self._running.items())]
            sums = [total_N for total_N, _ in results]
            self.state.write([self.state.if_finite(i, *result) if finite_only else result[1]
                              for i, result in enumerate(results)])
        self._reset()
        return sums


ALIGN = 64
"""Elements: a slice from one multiple of them to another is a view in TensorFlow too, which copies any other."""


def own_part(n: int, rank: int, size: int) -> slice:
    """Return the part of ``n`` elements that ``rank`` of ``size`` squares; together the parts are all, once.

    >>> own_part(200, 0, 2), own_part(200, 1, 2)
    (slice(0, 64, None), slice(64, 200, None))
    """
    def edge(r: int) -> int:
        return n if r == size else n * r // size // ALIGN * ALIGN

    return slice(edge(rank), edge(rank + 1))


def sum_squares(ops: Ops, tensors: Sequence[Array]) -> Array | float:
    """Return the float64 sum of the squares of all elements of ``tensors``, of any shapes.

    One number gives the norm and whether any element is not finite; a square that overflows counts as not finite.
    """
    return ops.total([ops.sum_squares(x) for x in tensors])


def own_parts(tensors: Sequence[Array], buckets: Sequence[Bucket], rank: int, size: int) -> Iterator[Array]:
    """Yield this rank's part of ``buckets``, vectors (n,) equal on all ranks; for one rank ``tensors``."""
    if size == 1:
        yield from tensors
        return
    for x, bucket in zip(tensors, buckets):
        part = own_part(bucket.n, rank, size)  # inside a graph the tensor itself may not know its length
        aligned = part.stop // ALIGN * ALIGN  # the last rank's part may end elsewhere
        for piece in (slice(part.start, aligned), slice(aligned, part.stop)):
            if piece.start < piece.stop:
                yield x[piece]


OTHER = "compressor state starts from scratch: compression, buckets or parameters differ from the checkpoint's"


class CompressorState:
    """State of ``compressor`` for each of ``buckets``; ``ops``: of each bucket, on its device.

    ``steps``: how many the compressor has begun. ``undoable``: whether a step may be discarded, for which the arrays
    before it are kept.
    """

    undoable = True

    def __init__(self, compressor: Compressor, buckets: Sequence[Bucket], ops: Sequence[Ops]) -> None:
        self._compressor, self._buckets, self.ops = compressor, list(buckets), list(ops)
        self.cells = [{key: ops.cell(x) for key, x in state.items()} for ops, state in zip(ops, self._fresh())]
        self._before: list[dict[str, Array]] = []
        self.steps = 0

    def _fresh(self) -> list[dict[str, Array]]:
        return [self._compressor.init(ops, b) if b.n else {} for ops, b in zip(self.ops, self._buckets)]

    def of(self, index: int) -> dict[str, Array]:
        """Read the arrays of a bucket."""
        return {key: cell.read() for key, cell in self.cells[index].items()}

    def all(self) -> list[dict[str, Array]]:
        """Read the arrays of each bucket."""
        return [self.of(i) for i in range(len(self.cells))]

    def write(self, states: Sequence[dict[str, Array]]) -> None:
        """Give every bucket new arrays."""
        for cells, state in zip(self.cells, states):
            for key, cell in cells.items():
                cell.write(state[key])

    def if_finite(self, index: int, total_N: Array, new: dict[str, Array]) -> dict[str, Array]:
        """Return ``new`` arrays of a bucket if its sum is finite, else those that it has."""
        ops, cells = self.ops[index], self.cells[index]
        finite = ops.all_finite(total_N) if cells else None
        return {key: ops.select(finite, new[key], cell.read()) for key, cell in cells.items()}

    def take_over(self, other: CompressorState) -> None:
        """Take the arrays of ``other``, whose buckets are the first of these."""
        self.undoable, self.steps = other.undoable, other.steps
        self.write([*other.all(), *self.all()[len(other.cells):]])

    def begin(self) -> int:
        stage = self._compressor.stage(self.steps)
        self.steps += 1
        self._before = self.all() if self.undoable else []
        return stage

    def discard(self) -> None:
        """Undo what the step did to the arrays, if they are `undoable`, and to the count of steps."""
        self.write(self._before)
        self.steps -= 1

    def nbytes(self) -> int:
        """Return the bytes of all arrays, twice where those before a step are kept."""
        found = sum(_nbytes(cell.read()) for cells in self.cells for cell in cells.values())
        return found * (2 if self.undoable else 1)

    def saved(self) -> dict[str, np.ndarray]:
        """Return all of it as numpy, with a mark of compression and buckets; {} without any."""
        arrays = {f"compressor.{i}.{key}": np.array(ops.to_host(x))
                  for i, (ops, state) in enumerate(zip(self.ops, self.all())) for key, x in state.items()}
        return {**arrays, "compressor.mark": self._mark(), "compressor.steps": np.array([self.steps])} if arrays else {}

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Undo `saved`; all starts from scratch for another plan. Returns why, or ""."""
        if "compressor.mark" not in own:
            self.restart()
            return "compressor state starts from scratch: the checkpoint has none" if any(self.cells) else ""
        if not np.array_equal(own["compressor.mark"], self._mark()):
            self.restart()
            return OTHER
        self.write([{key: ops.from_host(np.array(own[f"compressor.{i}.{key}"])) for key in cells}
                    for i, (ops, cells) in enumerate(zip(self.ops, self.cells))])
        self._before = []
        self.steps = int(own["compressor.steps"][0])
        return ""

    def restart(self) -> None:
        self.write(self._fresh())
        self._before, self.steps = [], 0

    def _mark(self) -> np.ndarray:
        """Return a checksum of the compression and of the buckets it works on, int64 (1,)."""
        plan = [self._compressor.describe(), *((b.params, b.shapes, b.dtype) for b in self._buckets)]
        return np.array([zlib.crc32(repr(plan).encode())], np.int64)


def _nbytes(array: Array) -> int:
    found = getattr(array, "nbytes", None)  # symbolic tensors lack it
    return int(found) if found is not None else int(np.prod(array.shape)) * int(array.dtype.size)
