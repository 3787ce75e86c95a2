"""The final files of a PyTorch model: model.safetensors and model.pt, by names without wrappers.

Owns which tensors are written, and that each is written alone, also where it is a part of a larger storage. Bytes go
to the disk one tensor after another, so that no second copy of the model is made.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from hvdtrain.backends.torch.names import state_dict
from hvdtrain.checkpoint import files, weights
from hvdtrain.checkpoint.tensors import FileLayout, Spec, layout

NATIVE = "model.pt"
_BITS = {torch.bfloat16: (np.uint16, "BF16"), torch.float8_e4m3fn: (np.uint8, "F8_E4M3"),
         torch.float8_e5m2: (np.uint8, "F8_E5M2")}
"""Types that numpy lacks: a type for their bits, and their name in safetensors."""


def write(model: torch.nn.Module, directory: Path) -> list[str]:
    """Write model.safetensors and model.pt (a state_dict, for ``torch.load(..., weights_only=True)``). OSError."""
    write_safetensors(model, directory / weights.FILE)
    write_state_dict(model, directory / NATIVE)
    return [weights.FILE, NATIVE]


def write_safetensors(model: torch.nn.Module, path: Path) -> None:
    """Write a safetensors file; of a tensor with several names the first, its others are in the file's metadata."""
    tensors = state_dict(model)
    plan = plan_of(tensors)
    weights.put(plan, (_bytes(tensors[name]) for name in plan.names), path)


def write_state_dict(model: torch.nn.Module, path: Path) -> None:
    """Write the model's state_dict for ``torch.load``."""
    with files.replacing(path) as place:
        torch.save(_alone(state_dict(model)), place)


def plan_of(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    """Return the file that `write_safetensors` writes. `CheckpointError` for a tensor that no file can hold."""
    first: dict[tuple[object, ...], str] = {}
    others: dict[str, str] = {}
    for name in sorted(tensors):
        kept = first.setdefault(_memory(tensors[name]) or (name,), name)
        if kept != name:
            others[name] = kept
    specs = {name: _spec(tensor) for name, tensor in tensors.items() if name not in others}
    codes = {name: _BITS[tensors[name].dtype][1] for name in specs if tensors[name].dtype in _BITS}
    return layout(specs, "model", codes, others)


def _spec(tensor: torch.Tensor) -> Spec:
    bits = _BITS.get(tensor.dtype)
    dtype = np.dtype(bits[0]) if bits else torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return Spec(dtype, tuple(tensor.shape))


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that are one, () of one without elements."""
    if not tensor.numel():
        return ()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the host; a part of a larger storage is copied, since PyTorch would write all of that."""
    made: dict[tuple[object, ...], torch.Tensor] = {}
    found = copy.copy(tensors)  # with the versions of modules
    for name, tensor in tensors.items():
        key = _memory(tensor) or (name,)
        if key not in made:
            own = tensor.detach().cpu()
            part = own.untyped_storage().nbytes() != own.numel() * own.element_size()
            made[key] = own.clone() if part else own
        found[name] = made[key]
    return found
