"""Runs samples through a PyTorch model and its loss or metrics, and puts everything back as it was.

Owns what has to be put back: parameters, buffers, attributes, gradients, modes, random generators, metrics.
Exchanges nothing: it comes before `Stage.connect` and `ModelParts.install`, so that there are no hooks and no joint
statistics yet.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdtrain.backends.torch import placement
from hvdtrain.backends.torch.entries import holders_of, mark_written, put_back_buffers
from hvdtrain.backends.torch.modes import modes_kept
from hvdtrain.backends.torch.recompute.memory import Modules, attributes_kept
from hvdtrain.backends.torch.stage import check_loss
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts

COPIED_BYTES = 1 << 28
"""Frozen parameters of more bytes in all are not copied: nothing but a model's own assignment can change them."""

_DEVICE_ERROR: Any = getattr(torch, "AcceleratorError", RuntimeError)


def try_samples(parts: ModelParts, batch: Batch, training: bool) -> list[str]:
    """Forward and loss as in training, or metrics as in an evaluation; no backward. Raises what the model raises.

    Returns the buffers and parameters that this wrote to, BatchNorm's statistics aside.
    """
    stage: Any = parts.stage  # `TorchStage`, or what slows one down
    with _uncompiled(), _untouched(parts) as written:
        if training:
            check_loss(parts.model, stage.loss_of(batch)[0])
        else:
            parts.evaluator.add(batch)
        placement.synchronize(stage.devices)  # a GPU tells its errors late
    counted = set(parts.buffers.statistics())
    return [name for name in written if name not in counted]


@contextlib.contextmanager
def untouched(parts: ModelParts, batch: Batch) -> Iterator[None]:
    """Put everything back after the body as it was: for `hvdtrain.engine.pipeline_first_sample`."""
    stage: Any = parts.stage
    with _uncompiled(), _untouched(parts):
        yield
        placement.synchronize(stage.devices)


def _uncompiled() -> Any:
    """Within it what was given to `torch.compile` runs as it is: it is compiled for the shapes of training."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _untouched(parts: ModelParts) -> Iterator[list[str]]:
    """Give a list that holds, afterwards, the names of what was put back."""
    written: list[str] = []
    stage: Any = parts.stage
    put_back, kept = _undo(parts.model), contextlib.ExitStack()
    kept.enter_context(stage.generators.kept())
    kept.enter_context(modes_kept(parts.model))
    kept.enter_context(attributes_kept(Modules(parts.model)))
    try:
        yield written
    finally:
        with contextlib.suppress(_DEVICE_ERROR):  # a GPU that has failed does nothing any more
            parts.evaluator.totals()
            names, appeared = put_back()
            written += names
            parts.buffers.appeared(appeared)  # type: ignore[attr-defined]
            kept.close()


def _undo(model: torch.nn.Module) -> Callable[[], tuple[list[str], dict[str, torch.Tensor]]]:
    """Return what puts the model back as it is now.

    That returns the names of what was written to, and the buffers that were made.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    large = sum(p.nbytes for p in frozen) > COPIED_BYTES
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not (large and any(t is p for p in frozen))]
    kept = {id(t) for t in tensors}
    copies = {name: t.detach().clone() for name, t in _named(model).items() if id(t) in kept}
    grads = [(p, p.grad) for p in model.parameters()]
    versions = {name: t._version for name, t in _named(model).items() if id(t) not in kept}
    holders = holders_of(model)

    def put_back() -> tuple[list[str], dict[str, torch.Tensor]]:
        appeared: dict[str, torch.Tensor] = {}
        written = [name for holder in holders for name in put_back_buffers(*holder, copies, appeared)]
        for param, grad in grads:
            param.grad = grad
        with torch.no_grad():
            for name, tensor in _named(model).items():  # by name: a buffer may be another tensor now
                copy = copies.get(name)
                if copy is not None and tensor.shape == copy.shape and not torch.equal(tensor, copy):
                    tensor.copy_(copy)  # a cache that was resized in place stays
                    written.append(name)
                elif copy is None and versions.get(name, tensor._version) != tensor._version:
                    written.append(name)
        mark_written(t for name, t in _named(model).items() if name in written)
        return written, appeared
    return put_back


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
