"""PyTorch's tensors between two ranks: trees of them packed into `Cargo` and unpacked again.

Sends nothing. A tensor arrives as it lay in memory (a convolution computes otherwise on channels_last): its array has
the axes in that order, which stands behind its type's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Cargo

_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16)}
"""What tensors travel as that numpy has no type for, by their bytes: PyTorch's type and numpy's."""

NONE = "none"
"""Stands behind the type of a gradient that there is none of: the loss does not depend on that tensor."""


def pack(tree: Any, where: str) -> Cargo:
    """Return a tree of tensors as host arrays; ``where``: whose output it is, for an error.

    Errors: `UserError` for what is neither a tensor, a tuple, list or dict of such, nor a plain number, text or None.
    """
    tensors: list[torch.Tensor] = []
    form = _form(tree, tensors, where)
    return _packed(tensors, tensors, "" if form == "*" else json.dumps(form))


def unpack(cargo: Cargo, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors of ``cargo`` on ``device``, in its order; on a CPU they are its arrays' own memory."""
    return [_from_host(array, dtype, device) for array, dtype in zip(cargo.arrays, cargo.dtypes)]


def tree_of(form: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Put ``tensors`` together as ``form`` of a `Cargo` says."""
    rest = iter(tensors)

    def built(part: Any) -> Any:
        if part == "*":
            return next(rest)
        ((kind, content),) = part.items()
        if kind == "value":
            return content
        if kind == "dict":
            return {key: built(child) for key, child in content}
        return tuple(map(built, content)) if kind == "tuple" else list(map(built, content))

    return built(json.loads(form)) if form else next(rest)


def has_gradient(tensor: torch.Tensor) -> bool:
    """Return whether such a tensor has a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def pack_gradients(grads: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> Cargo:
    """Return the gradients of tensors of the shapes, types and places in memory ``like``; None travels as such."""
    whole = [torch.zeros(t.shape, dtype=t.dtype) if g is None else g for g, t in zip(grads, like)]
    cargo = _packed(whole, like)
    return cargo._replace(dtypes=tuple(f"{dtype.partition(':')[0]}:{NONE}" if g is None else dtype
                                       for g, dtype in zip(grads, cargo.dtypes)))


def unpack_gradients(cargo: Cargo, device: torch.device) -> list[torch.Tensor | None]:
    """Undo `pack_gradients`."""
    return [None if dtype.endswith(f":{NONE}") else _from_host(array, dtype, device)
            for array, dtype in zip(cargo.arrays, cargo.dtypes)]


class Arrived(torch.autograd.Function):
    """Places tensors that came from another rank in autograd's graph; their gradients go to ``keep``.

    They are no leaves, so that a block may begin with an operation in place; nothing is copied.
    """

    @staticmethod
    def forward(ctx: Any, keep: Callable[..., None], gate: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.keep = keep
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.keep(grads)
        return (None,) * (2 + len(grads))


def arrived(tensors: Sequence[torch.Tensor], keep: Callable[[Sequence[torch.Tensor | None]], None]
            ) -> list[torch.Tensor]:
    """Return ``tensors`` as ones whose gradients backward gives to ``keep``: of those that can have one, in order."""
    floats = [t for t in tensors if has_gradient(t)]
    if not floats or not torch.is_grad_enabled():
        return list(tensors)
    rest = iter(Arrived.apply(keep, torch.zeros((), requires_grad=True), *floats))
    return [next(rest) if has_gradient(t) else t for t in tensors]


def _form(part: Any, tensors: list[torch.Tensor], where: str) -> Any:
    if isinstance(part, torch.Tensor):
        if part.layout is not torch.strided:
            raise UserError(f"{where} gives a tensor of layout {part.layout}", "dense tensors, which can be sent",
                            "call to_dense() in the block")
        tensors.append(part)
        return "*"
    if type(part) in (tuple, list):
        return {type(part).__name__: [_form(child, tensors, where) for child in part]}
    if type(part).__name__ in ("dict", "OrderedDict") and all(isinstance(key, str) for key in part):
        return {"dict": [[key, _form(child, tensors, where)] for key, child in part.items()]}
    if part is None or type(part) in (bool, int, float, str):
        return {"value": part}
    raise UserError(f"{where} passes a {type(part).__name__} to the next", "a tensor, or tuples, lists and dicts (by "
                    "names) of tensors and plain numbers, which can be sent to another rank",
                    "return one of these types from the block")


def _packed(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor], form: str = "") -> Cargo:
    """Return the cargo of tensors, their axes in the orders of ``like``."""
    orders = [_order(t) for t in like]
    laid = [t.permute(order) if order else t for t, order in zip(tensors, orders)]
    names = (str(t.dtype).removeprefix("torch.") + (f":{','.join(map(str, order))}" if order else "")
             for t, order in zip(tensors, orders))
    return Cargo(tuple(_to_host(laid)), tuple(names), form)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return a dense tensor's axes from the longest stride to the shortest; [] where in order."""
    if tensor.is_contiguous():
        return []
    ways: tuple[int, ...] = tensor.stride()
    order = sorted(range(len(ways)), key=lambda axis: (-ways[axis], axis))
    return order if tensor.permute(order).is_contiguous() else []


def _to_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return contiguous host arrays of the tensors; those on a GPU through pinned memory, all of them in one wait."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    found = []
    for tensor in tensors:
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if whole.device.type == "cuda":  # PyTorch keeps pinned memory for the next one once nobody has it
            pinned = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            whole = pinned.copy_(whole, non_blocking=True)
        found.append(whole)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return [_array(whole) for whole in found]


def _array(tensor: torch.Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, float8
        bits, own = _BITS[tensor.element_size()]
        return tensor.view(bits).numpy().view(own)


def _from_host(array: np.ndarray, dtype: str, device: torch.device) -> torch.Tensor:
    name, _, order = dtype.partition(":")
    kind = getattr(torch, name)
    bits = _BITS.get(array.dtype.itemsize, (None, None))
    if bits[1] == array.dtype and kind not in (torch.uint8, torch.uint16):
        tensor = torch.from_numpy(array.view(np.int16 if bits[1] is np.uint16 else np.uint8)).view(kind)
    else:
        tensor = torch.from_numpy(array)
    tensor = tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
    if order:
        axes = list(map(int, order.split(",")))
        tensor = tensor.permute([axes.index(axis) for axis in range(len(axes))])
    # No view, which `Arrived` could not mark as its own.
    return tensor if not tensor._is_view() else torch.empty(0, dtype=kind, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
