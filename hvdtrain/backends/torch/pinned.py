"""Copies between host memory and GPUs: of batches ahead of their step, and of collectives over host memory.

Decides neither which batch comes next nor the order of collectives (law 5).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from hvdtrain.cluster.deadline import deadline
from hvdtrain.core.protocols import Batch, Handle
from hvdtrain.core.timeline import blocked

Key = tuple[str, torch.dtype, int]


class Memory:
    """Host memory that transfers borrow: kept by name, dtype and number of elements, lent to one at a time.

    A step asks for the same vectors as the step before, and making pinned memory takes longer than a copy. ``free`` of
    a loan must have passed before the memory may be written again.
    """

    def __init__(self, make: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._make = make
        self._idle: dict[Key, list[tuple[torch.Tensor, Any]]] = {}

    def lend(self, key: Key) -> tuple[torch.Tensor, Any]:
        """Return (memory (n,), free); new memory, free at once, where all of that key is lent."""
        try:
            return self._idle[key].pop()
        except (KeyError, IndexError):
            return self._make(key[2], key[1]), None

    def take_back(self, key: Key, memory: torch.Tensor, free: Any) -> None:
        """End a loan; another thread than that of `lend` may call it."""
        self._idle.setdefault(key, []).append((memory, free))


class DirectLane:
    """Lane of tensors in host memory: nothing is copied."""

    def leave(self, x: torch.Tensor, key: Key | None) -> tuple[torch.Tensor, Any]:
        """Begin the copy of ``x`` to host memory: (the tensor there, a token for `landed`). Does not wait.

        ``key``: of the memory to borrow; None: memory for this once.
        """
        return x, None

    def landed(self, token: Any) -> None:
        """Return once the tensor in host memory is whole."""

    def back(self, result: torch.Tensor, into: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """Begin the copy of a result, into ``into`` if given: (the tensor, a token for `join`)."""
        return result, None

    def end(self, key: Key | None, host: torch.Tensor, token: Any) -> None:
        """Return the memory that `leave` borrowed; it may be lent again once ``token`` of `back` has passed."""

    def join(self, out: torch.Tensor, token: Any) -> None:
        """Order what the calling thread computes next behind the result."""


class CudaLane(DirectLane):
    """Copies between a GPU and pinned memory, on one stream in each direction, so that both are busy at once."""

    def __init__(self, device: torch.device) -> None:
        self.memory = Memory(lambda n, dtype: torch.empty(n, dtype=dtype, pin_memory=True))
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def leave(self, x: torch.Tensor, key: Key | None) -> tuple[torch.Tensor, Any]:
        flat_N, free = self.memory.lend(("", x.dtype, x.numel()) if key is None else key)  # without a key: not kept
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
        """Return an event behind the stream's work so far; a thread that waits for it sleeps instead of spinning."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


class Transfer:
    """`Handle` of one collective over host memory. ``ended`` is set once it has its result or its ``error``.

    The issuing thread queues the copy into pinned memory behind the work that makes the tensor. `send` and `receive`
    run in the threads of a `Pipe`; `wait` lets the current stream wait for the copy back, not the host.
    """

    def __init__(self, lane: DirectLane, x: torch.Tensor, key: Key | None, call: Callable[[torch.Tensor], Handle],
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
        """Issue the collective once its argument is in host memory."""
        self._lane.landed(self._token)
        self._came_s = time.perf_counter()
        self._pending = self._call(self._host)

    def receive(self) -> None:
        """Wait for the collective and begin the copy back."""
        assert self._pending is not None
        result = self._pending.wait()
        if not isinstance(result, torch.Tensor):
            result = torch.from_numpy(result if result.flags.writeable else result.copy())
        if result.data_ptr() == self._host.data_ptr() and result.shape == self._host.shape:
            result = self._host  # summed in place: a tensor of numpy's does not tell torch that its memory is pinned
        self._out, self._token = self._lane.back(result, self._into)
        self._lane.end(self._key, self._host, self._token)

    def wait(self) -> torch.Tensor:
        with deadline(*self._limit), blocked(self._name) as stood:
            self.ended.wait()
            stood.came_s = self._came_s  # others wait for the device, too
        if self.error is not None:
            raise self.error
        assert self._out is not None
        self._lane.join(self._out, self._token)
        return self._out

    def done(self) -> bool:
        return self.ended.is_set()


class Pipe:
    """Two threads through which transfers pass in the order of issue.

    A transport whose calls block sees the same sequence on every rank, while Horovod has several open at once
    and can fuse them. After an error nothing more is sent, since ranks are no longer at the same place:
    all later transfers end with that error. The threads are daemons.
    """

    def __init__(self) -> None:
        self.issued: SimpleQueue[Transfer | None] = SimpleQueue()
        self._sent: SimpleQueue[Transfer | None] = SimpleQueue()
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
    """Run ``work``; return what it raised, which is for the thread that waits."""
    try:
        work()
    except BaseException as error:
        return error
    return None


OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)


class Lane:
    """Plain copies of batches; from memory that is not pinned, CUDA lets the host wait for what is queued."""

    early = False
    """Whether a copy can run beside what is computed, so that it is of use to begin before it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stage(self, host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in memory that `send` takes; RuntimeError where there is none of that kind."""
        return host

    def send(self, staged: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Begin the copy: (the tensor on the device, what `receive` waits for)."""
        return staged.to(self._device, dtype, non_blocking=True), None

    def receive(self, sent: torch.Tensor, token: Any) -> None:
        """Order the calling thread's next computation behind the copy."""


class PinnedLane(Lane):
    """Copies to a GPU from pinned memory, on a stream of their own.

    PyTorch's allocator of pinned memory lends it again only behind the copy's event, so the pinned tensor may be
    dropped as soon as its copy is queued.
    """

    early = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def stage(self, host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Cast here: a copy that changes the type on its way goes over host memory which is not pinned.
        return torch.empty(host.shape, dtype=dtype, pin_memory=True).copy_(host)

    def send(self, staged: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self._stream):
            sent = staged.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return sent, event

    def receive(self, sent: torch.Tensor, token: Any) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(token)
        sent.record_stream(current)  # its memory is not given to the next copy before what reads it has passed


def lane(device: torch.device) -> Lane:
    return PinnedLane(device) if device.type == "cuda" else Lane(device)


class Uploads:
    """Batches as tensors on their devices.

    ``place``: the device of a batch's array by its index. ``dtype``: of floats; None: their own. At most one batch is
    copied ahead. It is recognised by the addresses of its arrays, so nobody may write to an announced batch.
    """

    def __init__(self, place: Callable[[int], torch.device], dtype: torch.dtype | None,
                 lane_to: Callable[[torch.device], Lane] = lane) -> None:
        self._place, self._dtype, self._lane_to = place, dtype, lane_to
        self._lanes: dict[torch.device, Lane] = {}
        self._begun: tuple[Batch, list[tuple[torch.Tensor, Any]]] | None = None

    def ahead(self, batch: Batch) -> None:
        """Begin to copy the next batch, if that is of use; an earlier announcement is dropped."""
        self._begun = None
        if not any(self._to(i).early for i in range(len(batch))):
            return
        try:
            self._begun = batch, self._send(batch)
        except OUT_OF_MEMORY:  # in its own step there may be room, or somebody who knows what to do
            self._begun = None

    def take(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the arrays on their devices, ordered before the calling thread's next computation."""
        begun, self._begun = self._begun, None
        sent = begun[1] if begun is not None and _same(begun[0], batch) else self._send(batch)
        for i, (tensor, token) in enumerate(sent):
            if token is not None:
                self._to(i).receive(tensor, token)
        return tuple(tensor for tensor, _ in sent)

    def _to(self, i: int) -> Lane:
        device = self._place(i)
        if device not in self._lanes:
            self._lanes[device] = self._lane_to(device)
        return self._lanes[device]

    def _send(self, batch: Batch) -> list[tuple[torch.Tensor, Any]]:
        return [self._sent(i, torch.from_numpy(x if type(x) is np.ndarray and x.flags.carray
                                               else np.require(x, requirements=["C", "W"])))
                for i, x in enumerate(batch)]

    def _sent(self, i: int, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        dtype = self._dtype if self._dtype and host.is_floating_point() else host.dtype
        try:
            staged = self._to(i).stage(host, dtype)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(f"batches go to {self._place(i)} from memory that is not pinned, so the host waits for each "
                          f"copy: {reason}", stacklevel=2)
            self._lanes[self._place(i)], staged = Lane(self._place(i)), host
        return self._to(i).send(staged, dtype)


def _same(one: Batch, other: Batch) -> bool:
    """Return whether two batches are the same memory with the same shapes."""
    return len(one) == len(other) and all(_view(a) == _view(b) for a, b in zip(one, other))


def _view(array: np.ndarray) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
