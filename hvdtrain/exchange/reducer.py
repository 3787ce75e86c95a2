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
from hvdtrain.protocols import AllGather, AllReduce, Array, Collectives, Compressor, Exchange, Handle, Ops, Request


class Reducer:
    """Sums every bucket of a step over the ranks.

    ``begin`` opens a step. ``start(i, flat_N)`` may be called in any order, buckets are put on the wire by index, so
    that all ranks issue the same sequence. ``finish`` returns the summed vectors by bucket. One compressor state per
    bucket in ``states``; ``stage`` is the compressor's stage of warm-up in this step. ``looks`` is False only in the
    bench that tells what looking at the sums costs.
    """

    looks = True

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
        self.states: list[dict[str, Array]] = [self._fresh(b) for b in self.buckets]
        self._before = list(self.states)
        self._reset()

    def _fresh(self, bucket: Bucket) -> dict[str, Array]:
        return self.compressor.init(self.ops, bucket) if bucket.n else {}

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
        self._before = list(self.states)
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
        """Undo what the step did to the states and to the count of steps."""
        self.states = list(self._before)
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
            return "compressor state starts anew: the checkpoint has none" if any(self.states) else ""
        if not np.array_equal(own["compressor.mark"], self._mark()):
            self.restart()
            return "compressor state starts anew: compression, buckets or parameters are others than in the checkpoint"
        self._assign([{key: own[f"compressor.{i}.{key}"] for key in state} for i, state in enumerate(self.states)])
        self.steps = int(own["compressor.steps"][0])
        return ""

    def restart(self) -> None:
        """Forget all state and the count of steps."""
        self._assign([{k: np.array(self.ops.to_host(v)) for k, v in self._fresh(b).items()} for b in self.buckets])
        self.steps = 0

    def _assign(self, values: Sequence[dict[str, np.ndarray]]) -> None:
        """Give every state array a value; variables of a graph stay the same objects."""
        for state, value in zip(self.states, values):
            for key, like in state.items():
                if hasattr(like, "assign"):
                    like.assign(value[key])
                else:
                    state[key] = self.ops.from_host(np.array(value[key]))
        self._before = list(self.states)

    def _mark(self) -> np.ndarray:
        """int64 (1,): a checksum of the compression and of the buckets it works on."""
        plan = [self.compressor.describe(), *((b.params, b.shapes, b.dtype) for b in self.buckets)]
        return np.array([zlib.crc32(repr(plan).encode())], np.int64)

    def start(self, index: int, flat_N: Array) -> None:
        """Hand over a full bucket; its exchange begins as soon as those before it have begun."""
        assert index not in self._full and index >= self._started, f"bucket {index} was handed over twice"
        self._full[index] = flat_N
        while self._started in self._full:
            i = self._started
            bucket, full_N = self.buckets[i], self._full.pop(i)
            generator = _nothing(full_N) if not bucket.n else self.compressor.exchange(
                self.ops, full_N, self.states[i], bucket, self.collectives.size, self.stage)
            self._running[i] = _Transfer(self, generator, f"{self._name}.b{i}")
            self._started += 1

    def finish(self) -> list[Array]:
        """Complete every bucket and return the sums, by bucket; every bucket must have been handed over."""
        assert self._started == len(self.buckets), f"{self._started} of {len(self.buckets)} buckets were handed over"
        sums = []
        try:
            while any(not t.done for t in self._running.values()):
                for i in range(len(self.buckets)):
                    self._running[i].advance()
            for i, transfer in sorted(self._running.items()):
                total_N, self.states[i] = transfer.result
                sums.append(total_N)
        finally:
            self._reset()
        return sums

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

    def arrived(self, x: Array) -> Array:
        """A collective's result as the backend's array."""
        return self.ops.from_host(x) if self.collectives.host else x


def _nothing(flat_N: Array) -> Exchange:
    """The exchange of a bucket without elements."""
    yield from ()
    return flat_N, {}


class _Transfer:
    """One bucket's generator and its open request."""

    def __init__(self, reducer: Reducer, generator: Exchange, name: str) -> None:
        self._reducer, self._generator, self._name = reducer, generator, name
        self._round = 0
        self._handle: Handle | None = None
        self.done = False
        self.result: tuple[Array, dict[str, Array]] = (None, {})
        self._resume(None)

    def advance(self) -> None:
        """Wait for the open request and go on to the next, or to the result."""
        if not self.done:
            assert self._handle is not None
            self._resume(self._reducer.arrived(self._handle.wait()))

    def _resume(self, value: Any) -> None:
        try:
            request = self._generator.send(value)
        except StopIteration as stop:
            self.result, self.done, self._handle = stop.value, True, None
            return
        self._handle = self._reducer.issue(request, f"{self._name}.r{self._round}")
        self._round += 1
