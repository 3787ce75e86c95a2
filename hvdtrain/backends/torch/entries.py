"""Tensors of a PyTorch model that forward passes write to: the place of each, and its value for the exchange.

Owns reading, writing and describing one tensor. Which tensors these are is `hvdtrain.backends.torch.buffers`'.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.backends.torch.recompute.memory import of_keras
from hvdtrain.core.protocols import Writable


class Place(NamedTuple):
    """Where a tensor that forward passes may write to stands: ``holder[key]``; ``name``: in the whole model.

    ``at``: its key among the copies of `Buffers`.
    """

    name: str
    holder: Any
    key: str
    at: tuple[int, str]

    @property
    def tensor(self) -> torch.Tensor | None:
        """Return the tensor there."""
        found: torch.Tensor | None = self.holder[self.key] if self.key in self.holder else None  # TorchScript lacks get
        return found


class OneEntry:
    """Give one entry of a module's dict of parameters."""

    def __init__(self, holder: dict[str, Any], key: str) -> None:
        self._holder, self._key = holder, key

    def items(self) -> list[tuple[str, Any]]:
        """Return the entry."""
        return [(self._key, self._holder[self._key])] if self._key in self._holder else []

    def __contains__(self, key: str) -> bool:
        return key in self._holder

    def __getitem__(self, key: str) -> Any:
        return self._holder[key]


class Entry:
    """Implements `hvdtrain.comm.reducer.written.Entry`. ``before``: the value of the step's begin, where it is known.

    ``device``: where a tensor is made that this rank lacks.
    """

    def __init__(self, place: Place, before: torch.Tensor | None, device: torch.device) -> None:
        tensor = place.tensor
        self.name, self._place, self._device = place.name, place, device
        self._tensor = None if tensor is None or not tensor.numel() else tensor
        self._before = before if tensor is not None and before is not None and before.shape == tensor.shape else None
        self.form = "" if self._tensor is None else f"{self._tensor.dtype} {tuple(self._tensor.shape)}"

    def old(self) -> np.ndarray | None:
        """Return the value of the step's begin."""
        return None if self._before is None or self._tensor is None else array(self._before)

    def own(self) -> np.ndarray:
        """Return the value of now; nothing for a tensor that this rank lacks."""
        return np.zeros(0, np.float32) if self._tensor is None else array(self._tensor)

    def write(self, value: np.ndarray) -> None:
        """Assign ``value``."""
        if self._tensor is None:  # ``form`` has come from a rank that has the tensor
            dtype = getattr(torch, self.form.split()[0].removeprefix("torch."))
            self._tensor = self._place.holder[self._place.key] = torch.zeros(value.shape, dtype=dtype,
                                                                             device=self._device)
        assign(self._tensor, torch.from_numpy(np.array(value)).to(self._tensor.dtype).reshape(self._tensor.shape))


def holders_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, dict[str, torch.Tensor | None]]]:
    """Return the modules of ``model`` that are not Keras', with the prefix of their names and the buffers of now."""
    return [(f"{prefix}." if prefix else "", module, dict(module._buffers)) for prefix, module in model.named_modules()
            if isinstance(module._buffers, dict) and not of_keras(module)]


def put_back_buffers(prefix: str, module: torch.nn.Module, before: dict[str, torch.Tensor | None],
                     copies: dict[str, torch.Tensor], appeared: dict[str, torch.Tensor]) -> list[str]:
    """Have ``module`` hold the tensors of ``before`` again; return the names of those that are state and had others.

    ``appeared`` gets what was made: state, if it is persistent. What was replaced by another shape is a cache.
    """
    written = []
    for key, now in list(module._buffers.items()):
        name, was = prefix + key, before.get(key)
        copy = copies.get(name, was)
        made = copy is None or not copy.numel()
        if now is None or now is was and not (made and now.numel()):
            continue
        persistent = key not in module._non_persistent_buffers_set
        if key not in before:
            del module._buffers[key]
            module._non_persistent_buffers_set.discard(key)
        else:
            module._buffers[key] = copy if now is was else was
        if made:
            appeared[name] = now.detach()
        if persistent if made else copy is not None and now.shape == copy.shape and not torch.equal(now, copy):
            written.append(name)
    return written


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Have `written_parameters` find those of ``tensors`` that are parameters."""
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter):
            tensor._hvdtrain_written = True  # type: ignore[attr-defined]


def written_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters that forward passes are known to write, and those of an Embedding with max_norm."""
    return [p for module in model.modules() for p in module._parameters.values() if p is not None
            and (getattr(module, "max_norm", None) is not None or getattr(p, "_hvdtrain_written", False))]


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` in, unless it is there: an expanded buffer cannot be written to, and seldom needs it."""
    value = value.to(tensor.device)
    with torch.no_grad():
        if not torch.equal(tensor, value):
            tensor.copy_(value)


def array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy on the host, float64 for a dtype that numpy lacks."""
    host = tensor.detach().cpu()
    try:
        return np.array(host.numpy())
    except TypeError:
        return np.array((host.to(torch.complex128) if host.is_complex() else host.double()).numpy())


def describe(tensor: torch.Tensor) -> Writable:
    """Return dtype and shape of a tensor."""
    return Writable(str(tensor.dtype).removeprefix("torch."), _kind(tensor), tuple(tensor.shape))


def _kind(tensor: torch.Tensor) -> str:
    """Return the kind of a dtype, as numpy has it."""
    return "b" if tensor.dtype == torch.bool else "f" if tensor.is_floating_point() else (
        "c" if tensor.is_complex() else "i")
