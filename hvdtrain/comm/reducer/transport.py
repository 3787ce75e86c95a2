"""Collectives for one backend's arrays: what a model sends outside its steps, and a compressor's requests in them."""

from __future__ import annotations

from hvdtrain.comm.reducer.watched import Watched
from hvdtrain.core.protocols import (
    AllGather, AllReduce, AllToAllV, Array, Collectives, Compressor, Exchange, Handle, Ops, Request)
from hvdtrain.core.protocols.transport import Counts
from hvdtrain.core.protocols.types import Bucket, Shards, itemsize
from hvdtrain.core.units import MIB
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol


class Transport:
    """``collectives`` and the ``ops`` of the arrays that go over them.

    All but `issue` are complete when they return, in a graph with a symbolic tensor.
    """

    def __init__(self, collectives: Collectives, ops: Ops) -> None:
        self.collectives, self.ops = collectives, ops
        self.rank, self.size = collectives.rank, collectives.size

    def outgoing(self, x: Array) -> Array:
        """Return the backend's array as the collectives want it."""
        return self.ops.to_host(x) if self.collectives.host else x

    def arrived(self, x: Array) -> Array:
        """Return a collective's result as the backend's array."""
        return self.ops.from_host(x) if self.collectives.host else x

    def issue(self, request: Request, name: str) -> Handle:
        """Put a compressor's request on the wire; its result has yet to be waited for, and `arrived`."""
        if isinstance(request, AllReduce):
            return self.collectives.allreduce(self.outgoing(request.flat_N), name, request.op)
        if isinstance(request, AllGather):
            return self.collectives.allgather(self.outgoing(request.x_K), name)
        if isinstance(request, AllToAllV):
            return self.collectives.alltoallv(self.outgoing(request.flat_N), self._counts(request.sent_P),
                                              self._counts(request.got_P), name)
        return self.collectives.alltoall(self.outgoing(request.x_PK), name)

    def _counts(self, counts_P: Counts) -> Counts:
        """Return numbers as the collectives take them."""
        if self.collectives.in_graph or isinstance(counts_P, (list, tuple)):
            return counts_P
        return [int(n) for n in self.ops.to_host(counts_P)]

    def allreduce(self, flat_N: Array, name: str) -> Array:
        """Return the sum over ranks: (N,) -> (N,)."""
        return self.arrived(self.collectives.allreduce(self.outgoing(flat_N), name).wait())

    def allgather(self, x_K: Array, name: str) -> Array:
        """Return every rank's vector, by rank: (K,) -> (P, K)."""
        return self.arrived(self.collectives.allgather(self.outgoing(x_K), name).wait())

    def broadcast(self, x_N: Array, name: str, root: int = 0) -> Array:
        """Return ``root``'s vector: (N,) -> (N,)."""
        return self.arrived(self.collectives.broadcast(self.outgoing(x_N), name, root).wait())


class ArrayCell:
    """Implements `hvdtrain.core.protocols.StateCell` by holding the array itself, which its users never write to."""

    def __init__(self, value: Array) -> None:
        self._value = value

    def read(self) -> Array:
        """Return what was written last."""
        return self._value

    def write(self, x: Array) -> None:
        """Hold ``x`` instead."""
        self._value = x


PIECE_BYTES = 2 * MIB
"""Of a bucket that a compressor takes apart: one is encoded while another travels."""


class Transfer(Protocol):
    """A bucket's exchange. ``asked``: a request was made. ``done``: ``result`` is (sum_N, new state)."""

    asked: bool
    done: bool
    result: tuple[Array, dict[str, Array]]

    def begin(self) -> None:
        """Go as far as it goes without waiting."""
        ...

    def advance(self) -> None:
        """Wait for what is open, and go on."""
        ...


def transfer(wire: Transport, compressor: Compressor, bucket: Bucket, full_N: Array, state: dict[str, Array],
             stage: int, name: str, watched: Watched | None, shards: Shards | None = None) -> Transfer:
    """Return the transfer of a full bucket; nothing has begun. ``name``: what its collectives' names begin with.

    ``shards``: its result is this rank's shard of the sum; None: the sum.
    """
    if not bucket.n:
        return Stepped(wire, _nothing(full_N), name, watched)
    if shards is not None:
        exchange = compressor.scatter(wire.ops, full_N, state, bucket, shards, stage)
        drives = wire.collectives.drives
        return Driven(wire, [exchange], name, full_N, watched) if drives else Stepped(wire, exchange, name, watched)
    if compressor.in_place or not wire.collectives.drives:
        return Stepped(wire, compressor.exchange(wire.ops, full_N, state, bucket, wire.size, stage), name, watched)
    length = PIECE_BYTES // itemsize(bucket.dtype) // wire.size * wire.size if compressor.elementwise else bucket.n
    exchanges = []
    for begin in range(0, bucket.n, length):
        piece = replace(bucket, n=min(length, bucket.n - begin))
        part_N = full_N if piece.n == bucket.n else full_N[begin:begin + piece.n]
        exchange = compressor.exchange(wire.ops, part_N, state, piece, wire.size, stage)
        exchanges.append(_written(wire, exchange, part_N))
    return Driven(wire, exchanges, name, full_N, watched)


def _nothing(flat_N: Array) -> Exchange:
    """The exchange of a bucket without elements."""
    yield from ()
    return flat_N, {}


def _written(wire: Transport, exchange: Exchange, into_N: Array) -> Exchange:
    """Run ``exchange`` and write its sum over the gradient, where arrays can be written to: nobody copies it later."""
    sum_N, state = yield from exchange
    return wire.ops.overwrite(into_N, sum_N), state


class Stepped:
    """A generator and its open request. ``watched``: tells a trace."""

    def __init__(self, wire: Transport, exchange: Exchange, name: str, watched: Watched | None = None) -> None:
        self._wire, self._exchange, self._name, self._watched = wire, exchange, name, watched
        self._round = 0
        self._handle: Handle | None = None
        self.done = self.asked = False
        self.result: tuple[Array, dict[str, Array]] = (None, {})

    def begin(self) -> None:
        """Compute up to the first request, and make it."""
        self._resume(None)

    def advance(self) -> None:
        """Wait for the open request and go on to the next, or to the result."""
        if not self.done:
            assert self._handle is not None
            if self._watched is not None:
                self._watched.waits()
            value = self._handle.wait()
            if self._watched is not None:
                self._watched.taken()
            self._resume(self._wire.arrived(value))

    def _resume(self, value: Any) -> None:
        try:
            request = self._exchange.send(value)
        except StopIteration as stop:
            self.result, self.done, self._handle = stop.value, True, None
            return
        self.asked = True
        name = f"{self._name}.r{self._round}"
        self._handle = self._wire.issue(request, name)
        if self._watched is not None:
            self._watched.made(name, self._handle)
        self._round += 1


class Driven:
    """The exchanges of a bucket's consecutive pieces, all of them the wire's from `begin` on.

    ``full_N``: the bucket, in which the sums are where arrays can be written to.
    """

    def __init__(self, wire: Transport, exchanges: Sequence[Exchange], name: str, full_N: Array,
                 watched: Watched | None = None) -> None:
        self._wire, self._exchanges, self._name = wire, exchanges, name
        self._full_N = full_N if len(exchanges) > 1 else None  # else its memory is needed no longer than its exchange
        self._watched = watched
        self._handles: list[Any] = []
        self.done = self.asked = False
        self.result: tuple[Array, dict[str, Array]] = (None, {})

    def begin(self) -> None:
        """Hand all pieces to the wire."""
        self.asked = True
        self._handles = list(self._issued())
        if self._watched is not None:
            self._watched.made(self._name, _All(self._handles))

    def _issued(self) -> Iterator[Any]:
        wire = self._wire
        for j, exchange in enumerate(self._exchanges):
            name = f"{self._name}.p{j}" if len(self._exchanges) > 1 else self._name
            yield wire.collectives.drive(exchange, wire.outgoing, wire.arrived, name)

    def advance(self) -> None:
        """Wait for all of it."""
        if self.done:
            return
        if self._watched is not None:
            self._watched.waits()
        found = [handle.wait() for handle in self._handles]
        if self._watched is not None:
            self._watched.taken()
        sums, (_, state) = [sum_N for sum_N, _ in found], found[-1]
        if len(sums) > 1:
            sums = [self._full_N if self._wire.ops.writes else self._wire.ops.pack(sums)]
        self.result, self.done = (sums[0], state), True
        self._handles = []


class _All(Handle):
    """Several handles as one, for who looks on."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Nobody waits for it."""
        raise NotImplementedError

    def done(self) -> bool:
        """Return whether all are."""
        return all(handle.done() for handle in self._handles)
