"""Collectives over host memory for tensors of a GPU: `exchange_device: cpu`.

Owns the way of a tensor to host memory and back, and the two threads that keep it moving: `StagedCollectives` wraps
collectives of host memory (Horovod's operations on CPU tensors, or a wire that takes numpy) and never lets the thread
that computes wait for a copy. What moves between hosts, and in which order ranks issue it (law 5), stays the
business of the wrapped collectives and of the caller.

One transfer: the issuing thread queues the copy into pinned memory behind the work that makes the tensor; the first
thread waits for that copy and puts the collective on the wire; the second waits for the collective and queues the copy
back; `wait` lets the current stream wait for that copy, not the host. Both threads take transfers in the order of
issue, so that a wire whose calls block sees the same sequence on every rank, while Horovod has several open at once
and can fuse them. A tensor that lies in host memory already is passed on as it is, in the same sequence: ranks
with and without a GPU can be in one job.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from hvdtrain.cluster.deadline import deadline
from hvdtrain.comm.collectives.parts import WithoutMemory
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Collectives, Handle
from hvdtrain.core.timeline import blocked

Key = tuple[str, torch.dtype, int]


class Memory:
    """Host memory that transfers borrow: kept by name, dtype and number of elements, lent to one at a time.

    A step asks for the same vectors as the step before, and making pinned memory takes longer than a copy. ``free`` of
    a loan is what must have passed before the memory may be written to again; it comes back with the next loan.
    """

    def __init__(self, make: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._make = make
        self._idle: dict[Key, list[tuple[torch.Tensor, Any]]] = {}

    def lend(self, key: Key) -> tuple[torch.Tensor, Any]:
        """(memory (n,), free); new memory, free at once, where all of that key is lent."""
        try:
            return self._idle[key].pop()
        except (KeyError, IndexError):
            return self._make(key[2], key[1]), None

    def take_back(self, key: Key, memory: torch.Tensor, free: Any) -> None:
        """End a loan. May be called by another thread than `lend`."""
        self._idle.setdefault(key, []).append((memory, free))


class Here:
    """The lane of tensors in host memory: nothing is copied."""

    def leave(self, x: torch.Tensor, key: Key | None) -> tuple[torch.Tensor, Any]:
        """Begin the way of ``x`` to host memory: (the tensor there, what `landed` waits for). Does not wait.

        ``key``: of the memory to borrow; None: memory for this once.
        """
        return x, None

    def landed(self, token: Any) -> None:
        """Return once the tensor in host memory is whole."""

    def back(self, result: torch.Tensor, into: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """Begin the way of a result, written to ``into`` where given: (the tensor, what `join` waits for)."""
        return result, None

    def end(self, key: Key | None, host: torch.Tensor, token: Any) -> None:
        """The memory that `leave` borrowed may be lent again once ``token`` of `back` has passed."""

    def join(self, out: torch.Tensor, token: Any) -> None:
        """Order what the calling thread computes next behind the result."""


class HostLane(Here):
    """Copies within host memory: the steps of `CudaLane` where there is no GPU, for tests."""

    def __init__(self) -> None:
        self.memory = Memory(lambda n, dtype: torch.empty(n, dtype=dtype))

    def leave(self, x: torch.Tensor, key: Key | None) -> tuple[torch.Tensor, Any]:
        host = _borrow(self.memory, x, key)[0].view(x.shape)
        return host.copy_(x), None

    def back(self, result: torch.Tensor, into: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        return (result.clone() if into is None else into.copy_(result)), None

    def end(self, key: Key | None, host: torch.Tensor, token: Any) -> None:
        if key is not None:
            self.memory.take_back(key, host.view(-1), token)


class CudaLane(Here):
    """Copies between a GPU and pinned memory, on one stream in each direction, so that both are busy at once."""

    def __init__(self, device: torch.device) -> None:
        self.memory = Memory(lambda n, dtype: torch.empty(n, dtype=dtype, pin_memory=True))
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def leave(self, x: torch.Tensor, key: Key | None) -> tuple[torch.Tensor, Any]:
        flat_N, free = _borrow(self.memory, x, key)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        if free is not None:
            self._down.wait_event(free)  # the copy out of this memory, of the transfer before
        host = flat_N.view(x.shape)
        with torch.cuda.stream(self._down):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._down)  # its memory is not given to another tensor before the copy has passed
        return host, self._mark(self._down)

    def landed(self, token: Any) -> None:
        token.synchronize()

    def back(self, result: torch.Tensor, into: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self._up):
            out = torch.empty(result.shape, dtype=result.dtype, device=self._device) if into is None else into
            out.copy_(result, non_blocking=True)
        out.record_stream(self._up)
        return out, self._mark(self._up)

    def end(self, key: Key | None, host: torch.Tensor, token: Any) -> None:
        if key is not None:
            self.memory.take_back(key, host.view(-1), token)

    def join(self, out: torch.Tensor, token: Any) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(token)
        out.record_stream(current)

    def _mark(self, stream: Any) -> Any:
        """An event behind what the stream has so far; a thread that waits for it sleeps instead of spinning."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


def _borrow(memory: Memory, x: torch.Tensor, key: Key | None) -> tuple[torch.Tensor, Any]:
    """Memory (n,) for the elements of ``x``, and when it is free; not to be kept where there is no key."""
    return memory.lend(("", x.dtype, x.numel()) if key is None else key)


class _Transfer:
    """One collective under way; a `Handle`. ``ended`` is set once it has its result or its ``error``."""

    def __init__(self, lane: Here, x: torch.Tensor, key: Key | None, call: Callable[[torch.Tensor], Handle],
                 in_place: bool, limit: tuple[float, str], name: str) -> None:
        self._lane, self._key, self._call, self._limit, self._name = lane, key, call, limit, name
        self._came_s = 0.0
        self._into = x if in_place else None
        self._host, self._token = lane.leave(x, key)
        self._pending: Handle | None = None
        self._out: torch.Tensor | None = None
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def send(self) -> None:
        """Put the collective on the wire once its argument is in host memory."""
        self._lane.landed(self._token)
        self._came_s = time.perf_counter()
        self._pending = self._call(self._host)

    def receive(self) -> None:
        """Wait for the collective and begin the way back."""
        assert self._pending is not None
        result = self._pending.wait()
        if not isinstance(result, torch.Tensor):
            result = torch.from_numpy(result if result.flags.writeable else result.copy())
        if result.data_ptr() == self._host.data_ptr() and result.shape == self._host.shape:
            result = self._host  # summed in place: a tensor of numpy's does not tell torch that its memory is pinned
        self._out, self._token = self._lane.back(result, self._into)
        self._lane.end(self._key, self._host, self._token)

    def wait(self) -> torch.Tensor:
        """The result; what the calling thread computes with it from here on is ordered behind its arrival."""
        with deadline(*self._limit), blocked(self._name) as stood:
            self.ended.wait()
            stood.came_s = self._came_s  # others wait for the device, too
        if self.error is not None:
            raise self.error
        assert self._out is not None
        self._lane.join(self._out, self._token)
        return self._out

    def done(self) -> bool:
        """Return whether the result is on its way back to the device, or the collective has failed."""
        return self.ended.is_set()


class _Pipe:
    """Two threads through which transfers pass in the order of issue.

    After an error nothing more goes to the wire, since ranks are no longer at the same place: every transfer behind the
    one that failed ends with that error. The threads are daemons: the end of the process does not wait for them.
    """

    def __init__(self) -> None:
        self.issued: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._sent: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._failure: BaseException | None = None
        for work in (self._send, self._receive):
            threading.Thread(target=work, name=f"hvdtrain-staged{work.__name__}", daemon=True).start()

    def _send(self) -> None:
        while (transfer := self.issued.get()) is not None:
            transfer.error = self._failure or _error_of(transfer.send)
            self._failure = self._failure or transfer.error
            self._sent.put(transfer)
            del transfer  # else this thread would hold the last tensors until the next step
        self._sent.put(None)

    def _receive(self) -> None:
        failure: BaseException | None = None
        while (transfer := self._sent.get()) is not None:
            failure = transfer.error = failure or transfer.error or _error_of(transfer.receive)
            self._failure = self._failure or failure
            transfer.ended.set()
            del transfer


def _error_of(work: Callable[[], None]) -> BaseException | None:
    """Do it; return what it raised, which is for the thread that waits."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001
        return error
    return None


class _Own:
    """A handle whose numpy result outlives the next call of its wire: a transfer's is read while others go on."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> Any:
        found = self._handle.wait()
        return found if isinstance(found, torch.Tensor) else found.copy()


class StagedCollectives(WithoutMemory):
    """`hvdtrain.core.protocols.Collectives` for tensors of a GPU, over ``inner`` collectives of host memory.

    ``inner``: takes CPU tensors, or numpy where its ``host`` is set. ``timeout_s``: bound of one `Handle.wait`.
    ``lane``: the way of every tensor, for tests; by default each tensor's device tells.
    """

    overlaps = True
    in_graph = False
    host = False
    hierarchical = False

    def __init__(self, inner: Collectives, timeout_s: float = 600.0, lane: Here | None = None) -> None:
        self.name = f"{inner.name} over host memory"
        self.rank, self.size = inner.rank, inner.size
        self.dtypes, self.reductions = inner.dtypes, inner.reductions
        self.timeout_s = timeout_s
        self._inner, self._lane = inner, lane
        self._lanes: dict[torch.device, Here] = {}
        self._pipe: _Pipe | None = None

    def among(self, group: Group) -> StagedCollectives:
        """The same over the wire between the ranks of ``group``."""
        return StagedCollectives(self._inner.among(group), self.timeout_s, self._lane)

    def allreduce(self, flat_N: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Combine over ranks: (N,) -> (N,), in place."""
        return self._issue("allreduce", name, flat_N, lambda h: self._inner.allreduce(h, name, op), in_place=True)

    def allgather(self, x_K: torch.Tensor, name: str) -> Handle:
        """Every rank's vector, by rank: (K,) -> (P, K)."""
        return self._issue("allgather", name, x_K, lambda h: self._inner.allgather(h, name))

    def alltoall(self, x_PK: torch.Tensor, name: str) -> Handle:
        """Row p goes to rank p; row q of the result came from rank q: (P, K) -> (P, K)."""
        return self._issue("alltoall", name, x_PK, lambda h: self._inner.alltoall(h, name))

    def alltoallv(self, flat_N: torch.Tensor, sent_P: Sequence[int], got_P: Sequence[int], name: str) -> Handle:
        """Consecutive parts go to the ranks: (N,) -> (N',)."""
        return self._issue("alltoallv", name, flat_N, lambda h: self._inner.alltoallv(h, sent_P, got_P, name))

    def reducescatter(self, flat_N: torch.Tensor, name: str) -> Handle:
        """This rank's 1/P of the sum over ranks: (N,) -> (N/P,); N is a multiple of P."""
        return self._issue("reducescatter", name, flat_N, lambda h: self._inner.reducescatter(h, name))

    def reducescatterv(self, flat_N: torch.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        """This rank's part of the sum over ranks, added in rank order: (N,) -> (sizes_P[rank],)."""
        return self._issue("reducescatterv", name, flat_N, lambda h: self._inner.reducescatterv(h, sizes_P, name),
                           key="parts")

    def allgatherv(self, part_K: torch.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        """The ranks' parts one after the other: (sizes_P[rank],) -> (N,)."""
        return self._issue("allgatherv", name, part_K, lambda h: _Own(self._inner.allgatherv(h, sizes_P, name)),
                           key="parts")

    def broadcast(self, x_N: torch.Tensor, name: str, root: int = 0) -> Handle:
        """``root``'s vector on every rank: (N,) -> (N,). Its memory is not kept: a start sends each parameter once."""
        return self._issue("broadcast", name, x_N, lambda h: self._inner.broadcast(h, name, root), keep=False)

    def _issue(self, kind: str, name: str, x: torch.Tensor, call: Callable[[Any], Handle], in_place: bool = False,
               keep: bool = True, key: str = "") -> Handle:
        """Start the tensor's way and queue its collective behind those before it.

        ``keep``: its host memory, for the next of this kind and name, or of one ``key`` for several names.
        """
        if self._pipe is None:
            self._pipe = _Pipe()
            weakref.finalize(self, self._pipe.issued.put, None).atexit = False  # the threads end with their owner
        x = x.detach()
        own = x.contiguous()
        borrowed: Key | None = (key or f"{kind} {name}", x.dtype, x.numel()) if keep else None
        as_numpy = self._inner.host
        what = f"{kind} {name!r} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} over host memory"
        transfer = _Transfer(self._lane_of(x.device), own, borrowed, lambda h: call(h.numpy() if as_numpy else h),
                             in_place, (self.timeout_s, what), name)
        self._pipe.issued.put(transfer)
        return transfer

    def _lane_of(self, device: torch.device) -> Here:
        if self._lane is not None:
            return self._lane
        if device not in self._lanes:
            self._lanes[device] = CudaLane(device) if device.type == "cuda" else Here()
        return self._lanes[device]
