"""Transport of one backend's arrays: what a model sends outside its steps, and the exchange of a bucket through a
compressor.

`Stepped` makes one request after the other; `Driven` leaves all of it to collectives that advance by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from hvdtrain.core.protocols import (
    AllGather,
    AllReduce,
    AllToAllV,
    Array,
    Collectives,
    Compressor,
    Exchange,
    Handle,
    Ops,
    Request,
)
from hvdtrain.core.protocols.transport import Counts
from hvdtrain.core.protocols.types import Bucket, Shards, itemsize
from hvdtrain.core.timeline import Taker
from hvdtrain.core.units import MIB


class Transport:
    """Arrays of ``ops`` over ``collectives``; all but `issue` are complete, in a graph symbolic, on return."""

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
        """Issue a compressor's request; its result has yet to be waited for, and `arrived`."""
        if isinstance(request, AllReduce):
            return self.collectives.allreduce(self.outgoing(request.flat_N), name, request.op)
        if isinstance(request, AllGather):
            return self.collectives.allgather(self.outgoing(request.x_K), name)
        if isinstance(request, AllToAllV):
            return self.collectives.alltoallv(self.outgoing(request.flat_N), self._counts(request.sent_P),
                                              self._counts(request.got_P), name)
        return self.collectives.alltoall(self.outgoing(request.x_PK), name)

    def _counts(self, counts_P: Counts) -> Counts:
        if self.collectives.in_graph or isinstance(counts_P, (list, tuple)):
            return counts_P
        return [int(n) for n in self.ops.to_host(counts_P)]

    def allreduce(self, flat_N: Array, name: str) -> Array:
        """Return the sum over ranks: (N,) -> (N,)."""
        return self.arrived(self.collectives.allreduce(self.outgoing(flat_N), name).wait())

    def allgather(self, x_K: Array, name: str) -> Array:
        return self.arrived(self.collectives.allgather(self.outgoing(x_K), name).wait())

    def broadcast(self, x_N: Array, name: str, root: int = 0) -> Array:
        return self.arrived(self.collectives.broadcast(self.outgoing(x_N), name, root).wait())


class ArrayCell:
    """Implements `hvdtrain.core.protocols.StateCell` by holding the array itself, which its users never write to."""

    def __init__(self, value: Array) -> None:
        self._value = value

    def read(self) -> Array:
        return self._value

    def write(self, x: Array) -> None:
        self._value = x


PIECE_BYTES = 2 * MIB
"""Bytes of a piece of a bucket that a compressor takes apart: one is encoded while another travels."""


class Transfer(Protocol):
    """A bucket's exchange. ``asked``: a request was made. ``done``: ``result`` is (sum_N, new state)."""

    asked: bool
    done: bool
    result: tuple[Array, dict[str, Array]]

    def begin(self) -> None:
        """Go as far as it goes without waiting."""

    def advance(self) -> None:
        """Wait for what is open, and continue."""


def transfer(wire: Transport, compressor: Compressor, bucket: Bucket, full_N: Array, state: dict[str, Array],
             stage: int, name: str, watched: TracedBucket | None, shards: Shards | None = None) -> Transfer:
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
    yield from ()
    return flat_N, {}


def _written(wire: Transport, exchange: Exchange, into_N: Array) -> Exchange:
    """Run ``exchange`` and write its sum over the gradient, where arrays can be written to, which saves a copy."""
    sum_N, state = yield from exchange
    return wire.ops.overwrite(into_N, sum_N), state


class Stepped:
    """Generator of a compressor and its open request. ``watched``: its times in a trace."""

    def __init__(self, wire: Transport, exchange: Exchange, name: str, watched: TracedBucket | None = None) -> None:
        self._wire, self._exchange, self._name, self._watched = wire, exchange, name, watched
        self._round = 0
        self._handle: Handle | None = None
        self.done = self.asked = False
        self.result: tuple[Array, dict[str, Array]] = (None, {})

    def begin(self) -> None:
        self._resume(None)

    def advance(self) -> None:
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
    """Exchanges of a bucket's pieces in the collectives from `begin` on; ``full_N``: the bucket, for sums."""

    def __init__(self, wire: Transport, exchanges: Sequence[Exchange], name: str, full_N: Array,
                 watched: TracedBucket | None = None) -> None:
        self._wire, self._exchanges, self._name = wire, exchanges, name
        self._full_N = full_N if len(exchanges) > 1 else None  # else its memory is needed no longer than its exchange
        self._watched = watched
        self._handles: list[Any] = []
        self.done = self.asked = False
        self.result: tuple[Array, dict[str, Array]] = (None, {})

    def begin(self) -> None:
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
    """Several handles as one, for a trace."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)


ASK_EVERY_S = 100e-6
IDLE_S = 0.05
"""Seconds after which the polling thread ends; the next request has a new one."""


class TracedBucket:
    """A bucket of ``nbytes``, handed over when this is made; a span for each of its requests.

    ``overlaps``: a request is in transit when it is made, else when it is waited for. ``asker``: polls handles.
    """

    def __init__(self, taker: Taker, nbytes: int, overlaps: bool, asker: Asker) -> None:
        self._taker, self._nbytes, self._overlaps, self._asker = taker, nbytes, overlaps, asker
        self._name = ""
        self._handle: Handle | None = None
        self._queued_s = time.perf_counter()
        self._sent_s = self._arrived_s = 0.0

    def made(self, name: str, handle: Handle) -> None:
        """Note a request called ``name``."""
        self._name, self._handle, self._arrived_s = name, handle, 0.0
        if not self._overlaps:
            return
        self._send()
        self._asker.ask(handle, self)

    def waits(self) -> None:
        """Note that the open request is waited for from here on."""
        if not self._overlaps:
            self._send()

    def waits_for(self, handle: Handle) -> bool:
        """Return whether the result of ``handle`` has not arrived yet."""
        return handle is self._handle and not self._arrived_s

    def arrived(self, handle: Handle) -> None:
        """Note that the result of ``handle`` is there; the first call counts. Called from any thread."""
        if self.waits_for(handle):
            self._arrived_s = time.perf_counter()

    def taken(self) -> None:
        """Note that the result has been waited for, and record the spans."""
        assert self._handle is not None
        self.arrived(self._handle)
        args = {"bytes": self._nbytes, "beside": self._overlaps}
        self._taker.take(self._name, "queue", self._queued_s, self._sent_s, args)
        self._taker.take(self._name, "wire", self._sent_s, self._arrived_s, args)
        self._queued_s = time.perf_counter()  # what follows is the way of the next request

    def _send(self) -> None:
        self._sent_s = time.perf_counter()


class Asker:
    """A thread that polls open handles."""

    def __init__(self) -> None:
        self._open: list[tuple[Handle, TracedBucket]] = []
        self._changed = threading.Condition()
        self._runs = False

    def ask(self, handle: Handle, watched: TracedBucket) -> None:
        """Have ``watched`` hear when ``handle`` is done."""
        with self._changed:
            self._open.append((handle, watched))
            self._changed.notify()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="hvdtrain-trace", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._open and not self._changed.wait(IDLE_S):
                    self._runs = False
                    return
                asked = list(self._open)
            done = [pair for pair in asked if _is_done(pair[0])]
            for handle, watched in done:
                watched.arrived(handle)
            with self._changed:
                self._open = [pair for pair in self._open if pair[1].waits_for(pair[0])]
            time.sleep(ASK_EVERY_S)


def _is_done(handle: Handle) -> bool:
    """Return whether it is done; one that was waited for meanwhile may raise."""
    try:
        return bool(handle.done())
    except Exception:  # Horovod's ValueError of a handle that is gone, or its shutdown
        return True
