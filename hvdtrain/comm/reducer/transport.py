"""Collectives for one backend's arrays: what a model sends outside its steps, and a compressor's requests in them."""

from __future__ import annotations

from hvdtrain.core.protocols import AllGather, AllReduce, AllToAllV, Array, Collectives, Handle, Ops, Request
from hvdtrain.core.protocols.transport import Counts


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
