"""What PyTorch holds at this moment: of a model and its optimizer by kind, of each GPU as its allocator tells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.backends.torch.footprint import state_now
from hvdtrain.parallel.parts import ModelParts


def held(parts: ModelParts) -> dict[str, int | None]:
    """Return the bytes of parameters (and buffers), gradients and optimizer state of this rank, on all its devices.

    Tensors that share memory, such as gradients in the flat memory of their buckets, count once. Between two steps.
    """
    params: Any = parts.params
    model: Any = parts.model
    return {"parameters": _storages([*model.parameters(), *model.buffers(), *params.tensors]),
            "gradients": _storages(p.grad for p in params.tensors if p.grad is not None), "state": state_now(parts)}


def _storages(tensors: Iterable[torch.Tensor]) -> int:
    found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(found.values())


def allocators() -> list[dict[str, Any]]:
    """Return of each GPU of this process what PyTorch's allocator tells; [] without a GPU.

    ``allocated_bytes``: in tensors; ``reserved_bytes``: taken from the device; ``peak_bytes``: most in tensors since
    the start. ``fragmentation``: part of reserved that lies free between tensors in blocks that cannot be given back
    (inactive_split_bytes of `torch.cuda.memory_stats`). ``retries``: times that the allocator had to give all it kept
    back and ask again.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [_allocator(torch.cuda.memory_stats(i)) for i in range(torch.cuda.device_count())]


def _allocator(stats: dict[str, Any]) -> dict[str, Any]:
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    split = int(stats.get("inactive_split_bytes.all.current", 0))
    return {"allocated_bytes": int(stats.get("allocated_bytes.all.current", 0)), "reserved_bytes": reserved,
            "peak_bytes": int(stats.get("allocated_bytes.all.peak", 0)),
            "fragmentation": round(split / reserved, 4) if reserved else 0.0,
            "retries": int(stats.get("num_alloc_retries", 0))}
