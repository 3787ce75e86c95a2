"""Drives compressors over collectives: starts each full bucket, in order, and collects the sums.

Owns the order of collectives and their names (law 5). Knows no framework: arrays pass through untouched, or as
numpy where the collectives live on the host. The same code runs eagerly and while TensorFlow traces, because a
handle's ``wait`` then returns a symbolic tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.exchange.buckets import Bucket
from hvdtrain.protocols import AllGather, AllReduce, Array, Collectives, Compressor, Exchange, Handle, Ops, Request


class Reducer:
    """Sums every bucket of a step over the ranks.

    ``start(i, flat_N)`` may be called in any order, buckets are put on the wire by index, so that all ranks issue
    the same sequence. ``finish`` returns the summed vectors by bucket. One compressor state per bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], compressor: Compressor, collectives: Collectives, ops: Ops,
                 group_name: str = "world") -> None:
        self.buckets = list(buckets)
        self.collectives = collectives
        self.compressor = compressor
        self.ops = ops
        self.states: list[dict[str, Array]] = [compressor.init(ops, b.n) for b in self.buckets]
        self._name = group_name
        self._reset()
        foreign = sorted({b.dtype for b in self.buckets} - collectives.dtypes)
        if foreign and compressor.name == "none" and not self.alone:
            raise UserError(f"there are parameters of type {foreign[0]}", f"types that {collectives.name} can sum: "
                            + ", ".join(sorted(collectives.dtypes)), "cast the model to one of them")

    @property
    def alone(self) -> bool:
        """True where a sum over ranks changes nothing, so that nothing need be packed or sent."""
        return self.collectives.size == 1 and self.compressor.name == "none"

    def _reset(self) -> None:
        self._full: dict[int, Array] = {}
        self._started = 0
        self._running: dict[int, _Transfer] = {}

    def start(self, index: int, flat_N: Array) -> None:
        """Hand over a full bucket; its exchange begins as soon as those before it have begun."""
        assert index not in self._full and index >= self._started, f"bucket {index} was handed over twice"
        self._full[index] = flat_N
        while self._started in self._full:
            i = self._started
            generator = self.compressor.exchange(self.ops, self._full.pop(i), self.states[i], self.collectives.size)
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
            return self.collectives.allreduce(self.outgoing(request.flat_N), name)
        if isinstance(request, AllGather):
            return self.collectives.allgather(self.outgoing(request.x_K), name)
        return self.collectives.alltoall(self.outgoing(request.x_PK), name)

    def outgoing(self, x: Array) -> Array:
        """The backend's array as the collectives want it."""
        return self.ops.to_host(x) if self.collectives.host else x

    def arrived(self, x: Array) -> Array:
        """A collective's result as the backend's array."""
        return self.ops.from_host(x) if self.collectives.host else x


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
