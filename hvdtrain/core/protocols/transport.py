"""Protocols of communication: collectives, channels, the control plane, and the requests of a compressor.

A transport moves gradients, a channel one rank's arrays to another, a carrier whole messages of a pipeline, the
control plane small Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols.types import Array

Counts = Sequence[int] | Array
"""Elements for each rank."""


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Array:
        """Return the result; waits for it outside a graph, returns the symbolic tensor inside one."""

    def done(self) -> bool:
        """Return whether the result is there, without waiting; False where `wait` alone tells."""
        return False


class Collectives(Protocol):
    """Moves gradients: each call takes a deterministic ``name`` and returns a `Handle` (law 5).

    ``dtypes``: names of the dtypes `allreduce` sums. ``overlaps``: work continues while a handle is open.
    ``in_graph``: may be called while TensorFlow traces. ``host``: takes and gives numpy arrays; a backend converts.
    ``reductions``: what `allreduce` can do beside "sum". An `allreduce` may reuse the memory of its argument.
    ``drives``: it goes through the requests of a compressor by itself (`drive`). ``moves_parts``: `reducescatterv` and
    `allgatherv` continue while their handles are open, each in memory of its own.
    """

    name: str
    rank: int
    size: int
    dtypes: frozenset[str]
    reductions: frozenset[str]
    overlaps: bool
    in_graph: bool
    host: bool
    drives: bool

    @property
    def moves_parts(self) -> bool: ...

    def among(self, group: Group) -> Collectives:
        """Return the same kind of wire between the ranks of ``group`` alone, whose ranks count from 0 in it.

        Collective over the group: its members make it at once, and those of several groups in one order.
        """

    def buffer(self, n: int, dtype: str) -> np.ndarray | None:
        """(n,) zeros that `allreduce` sums without a copy, or None where it has no such memory.

        Collective: every rank asks for the same buffers in the same order, before its first exchange.
        """

    def buffers(self, n: int, dtype: str, slots: int) -> list[np.ndarray]:
        """``slots`` vectors such as `buffer` gives, of which each rank may hand over any; [] without such memory.

        Collective, as `buffer`.
        """

    def looked(self) -> tuple[int, float]:
        """Elements summed since the last call, and the sum of squares over this rank's parts of them.

        (0, 0.0) where it squares nothing.
        """

    def drive(self, exchange: Exchange, outgoing: Callable[[Array], np.ndarray], arrived: Callable[[np.ndarray], Array],
              name: str) -> Handle:
        """Issue a compressor's exchange with all its requests; the handle's value is what it returns.

        ``outgoing``, ``arrived``: its arrays as numpy, and back; called in a thread of the transport's. Only with
        ``drives``.
        """

    def flight(self, n: int, dtype: str) -> np.ndarray | None:
        """(n,) of the one vector in flight that `reducescatterv` sums without a copy, or None without such memory.

        The same memory in every call: to be asked for again once the handle of the vector before is done. What it holds
        is left open. Collective where it has to grow. Its sum is in new memory.
        """

    def allreduce(self, flat_N: Array, name: str, op: str = "sum") -> Handle:
        """Combine over ranks, by sum or by another of ``reductions``: (N,) -> (N,)."""

    def allgather(self, x_K: Array, name: str) -> Handle:
        """Every rank's vector, by rank: (K,) -> (P, K)."""

    def alltoall(self, x_PK: Array, name: str) -> Handle:
        """Row p goes to rank p; row q of the result came from rank q: (P, K) -> (P, K)."""

    def alltoallv(self, flat_N: Array, sent_P: Counts, got_P: Counts, name: str) -> Handle:
        """Consecutive parts go to the ranks, in their order, and the result is the parts that came: (N,) -> (N',).

        ``sent_P``: elements to each rank, in sum N; ``got_P``: elements from each, in sum N', which equals what that
        rank sends to this one. Numbers, or while TensorFlow traces also int32 tensors, of an int32 ``flat_N``.
        """

    def reducescatter(self, flat_N: Array, name: str) -> Handle:
        """Return this rank's 1/P of the sum over ranks: (N,) -> (N/P,); N is a multiple of P."""

    def reducescatterv(self, flat_N: Array, sizes_P: Sequence[int], name: str) -> Handle:
        """Return this rank's part of the sum over ranks: (N,) -> (sizes_P[rank],); N is the sum of ``sizes_P``.

        Parts lie in the order of the ranks; some may be empty. Added in the order of the ranks, in float32 at least,
        so that every transport gives the same bits.
        """

    def allgatherv(self, part_K: Array, sizes_P: Sequence[int], name: str) -> Handle:
        """Return the ranks' parts one after the other: (sizes_P[rank],) -> (N,).

        What it returns may be memory of the transport's own, good until the next call of this wire.
        """

    def broadcast(self, x_N: Array, name: str, root: int = 0) -> Handle:
        """``root``'s vector on every rank: (N,) -> (N,)."""


class Channel(Protocol):
    """Moves arrays from one rank to another, beside all collectives: other ranks and threads take no part in it.

    Both sides name a ``tag`` from 0 to 16383; messages of one sender, receiver and tag come in the order in which
    they were sent. Each wait is bounded by ``timeout_s`` and ends with `WaitTimeout`; a message that is not what its
    receiver expects is a RuntimeError there. Threads may use one channel at once, each its own tags.
    """

    rank: int
    size: int
    timeout_s: float

    def send(self, x: np.ndarray, to: int, tag: int) -> Handle:
        """Begin to send the contiguous ``x``, which stays as it is until the handle is done."""

    def receive(self, like: np.ndarray, source: int, tag: int) -> Handle:
        """Begin to receive into the contiguous ``like``, whose dtype and shape the message must have."""

    def close(self) -> None:
        """End every wait of this rank, in whatever thread, with `hvdtrain.cluster.messages.channel.ChannelClosed`."""

    def free(self) -> None:
        """Close the channel and give back what it holds; collective, when no message is under way."""


class PendingMessage(Protocol):
    """A message that was asked for."""

    def wait_begun(self) -> None:
        """Wait until it begins to come: until then its sender has not sent it."""

    def wait(self) -> np.ndarray:
        """Return it, uint8 (n,), in memory that is the receiver's as long as any view of it lives."""


class Carrier(Protocol):
    """Moves whole messages from one rank to another, which say themselves what they are
    (`hvdtrain.parallel.pipeline.messages`).

    A message is the bytes of several arrays, each of which begins at a multiple of 64 in it. Messages of one sender,
    receiver and ``tag`` (0 to 3) come in the order in which they were sent; a rank has one thread that uses it. Each
    wait is bounded and ends with `WaitTimeout`.
    """

    rank: int
    size: int

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = 64) -> None:
        """Send a copy of contiguous ``parts``, which are the caller's again; it goes while the caller computes.

        Waits while ``room`` messages of that tag there are under way.
        """

    def take(self, source: int, tag: int) -> PendingMessage:
        """Ask for the next message; it comes while the caller computes. Messages are waited for in this order."""

    def flush(self) -> None:
        """Wait until all that was put has left this rank."""

    def free(self) -> None:
        """Give back what it holds; collective, when no message is under way."""


class SharedCarrier(Protocol):
    """Moves messages as a `Carrier` does, between the ``ranks`` of one host alone, through memory that they share.

    ``timeout_s``: longest single wait.
    """

    ranks: Sequence[int]
    timeout_s: float

    def put(self, parts: Sequence[np.ndarray], to: int, tag: int, room: int = 64) -> None: ...

    def take(self, source: int, tag: int) -> PendingMessage: ...


@dataclass(frozen=True)
class AllReduce:
    """Ask the driver of a compressor's generator for a sum over ranks of ``flat_N``, or another reduction ``op``."""

    flat_N: Array
    op: str = "sum"


@dataclass(frozen=True)
class AllGather:
    """Ask for every rank's ``x_K``: the answer has shape (P, K)."""

    x_K: Array


@dataclass(frozen=True)
class AllToAll:
    """Ask for the exchange of rows of ``x_PK``: the answer has shape (P, K)."""

    x_PK: Array


@dataclass(frozen=True)
class AllToAllV:
    """Ask for the exchange of shards of different lengths: (N,) -> (N',), as `Collectives.alltoallv`."""

    flat_N: Array
    sent_P: Counts
    got_P: Counts


Request = AllReduce | AllGather | AllToAll | AllToAllV
Exchange = Generator[Request, Array, tuple[Array, dict[str, Array]]]
Spread = Generator[Request, Array, Array]


class Control(Protocol):
    """Moves small Python objects and decisions between the ranks of a job.

    Every method but `abort` is collective: all ranks call it in the same order. Each wait is bounded by the control's
    ``timeout_s``; when it runs out `WaitTimeout` names the wait. Objects are pickled, inside the job only. ``notes``:
    what its start found that a user should know.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    timeout_s: float
    notes: list[str]

    def bcast(self, obj: Any) -> Any:
        """Return rank 0's ``obj`` on every rank."""

    def gather(self, obj: Any) -> list[Any]:
        """Return the list of every rank's ``obj``, by rank, on every rank."""

    def send(self, arrays: Sequence[np.ndarray], source: int, target: int | None = None) -> None:
        """Overwrite ``target``'s ``arrays`` with ``source``'s, or every rank's where that is None; no pickling.

        ``arrays``: contiguous (n,), as many and as long on both; elsewhere not looked at. Together they should be
        small (`hvdtrain.checkpoint.stream.PIECE_BYTES`): without MPI all ranks receive them, and all but
        ``target`` drop them.
        """

    def sum(self, values_k: np.ndarray) -> np.ndarray:
        """Return the float64[k] sum over ranks, the same bits on every rank."""

    def agree(self, flag: bool) -> bool:
        """Return True on every rank if any rank's ``flag`` is true (law 6)."""

    def barrier(self, tag: str, timeout_s: float | None = None) -> None:
        """Return once every rank is here; ``tag`` names the place in the error of a wait that ran out."""

    def channel(self, longest_sleep_s: float = 200e-6) -> Channel | None:
        """Open a channel between these ranks that threads may use; None where nothing here carries one. Collective.

        ``longest_sleep_s``: how long a wait in it sleeps between two looks at most.
        """

    def carrier(self) -> Carrier | None:
        """Open what carries a pipeline's messages between these ranks; None where nothing here does. Collective."""

    def shared_carrier(self) -> SharedCarrier | None:
        """Open a carrier among the ranks of this host; None where there is one only, or no shared memory. Collective.

        Its memory goes with the last reference to it.
        """

    def abort(self, code: int) -> None:
        """End every rank at once with exit status ``code``; does not return in a job of several ranks."""
