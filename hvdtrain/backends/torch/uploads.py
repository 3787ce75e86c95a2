"""Batches on their way from host memory to a rank's devices; the next one while a step is still computed.

Owns the lanes: a plain copy, and to a GPU one by way of pinned memory on a stream of its own. Which array goes to which
device, and as what type, is `transforms.placement`'s to say; which batch comes next, the schedule's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvdtrain.core.protocols import Batch

OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)


class Lane:
    """Plain copies: of memory that is not pinned, CUDA's own wait for what is queued, and have the host wait."""

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
        """Order what the calling thread computes next behind the copy."""


class PinnedLane(Lane):
    """Copies to a GPU from pinned memory, on a stream of their own.

    PyTorch's allocator of pinned memory puts an event behind each such copy, and lends the memory anew only when that
    has passed; so the pinned tensor may be forgotten as soon as its copy is queued.
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
    """Return the lane to a device."""
    return PinnedLane(device) if device.type == "cuda" else Lane(device)


class Uploads:
    """Batches as tensors on their devices.

    ``place``: the device of a batch's array by its index. ``dtype``: of floats; None: their own.

    One batch at most is on its way before it is asked for. It is known again by where its arrays lie in memory, which
    is kept until then, so nobody may write to a batch that has been announced.
    """

    def __init__(self, place: Callable[[int], torch.device], dtype: torch.dtype | None,
                 lane_to: Callable[[torch.device], Lane] = lane) -> None:
        self._place, self._dtype, self._lane_to = place, dtype, lane_to
        self._lanes: dict[torch.device, Lane] = {}
        self._begun: tuple[Batch, list[tuple[torch.Tensor, Any]]] | None = None

    def ahead(self, batch: Batch) -> None:
        """Begin the way of the batch that comes next, if that is of use; one that was begun before is forgotten."""
        self._begun = None
        if not any(self._to(i).early for i in range(len(batch))):
            return
        try:
            self._begun = batch, self._send(batch)
        except OUT_OF_MEMORY:  # in its own step there may be room, or somebody who knows what to do
            self._begun = None

    def take(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the arrays on their devices, ready for what the calling thread computes next."""
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
        return [self._sent(i, torch.from_numpy(np.require(x, requirements=["C", "W"]))) for i, x in enumerate(batch)]

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
    """Whether two batches are the same memory, seen alike."""
    return len(one) == len(other) and all(_view(a) == _view(b) for a, b in zip(one, other))


def _view(array: np.ndarray) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
