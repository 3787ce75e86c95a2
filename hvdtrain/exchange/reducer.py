"""Drives compressors over collectives: starts each full bucket, in order, and collects the sums.

Owns the order of collectives and their names (law 5). Knows no framework: arrays pass through untouched, or as
numpy where the collectives live on the host. The same code runs eagerly and while TensorFlow traces, because a
handle's ``wait`` then returns a symbolic tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.exchange.buckets import Bucket
from hvdtrain.exchange.squares import own_parts
from hvdtrain.protocols import (
    AllGather, AllReduce, Array, Cell, Collectives, Compressor, Exchange, Handle, Ops, Request,
)


class Reducer:
    """Sums every bucket of a step over the ranks.

    ``begin`` opens a step. ``start(i, flat_N)`` may be called in any order, buckets are put on the wire by index, so
    that all ranks issue the same sequence. ``finish`` returns the summed vectors by bucket. Compressor state lives in
    cells, a dict of them per bucket; ``stage`` is the compressor's stage of warm-up in this step. ``undoable``: whether
    a step may be discarded, for which the state before it is kept. ``looks`` is False only in the bench that tells
    what looking at the sums costs.
    """

    looks = True
    undoable = True

    def __init__(self, buckets: Sequence[Bucket], compressor: Compressor, collectives: Collectives, ops: Ops,
                 group_name: str = "world") -> None:
        self.buckets = list(buckets)
        self.collectives = collectives
        self.compressor = compressor
        self.ops = ops
        self.stage = compressor.stage(0)
        self.steps = 0
        self._name = group_name
        self._check()
        self._ops_of = [ops] * len(self.buckets)
        self._cells = self._in_cells(self._fresh())
        self._before: list[dict[str, Array]] = []
        self._reset()

    def spread(self, ops_of_place: Sequence[Ops]) -> None:
        """Work on each bucket with ``ops_of_place[bucket.place]``; its state, as it is, moves to that device."""
        before = [{k: np.array(self.ops.to_host(x)) for k, x in state.items()} for state in self.states]
        self._ops_of = [ops_of_place[b.place] for b in self.buckets]
        self._cells = self._in_cells([{k: ops.from_host(x) for k, x in state.items()}
                                      for ops, state in zip(self._ops_of, before)])

    @property
    def states(self) -> list[dict[str, Array]]:
        """Compressor state of each bucket, read now."""
        return [{key: cell.read() for key, cell in cells.items()} for cells in self._cells]

    def _in_cells(self, states: Sequence[dict[str, Array]]) -> list[dict[str, Cell]]:
        return [{key: ops.cell(x) for key, x in state.items()} for ops, state in zip(self._ops_of, states)]

    def _write(self, states: Sequence[dict[str, Array]]) -> None:
        for cells, state in zip(self._cells, states):
            for key, cell in cells.items():
                cell.write(state[key])

    def _fresh(self) -> list[dict[str, Array]]:
        """State of each bucket before its first exchange."""
        return [self.compressor.init(ops, b) if b.n else {} for ops, b in zip(self._ops_of, self.buckets)]

    def _check(self) -> None:
        """Raise `UserError` where compressor, collectives and parameters do not go together."""
        taken, wire = self.compressor.dtypes, self.collectives
        dtypes = {b.dtype for b in self.buckets}
        if not self.alone and taken is None and dtypes - wire.dtypes:
            raise UserError(f"there are parameters of type {min(dtypes - wire.dtypes)}", f"types that {wire.name} can "
                            "sum: " + ", ".join(sorted(wire.dtypes)), "cast the model to one of them")
        if taken is not None and dtypes - taken:
            raise UserError(f"compression {self.compressor.name} with parameters of type {min(dtypes - taken)}",
                            f"gradients of type {', '.join(sorted(taken))}", "set compression: none")
        lacking = self.compressor.reductions - wire.reductions
        if lacking:
            raise UserError(f"{min(lacking)} over {wire.name}, which does not offer it",
                            "a Horovod that was built with MPI or NCCL", "set exchange.adasum: false")

    @property
    def alone(self) -> bool:
        """True where a sum over ranks changes nothing, so that nothing need be packed or sent."""
        return self.collectives.size == 1 and self.compressor.name == "none"

    def _reset(self) -> None:
        self._full: dict[int, Array] = {}
        self._started = 0
        self._running: dict[int, _Transfer] = {}

    def buffer(self, bucket: Bucket) -> Array:
        """Zeros to hold one bucket: memory of the collectives' own where they sum that without a copy."""
        own = self.collectives.buffer(bucket.n, bucket.dtype) if self.collectives.host else None
        return self.ops.zeros(bucket.n, bucket.dtype) if own is None else self.ops.from_host(own)

    def begin(self) -> None:
        """Open a step: from here `discard` takes compressor state back to."""
        self.stage = self.compressor.stage(self.steps)
        self.steps += 1
        self._before = self.states if self.undoable else []
        self._looked()  # what was summed between steps does not count

    def squares(self, sums: Sequence[Array]) -> float:
        """The sum of squares over this rank's part of ``sums``; over all ranks that of the whole gradient.

        NaN or infinite where any element is. Taken by the wire, if it looked at just these sums while it made them.
        """
        if not self.looks:
            return 0.0
        n_looked, squares = self._looked()
        if self.compressor.name == "none" and n_looked == sum(b.n for b in self.buckets) and n_looked:
            return squares
        parts = own_parts(sums, self.buckets, self.collectives.rank, self.collectives.size)
        return float(sum(float(self.ops.sum_squares(x)) for x in parts))

    def _looked(self) -> tuple[int, float]:
        """What the wire has squared since the last call, where it does that."""
        looked = getattr(self.collectives, "looked", None)
        return looked() if looked else (0, 0.0)

    def discard(self) -> None:
        """Undo what the step did to the state, if it is ``undoable``, and to the count of steps."""
        self._write(self._before)
        self.steps -= 1

    def saved(self) -> dict[str, np.ndarray]:
        """Compressor state as numpy, with the count of steps and a mark of what it belongs to; {} without state."""
        arrays = {f"compressor.{i}.{key}": np.array(self.ops.to_host(value))
                  for i, state in enumerate(self.states) for key, value in state.items()}
        return {**arrays, "compressor.mark": self._mark(), "compressor.steps": np.array([self.steps])} if arrays else {}

    def restore(self, own: dict[str, np.ndarray]) -> str:
        """Undo `saved`; what is of another plan is not taken, the state starts anew. Returns why, in words, or ""."""
        if "compressor.mark" not in own:
            self.restart()
            return "compressor state starts anew: the checkpoint has none" if any(self._cells) else ""
        if not np.array_equal(own["compressor.mark"], self._mark()):
            self.restart()
            return "compressor state starts anew: compression, buckets or parameters are others than in the checkpoint"
        self._write([{key: ops.from_host(np.array(own[f"compressor.{i}.{key}"])) for key in cells}
                     for i, (ops, cells) in enumerate(zip(self._ops_of, self._cells))])
        self._before = []
        self.steps = int(own["compressor.steps"][0])
        return ""

    def restart(self) -> None:
        """Forget all state and the count of steps."""
        self._write(self._fresh())
        self._before = []
        self.steps = 0

    def _mark(self) -> np.ndarray:
        """int64 (1,): a checksum of the compression and of the buckets it works on."""
        plan = [self.compressor.describe(), *((b.params, b.shapes, b.dtype) for b in self.buckets)]
        return np.array([zlib.crc32(repr(plan).encode())], np.int64)

    def start(self, index: int, flat_N: Array, group_name: str = "") -> None:
        """Hand over a full bucket; its exchange begins as soon as those before it have begun.

        ``group_name``: for the collectives' names in place of the reducer's own, the same for all buckets of a step.
        """
        assert index not in self._full and index >= self._started, f"bucket {index} was handed over twice"
        self._full[index] = flat_N
        while self._started in self._full:
            i = self._started
            bucket, full_N = self.buckets[i], self._full.pop(i)
            generator = _nothing(full_N) if not bucket.n else self.compressor.exchange(
                self._ops_of[i], full_N, {key: cell.read() for key, cell in self._cells[i].items()}, bucket,
                self.collectives.size, self.stage)
            self._running[i] = _Transfer(self, self._ops_of[i], generator, f"{group_name or self._name}.b{i}")
            self._started += 1

    def finish(self, finite_only: bool = False) -> list[Array]:
        """Complete every bucket and return the sums, by bucket; every bucket must have been handed over.

        ``finite_only``: the state of a bucket whose sum is not finite stays as it was.
        """
        assert self._started == len(self.buckets), f"{self._started} of {len(self.buckets)} buckets were handed over"
        try:
            while any(not t.done for t in self._running.values()):
                for i in range(len(self.buckets)):
                    self._running[i].advance()
            results = [transfer.result for _, transfer in sorted(self._running.items())]
            sums = [total_N for total_N, _ in results]
            self._write([self._if_finite(i, *result) if finite_only else result[1]
                         for i, result in enumerate(results)])
        finally:
            self._reset()
        return sums

    def _if_finite(self, index: int, total_N: Array, new: dict[str, Array]) -> dict[str, Array]:
        """``new`` state of a bucket if its sum is finite, else the state that it has."""
        ops, cells = self._ops_of[index], self._cells[index]
        finite = ops.all_finite(total_N) if cells else None
        return {key: ops.select(finite, new[key], cell.read()) for key, cell in cells.items()}

    def issue(self, request: Request, name: str) -> Handle:
        """Put one request on the wire."""
        if isinstance(request, AllReduce):
            return self.collectives.allreduce(self.outgoing(request.flat_N), name, request.op)
        if isinstance(request, AllGather):
            return self.collectives.allgather(self.outgoing(request.x_K), name)
        return self.collectives.alltoall(self.outgoing(request.x_PK), name)

    def outgoing(self, x: Array) -> Array:
        """The backend's array as the collectives want it."""
        return self.ops.to_host(x) if self.collectives.host else x

    def arrived(self, x: Array, ops: Ops | None = None) -> Array:
        """A collective's result as the array of ``ops``, the reducer's own where None."""
        return (ops or self.ops).from_host(x) if self.collectives.host else x


def _nothing(flat_N: Array) -> Exchange:
    """The exchange of a bucket without elements."""
    yield from ()
    return flat_N, {}


class _Transfer:
    """One bucket's generator and its open request."""

    def __init__(self, reducer: Reducer, ops: Ops, generator: Exchange, name: str) -> None:
        self._reducer, self._ops, self._generator, self._name = reducer, ops, generator, name
        self._round = 0
        self._handle: Handle | None = None
        self.done = False
        self.result: tuple[Array, dict[str, Array]] = (None, {})
        self._resume(None)

    def advance(self) -> None:
        """Wait for the open request and go on to the next, or to the result."""
        if not self.done:
            assert self._handle is not None
            self._resume(self._reducer.arrived(self._handle.wait(), self._ops))

    def _resume(self, value: Any) -> None:
        try:
            request = self._generator.send(value)
        except StopIteration as stop:
            self.result, self.done, self._handle = stop.value, True, None
            return
        self._handle = self._reducer.issue(request, f"{self._name}.r{self._round}")
        self._round += 1
