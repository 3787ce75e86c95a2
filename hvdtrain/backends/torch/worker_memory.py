"""Hand batches of a `DataLoader`'s workers to the rank in shared memory that is used again: `SharedCollate`.

PyTorch itself makes, passes and unmaps a new file for each tensor. What a batch is remains PyTorch's to say.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from hvdtrain.cluster.messages.shared_memory import SLOT_HEAD, Slot, freed_with, opened

LEAST_BYTES = 1 << 16
"""Smaller tensors go through the workers' pipe as they are."""

_mapped: dict[int, mmap.mmap] = {}
"""Memory of the workers of the epoch in progress, by the slot's number, which is random."""


class SharedCollate:
    """Collate as `default_collate` does, with large tensors as numpy arrays in the worker's memory."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def __call__(self, samples: list[Any]) -> Any:
        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stacked})

    def _stacked(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = tensors[0]
        plain = type(first) is torch.Tensor and first.layout is torch.strided and first.device.type == "cpu" and all(
            one.shape == first.shape and one.dtype is first.dtype and not one.requires_grad for one in tensors)
        nbytes = first.nbytes * len(tensors)
        if not plain or nbytes < LEAST_BYTES or first.dtype is torch.bfloat16:
            stack: Callable[..., Any] = default_collate_fn_map[torch.Tensor]
            return stack(tensors, collate_fn_map=collate_fn_map)
        slot = self._free(nbytes)
        slot.words[0] = 1
        out = torch.from_numpy(slot.data[:nbytes]).view(first.dtype).view(len(tensors), *first.shape)
        torch.stack(list(tensors), out=out)
        return _InSlot(slot, out.numpy())

    def _free(self, nbytes: int) -> Slot:
        """Return the smallest slot that is large enough and that the rank has let go, a new one where there is none."""
        fits = [slot for slot in self._slots if slot.nbytes >= nbytes and not slot.words[0]]
        if not fits:
            fits = [Slot(secrets.randbits(63), nbytes)]
            self._slots += fits
        return min(fits, key=lambda slot: slot.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"_slots": []}


class _InSlot:
    """An array in a slot of a worker, which becomes an array again where it is unpickled."""

    def __init__(self, slot: Slot, array: np.ndarray) -> None:
        self._slot, self._array = slot, array

    def __reduce__(self) -> tuple[Any, ...]:
        slot, array = self._slot, self._array
        return _array_of, (os.getpid(), slot.fd, slot.number, slot.nbytes, array.dtype.str, array.shape)


def _array_of(pid: int, fd: int, number: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array in a worker's slot, which is free again once the array and its views are gone.

    The worker lives until its results have been unpickled, as PyTorch's own way to hand over tensors needs too.
    """
    memory = _mapped.get(number)
    if memory is None:
        memory = _mapped[number] = opened(pid, fd, SLOT_HEAD + nbytes)
    n = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return freed_with(memory, n).view(dtype).reshape(shape)


def forget() -> None:
    """Unmap the memory of workers that no array needs."""
    _mapped.clear()
