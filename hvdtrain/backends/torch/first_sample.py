"""Runs samples through a PyTorch step's model and loss or metrics, and puts everything back as it was.

Owns what has to be put back: parameters, buffers, gradients, modes, random generators, metrics. Exchanges nothing:
it comes before `TorchStep.attach`, so that there are no hooks and no joint statistics yet.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdtrain.backends.torch import placement, state
from hvdtrain.protocols import Batch

COPIED_BYTES = 1 << 28
"""Frozen parameters of more bytes in all are not copied: nothing but a model's own assignment can change them."""

_DEVICE_ERROR: Any = getattr(torch, "AcceleratorError", RuntimeError)


def try_samples(step: Any, batch: Batch, training: bool) -> None:
    """Forward and loss as in training, or metrics as in an evaluation; no backward. Raises what the model raises."""
    with _uncompiled(), _untouched(step), step.generators_kept():
        if training:
            step._forward(batch)
        else:
            step.evaluate(batch)
        placement.synchronize(step._layout.devices)  # a GPU tells its errors late


def _uncompiled() -> Any:
    """Within it what was given to `torch.compile` runs as it is: it is compiled for the shapes of training."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _untouched(step: Any) -> Iterator[None]:
    put_back = _undo(step.model, step._layout)
    try:
        yield
    finally:
        with contextlib.suppress(_DEVICE_ERROR):  # a GPU that has failed does nothing any more
            step._metrics.take()
            put_back()


def _undo(model: torch.nn.Module, layout: Any) -> Callable[[], None]:
    """What puts the model and all random generators back as they are now."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    large = sum(p.nbytes for p in frozen) > COPIED_BYTES
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not (large and any(t is p for p in frozen))]
    kept = {id(t) for t in tensors}
    copies = {name: t.detach().clone() for name, t in _named(model).items() if id(t) in kept}
    grads = [(p, p.grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    random, further = state.random_arrays(), layout.random()

    def put_back() -> None:
        state.load_random(random)
        layout.load_random(further)
        for module, training in modes:
            module.training = training
        for param, grad in grads:
            param.grad = grad
        with torch.no_grad():
            for name, tensor in _named(model).items():  # by name: a buffer may be another tensor now
                copy = copies.get(name)
                if copy is not None and tensor.shape == copy.shape and not torch.equal(tensor, copy):
                    tensor.copy_(copy)  # a cache that has grown stays
    return put_back


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
