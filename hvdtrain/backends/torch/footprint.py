"""What a PyTorch model holds while it trains: its optimizer's state without making it, and a pass, traced.

Owns the counting of tensors; computes nothing that remains (`Stage.trial`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.backends.torch.optimizer import TorchOptimizer
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.planning.memory.facts import Model, Slots
from hvdtrain.planning.memory.pass_trace import MemoryTrace


def model_bytes(parts: ModelParts) -> Model:
    """Return what is known of a model and its optimizer before the first step."""
    params: Any = parts.params
    own = {id(t) for t in params.tensors}
    others = [t for t in (*parts.model.parameters(), *parts.model.buffers()) if id(t) not in own]
    optimizer: Any = parts.optimizer
    return Model(params.specs, sum(t.nbytes for t in others), slots_of(optimizer, params.tensors),
                 elementwise=optimizer.elementwise and optimizer.adopted is None)  # that of Keras is not divided


def state_now(parts: ModelParts) -> int:
    """Return the bytes of the optimizer's state that are there already."""
    optimizer: Any = parts.optimizer
    return sum(v.nbytes for entries in optimizer.optimizer.state.values() for v in entries.values()
               if isinstance(v, torch.Tensor))


def slots_of(optimizer: TorchOptimizer, tensors: Sequence[torch.Tensor]) -> list[Slots]:
    """Return the state that ``optimizer``, or one of its kind, keeps of each of ``tensors``.

    By one update of tensors of the same shapes that have no memory (PyTorch's meta device). A compiled Keras model's
    optimizer has made its own.
    """
    if optimizer.adopted is not None:
        return [_slots(t, optimizer.optimizer.state.get(t, {})) for t in optimizer.tensors]
    if optimizer.elementwise:  # one element of each type tells of all
        tensors = [torch.empty(1, dtype=t.dtype) for t in tensors]
    standing, state = _updated(optimizer, tensors)
    slots = {id(t): _slots(t, state.get(t, {})) for t in standing}
    return [slots[id(t)] for t in standing]


def _updated(optimizer: TorchOptimizer, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
    """Stand-ins for ``tensors`` and their state after one update: on the meta device, or small where that fails.

    An optimizer of which nothing can be found out counts as one without state.
    """
    for where in ("meta", "cpu"):
        try:
            alike = {(tuple(t.shape), t.dtype): torch.nn.Parameter(torch.zeros(
                t.shape if where == "meta" else (2,) * t.dim(), dtype=t.dtype, device=where)) for t in tensors}
            made = optimizer.given.plain().make(optimizer.config, (), list(alike.values()), optimizer.base_lr)
            for param in alike.values():
                param.grad = torch.zeros_like(param)
            made.step()
        except Exception:  # noqa: BLE001, S112  (an optimizer of the user's; kernels that the meta device lacks)
            continue
        return [alike[tuple(t.shape), t.dtype] for t in tensors], made.state
    return tensors, {}


def _slots(tensor: torch.Tensor, entries: dict[str, Any]) -> Slots:
    held = [v for v in entries.values() if isinstance(v, torch.Tensor)]
    shaped = sum(v.element_size() for v in held if v.shape == tensor.shape and v.dim())
    return Slots(shaped, sum(v.nbytes for v in held if v.shape != tensor.shape or not v.dim()))


def traced(parts: ModelParts, batch: Batch) -> MemoryTrace:
    """Compute the gradient of ``batch`` for its memory alone; return what was alive at each moment."""
    params: Any = parts.params
    live = _Live()
    hooks = [param.register_post_accumulate_grad_hook(live.made(i)) for i, param in enumerate(params.tensors)]
    try:
        with live:
            parts.stage.trial(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return MemoryTrace(len(batch[0]), np.array(live.after, np.int64), tuple(live.gradients))


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that are made within it, as long as they live, beside gradients.

    ``after``: bytes after each that was made. ``gradients``: (how many were made before, index) of each gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []
        self.gradients: list[tuple[int, int]] = []
        self._bytes: dict[int, int] = {}
        self._live = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count the storages that it has made."""
        kwargs = kwargs or {}
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._bytes:
                    self._count(storage)
        return out

    def _count(self, storage: Any) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        self._bytes[key] = n_bytes
        self._live += n_bytes
        self.after.append(self._live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._live -= self._bytes.pop(key, 0)

    def made(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that takes the gradient of parameter ``index`` out of the count."""
        def hook(param: torch.Tensor) -> None:
            key = param.grad.untyped_storage()._cdata if param.grad is not None else 0
            self._live -= self._bytes.get(key, 0)
            self._bytes[key] = 0
            self.gradients.append((len(self.after), index))
        return hook
