"""Checkpoint state and final files of a PyTorch model and its optimizer: named numpy arrays and back, bit by bit.

bfloat16, which numpy lacks, travels as its bits in uint16 under a name with a suffix.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.torch import resuming
from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.modules import load_state_dict, named_parameters, state_dict
from hvdtrain.backends.torch.optimizer import TorchOptimizer, order_of, state_bytes
from hvdtrain.backends.torch.placement import Generators
from hvdtrain.checkpoint import files, weights
from hvdtrain.checkpoint.tensors import FileLayout, Spec, layout
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.protocols.run import ArrayWindow, Head, Place, Shard
from hvdtrain.parallel.precision import LossScale

_BFLOAT16 = "#bfloat16"


def to_arrays(tensors: dict[str, torch.Tensor], group: str = "", place: Place | None = None) -> dict[str, np.ndarray]:
    """Copy tensors to the host by name; a bfloat16 tensor's name gets the suffix ``#bfloat16``, its array is uint16.

    ``place``: where to copy to; a tensor for which it gives None is not copied, if it is in host memory.
    """
    out = {}
    for name, tensor in tensors.items():
        bits = tensor.dtype == torch.bfloat16
        source = tensor.detach().view(torch.int16) if bits else tensor.detach()
        full, dtype = name + _BFLOAT16 if bits else name, np.dtype(np.uint16) if bits else _numpy_type(tensor.dtype)
        shape = tuple(tensor.shape)
        memory = np.empty(shape, dtype) if place is None else place(group, full, shape, dtype)
        if isinstance(memory, ArrayWindow):
            begin, memory = memory
            source = source.reshape(-1)[begin:begin + memory.size]
        if memory is None:
            memory = source.cpu().numpy().view(dtype)
        else:
            torch.from_numpy(memory.view(np.int16) if bits else memory).copy_(source)  # once, also from a device
        out[full] = memory
    return out


@functools.cache
def _numpy_type(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


def from_arrays(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Undo `to_arrays`: tensors on the host, each of the dtype it had."""
    out = {}
    for name, array in arrays.items():
        own = np.array(array, copy=True)
        if name.endswith(_BFLOAT16):
            out[name.removesuffix(_BFLOAT16)] = torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
        else:
            out[name] = torch.from_numpy(own)
    return out


def model_arrays(model: torch.nn.Module, place: Place | None = None) -> dict[str, np.ndarray]:
    """Return parameters and persistent buffers by name."""
    return to_arrays(state_dict(model), "model", place)


def load_model(model: torch.nn.Module, arrays: dict[str, np.ndarray]) -> None:
    """Copy arrays into the model in place; `UserError` names the first that does not fit."""
    own, saved = state_dict(model), from_arrays(arrays)
    check_names("model", own, saved)
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise UserError(f"checkpoint tensor {name} has shape {tuple(saved[name].shape)}",
                            f"{tuple(tensor.shape)}, as in this model",
                            "resume with the model and model_args of that run")
    load_state_dict(model, saved)


def check_names(what: str, own: Any, got: Any) -> None:
    """Raise `UserError` unless both have the same names."""
    missing, extra = sorted(set(own) - set(got)), sorted(set(got) - set(own))
    if missing or extra:
        raise UserError(f"the checkpoint's {what} lacks {missing[:3]} and also has {extra[:3]}",
                        f"the {count(len(own), 'tensor')} of this {what}",
                        "resume with the model and optimizer of that run")


def optimizer_arrays(opt: TorchOptimizer, names: list[str], place: Place | None = None) -> dict[str, np.ndarray]:
    """Return every tensor of the optimizer's state as ``parameter/key``; plain numbers become 0-d arrays."""
    tensors, order = {}, order_of(opt)
    for index, entries in opt.optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if value is not None:
                tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))
                tensors[f"{names[order[int(index)]]}/{key}"] = tensor
    return to_arrays(tensors, "optimizer", place)


def check_optimizer(names: list[str], arrays: Iterable[str]) -> None:
    """Raise `UserError` for the state of a parameter that this model does not have."""
    for name in {full.rpartition("/")[0] for full in arrays} - set(names):
        raise UserError(f"the checkpoint's optimizer has state for {name!r}", "parameters of this model only",
                        "resume with the model of that run")


def load_optimizer(opt: TorchOptimizer, names: list[str], arrays: dict[str, np.ndarray]) -> None:
    """Undo `optimizer_arrays`; ``names``: of all tensors that ``opt`` has, also empty slices."""
    index = {names[i]: place for place, i in enumerate(order_of(opt))}
    state: dict[int, dict[str, Any]] = {}
    for full, tensor in from_arrays(arrays).items():
        name, _, key = full.rpartition("/")
        state.setdefault(index[name], {})[key] = tensor
    whole = opt.optimizer.state_dict()
    opt.optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})
    params = [param for group in opt.optimizer.param_groups for param in group["params"]]
    for i, entries in state.items():
        placed = opt.optimizer.state[params[i]]  # on its device, but cast to the parameter's dtype
        for key, tensor in entries.items():
            if placed[key].dtype != tensor.dtype:
                placed[key] = tensor.to(placed[key].device)


class TorchState:
    """Implements `hvdtrain.core.protocols.ModelState`; ``names``: of the tensors of ``optimizer``, in order."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], optimizer: TorchOptimizer, buffers: Buffers,
                 scale: LossScale, generators: Generators) -> None:
        self.model, self.names, self.optimizer = model, list(names), optimizer
        self._buffers, self._scale, self._generators = buffers, scale, generators
        self._spans: list[tuple[int, int]] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._counts: set[str] = set()
        self.facts: Callable[[], dict[str, Any]] = dict

    def state(self, place: Place | None = None) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        groups = {"model": model_arrays(self.model, place)}
        if not self._spans:
            groups["optimizer"] = optimizer_arrays(self.optimizer, self.names, place)
        return groups, {**self.optimizer.scalars(), **self._scale.state(), **self.facts()}

    def state_bytes(self) -> int:
        """Return the bytes of model and optimizer; before the first step those that a small tensor gets."""
        model = sum(t.numel() * t.element_size() for t in self.model.state_dict().values())
        return model + state_bytes(self.optimizer)

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        resuming.check(self.optimizer, rest)
        if not self._spans:
            check_optimizer(self.names, groups["optimizer"])
        self.load_weights(groups["model"])
        if not self._spans:
            load_optimizer(self.optimizer, self.names, groups["optimizer"])
        self.optimizer.load_scalars(rest)
        self._scale.load(rest)

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        load_model(self.model, arrays)
        self._buffers.loaded()

    def take(self, optimizer: Any, spans: Sequence[tuple[int, int]]) -> None:
        self.optimizer, self._spans = optimizer, list(spans)
        shapes = {name: tuple(p.shape) for name, p in named_parameters(self.model)}
        self._shapes = {name: shapes[name] for name in self.names}

    def extend(self, names: Sequence[str], spans: Sequence[tuple[int, int]] | None) -> None:
        """Keep the state of more parameters; ``spans``: this rank's elements of each, where the state is divided."""
        self.names += names
        self._spans += spans or []
        if self._spans:
            self.take(self.optimizer, self._spans)

    def slices(self, place: Place | None = None) -> Iterator[Shard]:
        """Yield this rank's shard of the optimizer's state; a step count comes with its parameter's first element."""
        for name, tensor, (begin, end) in zip(self.names, self.optimizer.tensors, self._spans):
            entries = self.optimizer.optimizer.state.get(tensor, {}) if begin < end else {}
            for key, value in entries.items():
                if value is None:
                    continue
                held = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))
                each = held.shape == tensor.shape
                if each or begin == 0:
                    shape = self._shapes[name] if each else tuple(held.shape)
                    for full, values_n in to_arrays({f"{name}/{key}": held.reshape(-1)}, "optimizer", place).items():
                        yield Shard("optimizer", full, shape, begin, values_n)

    def wanted(self, heads: Sequence[Head]) -> list[tuple[str, int, int]]:
        shapes = {head.name: tuple(head.shape) for head in heads}
        check_optimizer(self.names, shapes)
        spans = dict(zip(self.names, self._spans))
        found = []
        for full, shape in shapes.items():
            name = full.rpartition("/")[0]
            begin, end = spans[name]
            if shape not in (self._shapes[name], ()):
                raise UserError(f"checkpoint tensor {full} has shape {shape}",
                                f"{self._shapes[name]}, as in this model",
                                "resume with the model, model_args and optimizer of that run")
            if begin < end:
                each = shape == self._shapes[name]
                found.append((full, begin, end) if each else (full, 0, 1))
                self._counts |= set() if each else {full}
        return found

    def load_slices(self, values: Mapping[str, np.ndarray]) -> None:
        load_optimizer(self.optimizer, self.names,
                       {full: values_n.reshape(()) if full in self._counts else values_n
                        for full, values_n in values.items()})

    def rank_state(self) -> dict[str, np.ndarray]:
        return self._generators.state()

    def load_rank(self, own: dict[str, np.ndarray]) -> None:
        self._generators.load(own)

    def final(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def export(self, directory: Path) -> list[str]:
        return write_files(self.model, Path(directory))

    def try_export(self) -> str:
        plan_of(state_dict(self.model))
        return ""


NATIVE = "model.pt"
_BITS = {torch.bfloat16: (np.uint16, "BF16"), torch.float8_e4m3fn: (np.uint8, "F8_E4M3"),
         torch.float8_e5m2: (np.uint8, "F8_E5M2")}
"""Types that numpy lacks: a type for their bits, and their name in safetensors."""


def write_files(model: torch.nn.Module, directory: Path) -> list[str]:
    """Write model.safetensors and model.pt (a state_dict, for ``torch.load(..., weights_only=True)``). OSError."""
    write_safetensors(model, directory / weights.FILE)
    write_state_dict(model, directory / NATIVE)
    return [weights.FILE, NATIVE]


def write_safetensors(model: torch.nn.Module, path: Path) -> None:
    """Write a safetensors file; a tensor with several names has the first, the others are in the file's metadata."""
    tensors = state_dict(model)
    plan = plan_of(tensors)
    weights.put(plan, (_bytes(tensors[name]) for name in plan.names), path)


def write_state_dict(model: torch.nn.Module, path: Path) -> None:
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
    """Return a key that two names of one tensor have in common; () without elements."""
    if not tensor.numel():
        return ()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the host; a share of a larger storage is copied, since PyTorch would write all of that."""
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
