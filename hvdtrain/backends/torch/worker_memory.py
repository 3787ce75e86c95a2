"""Hand batches of a `DataLoader`'s workers to the rank in reused shared memory: `collation`.

PyTorch itself creates, passes and unmaps a new file for each tensor. The structure of a batch is left to PyTorch.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from hvdtrain.cluster.messages.message_slots import SLOT_HEAD, MessageSlot, freed_with, opened

try:
    from torch.utils.data._utils.collate import collate, default_collate_fn_map
except ImportError:  # private names of PyTorch
    collate = None  # type: ignore[assignment]

LEAST_BYTES = 1 << 16
"""Bytes of a batched tensor below which PyTorch hands it over."""

_mapped: dict[int, mmap.mmap] = {}
"""Memory of the workers of the epoch in progress, by the slot's number, which is random."""


def collation(workers: int) -> Callable[[list[Any]], Any]:
    """Return `default_collate`, or a `SharedCollate` where there are workers and this PyTorch and system allow it."""
    _mapped.clear()
    usable = workers and collate is not None and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    return SharedCollate() if usable else default_collate


class SharedCollate:
    """Collate as `default_collate` does, with large tensors in the worker's shared memory."""

    def __init__(self) -> None:
        self._slots: list[MessageSlot] = []

    def __call__(self, samples: list[Any]) -> Any:
        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stacked})

    def _stacked(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = tensors[0]
        plain = type(first) is torch.Tensor and first.layout is torch.strided and first.device.type == "cpu" and all(
            one.shape == first.shape and one.dtype is first.dtype and not one.requires_grad for one in tensors)
        nbytes = first.nbytes * len(tensors)
        if not plain or nbytes < LEAST_BYTES:
            stack: Callable[..., Any] = default_collate_fn_map[torch.Tensor]
            return stack(tensors, collate_fn_map=collate_fn_map)
        slot = self._free(nbytes)
        slot.words[0] = 1
        out = torch.from_numpy(slot.data[:nbytes]).view(first.dtype).view(len(tensors), *first.shape)
        torch.stack(list(tensors), out=out)
        return _InSlot(slot, out)

    def _free(self, nbytes: int) -> MessageSlot:
        """Return the smallest slot that is large enough and that the rank has let go, a new one where there is none."""
        fits = [slot for slot in self._slots if slot.nbytes >= nbytes and not slot.words[0]]
        if not fits:
            fits = [MessageSlot(secrets.randbits(63), nbytes)]
            self._slots += fits
        return min(fits, key=lambda slot: slot.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"_slots": []}


class _InSlot:
    """A tensor in a slot of a worker, which is unpickled as a tensor."""

    def __init__(self, slot: MessageSlot, tensor: torch.Tensor) -> None:
        self._slot, self._tensor = slot, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        slot, tensor = self._slot, self._tensor
        return _tensor_of, (os.getpid(), slot.fd, slot.number, slot.nbytes, tensor.dtype, tuple(tensor.shape))


def _tensor_of(pid: int, fd: int, number: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor in a worker's slot, which is free again once the tensor and its views are gone.

    Errors: `RuntimeError` for a worker that has ended, as of PyTorch's own transfer.
    """
    memory = _mapped.get(number)
    if memory is None:
        try:
            memory = _mapped[number] = opened(pid, fd, SLOT_HEAD + nbytes)
        except OSError as error:
            raise RuntimeError(f"the DataLoader worker {pid} ended before its batch was read, or its memory cannot be "
                               f"opened: {error}") from error
    n = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(freed_with(memory, n)).view(dtype).view(shape)
