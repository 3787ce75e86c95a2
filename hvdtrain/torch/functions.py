"""Parameters, optimizer state and Python objects from one rank to all, and objects from all to all.

Owns how they are packed; the collectives are `hvdtrain.torch.ops`'.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain import job
from hvdtrain.core.errors import WrongValue
from hvdtrain.core.process_sets import ProcessSet, global_process_set
from hvdtrain.torch import ops

Named = tuple[str | None, torch.Tensor]


def broadcast_parameters(params: Mapping[str, torch.Tensor] | Iterable[Any], root_rank: int) -> None:
    """Give tensors the values of rank ``root_rank``: ``model.state_dict()``, ``model.named_parameters()``, ...

    The same tensors on every rank, which is compared first; those of a mapping in the order of their names.
    Collective. Errors: `UserError` on every rank where they differ.
    """
    if isinstance(params, Mapping):
        named: list[Named] = sorted(params.items())
    elif isinstance(params, Iterable) and not torch.is_tensor(params):
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise WrongValue(f"broadcast_parameters of {type(params).__name__}", "a dict or a list of tensors",
                         "pass model.state_dict() or model.named_parameters()")
    odd = next((name for name, x in named if not torch.is_tensor(x)), None)
    if odd is not None:
        raise WrongValue(f"broadcast_parameters with {odd!r}, which is not a tensor", "tensors",
                         "leave it out and pass it to hvd.broadcast_object")
    _check_same(named, root_rank)
    handles = [ops.broadcast_async_(x.detach(), root_rank, f"parameter.{i}") for i, (_, x) in enumerate(named)]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give an optimizer the state and the options of rank ``root_rank``'s, of any class; collective.

    No step is made: a state that only the root has is made on the other ranks from its description. Before the root's
    first step, gradients that are None become zeros, as after Horovod's. ``model`` is Horovod's and not needed.
    """
    is_root = job.rank() == root_rank
    tensors: list[torch.Tensor] = []
    described = _described(optimizer.state_dict(), tensors) if is_root else None
    described = broadcast_object(described, root_rank, "optimizer.state")
    if not is_root:
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        described = _restored(described, tensors, device)
    handles = [ops.broadcast_async_(x, root_rank, f"optimizer.state.{i}") for i, x in enumerate(tensors)]
    for handle in handles:
        handle.wait()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not described["state"] and not isinstance(optimizer, torch.optim.SparseAdam):  # which takes no dense gradient
        for p in (p for p in params if p.requires_grad and p.grad is None):
            p.grad = torch.zeros_like(p)
    if is_root:
        return
    with loading(optimizer):
        optimizer.load_state_dict(described)
    for i, values in described["state"].items():
        own = optimizer.state.get(params[i], {}) if isinstance(i, int) and i < len(params) else {}
        for name, x in values.items():  # load_state_dict rounds to the parameter's type, which the root's were not
            if torch.is_tensor(x) and torch.is_tensor(own.get(name)) and own[name].dtype != x.dtype:
                own[name] = x


@contextmanager
def loading(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the optimizer's dicts while a state is loaded: a schedule or wrapper that was made before shares them."""
    groups, state = optimizer.param_groups, optimizer.state
    yield
    for own, loaded in zip(groups, optimizer.param_groups):
        if own is not loaded:
            own.clear()
            own.update(loaded)
    if optimizer.state is not state:
        state.clear()
        state.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, state


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return rank ``root_rank``'s object, on every rank; collective."""
    is_root = job.rank() == root_rank
    data, label = _packed(obj if is_root else None), name or "object"
    size = int(ops.broadcast(torch.tensor([len(data)]), root_rank, f"{label}.size", process_set))
    whole = ops.broadcast_(data if is_root else torch.empty(size, dtype=torch.uint8), root_rank, f"{label}.data",
                           process_set)
    return obj if is_root else pickle.loads(whole.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, by rank; collective."""
    data, label = _packed(obj), name or "object"
    sizes_P = ops.allgather(torch.tensor([len(data)]), f"{label}.sizes", process_set).tolist()
    whole = ops.allgather(data, f"{label}.all", process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in whole.split(sizes_P)]


@dataclass
class _TensorFacts:
    """Shape and type of a tensor whose values are to arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def _described(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a state with facts in place of its tensors, which are appended to ``tensors``."""
    if torch.is_tensor(tree):
        tensors.append(tree.detach())
        return _TensorFacts(tuple(tree.shape), tree.dtype, tree.device.type == "cpu")
    return _mapped(tree, lambda value: _described(value, tensors))


def _restored(tree: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """Return a state with tensors of any values in place of facts; they are appended to ``tensors``."""
    if isinstance(tree, _TensorFacts):
        tensors.append(torch.empty(tree.shape, dtype=tree.dtype, device="cpu" if tree.on_host else device))
        return tensors[-1]
    return _mapped(tree, lambda value: _restored(value, tensors, device))


def _mapped(tree: Any, change: Any) -> Any:
    """Return ``tree`` with each value of a dict, list or tuple changed, in order."""
    if isinstance(tree, dict):
        return {key: change(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([change(value) for value in tree])
    return tree


def _packed(obj: Any) -> torch.Tensor:
    """Return an object as bytes; by cloudpickle, which takes functions too."""
    import cloudpickle

    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _check_same(named: list[Named], root_rank: int) -> None:
    """Raise `UserError` that names the roots, or the first tensor, that differ between ranks; collective."""
    rows = [(name, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in named]
    rows_P = job.world().control.gather((root_rank, rows))
    roots = [root for root, _ in rows_P]
    if len(set(roots)) > 1:
        raise WrongValue(f"broadcast_parameters with root_rank {roots} on ranks {list(range(len(roots)))}",
                         "one root_rank on all ranks", "pass the same root_rank on every rank")
    first = rows_P[0][1]
    for rank, (_, theirs) in enumerate(rows_P):
        if theirs == first:
            continue
        n = next((n for n, (a, b) in enumerate(zip(first, theirs)) if a != b), min(len(first), len(theirs)))
        here, there = (f"{r[n][0] or 'a tensor'} ({r[n][2]} {list(r[n][1])})" if n < len(r) else "nothing"
                       for r in (first, theirs))
        raise WrongValue(f"parameters to broadcast differ: at place {n} rank {rank} has {there}, rank 0 has {here}",
                         "the same tensors in the same order on every rank", "build the same model on every rank")
