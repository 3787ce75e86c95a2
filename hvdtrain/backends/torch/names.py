"""Names of a PyTorch model's tensors and modules as they are without wrappers such as torch.compile's.

Owns which modules are wrappers. What names of older checkpoints stand for is left to `hvdtrain.checkpoint.adapters`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvdtrain.core.errors import UserError

WRAPPERS = (("torch.nn", "DataParallel", "module"),
            ("torch.nn.parallel", "DistributedDataParallel", "module"),
            ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
            ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper",
             "_checkpoint_wrapped_module"))
"""Module and name of each class of wrappers, and the attribute that holds the user's module."""


class Plain:
    """Names of ``model`` without its wrappers, which their types tell: a layer that is called "module" stays."""

    def __init__(self, model: torch.nn.Module) -> None:
        loaded = [(sys.modules[home], name, held) for home, name, held in WRAPPERS if home in sys.modules]
        kinds = [(kind, held) for home, name, held in loaded if (kind := getattr(home, name, None)) is not None]
        self._inner = {f"{path}.{held}" if path else held
                       for path, module in model.named_modules(remove_duplicate=False)
                       for kind, held in kinds if isinstance(module, kind)}
        self._inner |= {path.replace("_checkpoint_wrapped_module.", "") for path in self._inner}  # as state_dict has it

    def __call__(self, name: str) -> str:
        """Return ``name``, which the model gives a tensor or a module, without the parts of wrappers."""
        if not self._inner:
            return name
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts, 1) if ".".join(parts[:i]) not in self._inner)


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters in the model's order, a shared one once, by names without wrappers."""
    plain = Plain(model)
    return ((plain(name), param) for name, param in model.named_parameters())


def state_dict(model: torch.nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return the model's state_dict by names without wrappers, with the versions of its modules."""
    plain, own = Plain(model), model.state_dict(**kwargs)
    versions = getattr(own, "_metadata", {})
    return _versioned({plain(name): tensor for name, tensor in own.items()},
                      {plain(path): facts for path, facts in versions.items()})


def load_state_dict(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Undo `state_dict`."""
    plain, own = Plain(model), model.state_dict()
    given = {name: tensors[plain(name)] for name in own}
    with _expanded_written(model):
        model.load_state_dict(_versioned(given, getattr(own, "_metadata", {})))


def _versioned(tensors: Mapping[str, torch.Tensor], versions: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return ``tensors`` with what modules ask when they load: without it some convert weights as if of an old version.
    """
    found = OrderedDict(tensors)
    found._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return found


@contextlib.contextmanager
def _expanded_written(model: torch.nn.Module) -> Iterator[None]:
    """Let the body write to expanded buffers, whose elements share memory; one that has its values again comes back."""
    places = [(module._buffers, key, buffer) for module in model.modules() if isinstance(module._buffers, dict)
              for key, buffer in module._buffers.items()
              if buffer is not None and any(n > 1 and not step for n, step in zip(buffer.shape, buffer.stride()))]
    copies = {id(buffer): buffer.clone() for _, _, buffer in places}
    for holder, key, buffer in places:
        holder[key] = copies[id(buffer)]
    try:
        yield
    finally:
        for holder, key, buffer in places:
            if torch.equal(copies[id(buffer)], buffer):
                holder[key] = buffer


def check(model: torch.nn.Module) -> None:
    """Raise `UserError` where two tensors would have one name without wrappers: a checkpoint would lose one."""
    plain, first = Plain(model), dict[str, str]()
    for name in model.state_dict():
        other = first.setdefault(plain(name), name)
        if other != name:
            raise UserError(f"a wrapper of the model has a tensor {other!r} beside {name!r}, which it wraps",
                            f"one tensor of the name {plain(name)!r}", "give one of them another name")
