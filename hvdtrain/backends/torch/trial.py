"""Trial passes of a PyTorch model: few samples are computed, all is restored, nothing is exchanged."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hvdtrain.backends.loss_coupling import Evaluate, LossValue, per_row
from hvdtrain.backends.torch import modules, placement
from hvdtrain.backends.torch.buffers import remember
from hvdtrain.backends.torch.memory import out_of_memory
from hvdtrain.backends.torch.modules import (
    assign,
    check_loss,
    holders_of,
    mark_written,
    modes_kept,
    put_back_buffers,
    written_parameters,
)
from hvdtrain.backends.torch.placement import Generators
from hvdtrain.backends.torch.snapshot import Modules, attributes_kept
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts


@contextlib.contextmanager
def restoring(model: torch.nn.Module, params: Sequence[torch.Tensor], generators: Generators) -> Iterator[None]:
    """Put back buffers, attributes, random generators and parameters that forward passes write; drop gradients."""
    put_back, written = remember(model), [(p, p.detach().clone()) for p in written_parameters(model)]
    try:
        with generators.kept(), attributes_kept(Modules(model)):
            yield
    finally:
        for param in params:
            param.grad = None
        put_back()
        for param, value in written:
            assign(param, value)


def first_not_finite(params: Sequence[torch.Tensor]) -> int | None:
    """Return the index of the first of ``params`` whose gradient holds a NaN or an infinity; None: all are finite."""
    return next((i for i, p in enumerate(params) if p.grad is not None and not bool(p.grad.isfinite().all())), None)


COPIED_BYTES = 1 << 28
"""Frozen parameters of more bytes in all are not copied: nothing but a model's own assignment can change them."""

_DEVICE_ERROR: Any = getattr(torch, "AcceleratorError", RuntimeError)


def try_samples(parts: ModelParts, batch: Batch, training: bool) -> list[str]:
    """Compute forward and loss as in training, or metrics as in an evaluation; no backward.

    Raises what the model raises. Returns the buffers and parameters that were written, BatchNorm's statistics aside.
    """
    stage: Any = parts.stage  # `TorchStage`, or what slows one down
    with _uncompiled(), _untouched(parts) as written:
        if training:
            check_loss(parts.model, stage.loss_of(batch)[0])
        else:
            parts.evaluator.add(batch)
            parts.measure_names()
        placement.synchronize(stage.devices)  # a GPU tells its errors late
    counted = set(parts.buffers.statistics())
    return [name for name in written if name not in counted]


@contextlib.contextmanager
def untouched(parts: ModelParts, batch: Batch) -> Iterator[None]:
    """Restore everything after the body, for `hvdtrain.engine.first_sample`."""
    stage: Any = parts.stage
    with _uncompiled(), _untouched(parts):
        yield
        placement.synchronize(stage.devices)


def _uncompiled() -> Any:
    """Run what was given to `torch.compile` eagerly in the body: it is compiled for the shapes of training.

    Not for ranks on threads: a stance holds for the process, and two threads that end in another order leave it set.
    """
    if "torch._dynamo" not in sys.modules or threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()  # importing the compiler takes seconds
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _untouched(parts: ModelParts) -> Iterator[list[str]]:
    """Yield a list that gets, after the body, the names of what was restored."""
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
    """Return a function that restores the model and returns (names of what was written, buffers that were made)."""
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
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


_NEUTRAL = (_BatchNorm, _DropoutNd, torch.nn.RNNBase, torch.nn.MultiheadAttention)
"""Layers that differ in training by drawing random numbers, or by taking statistics over a batch."""


@contextlib.contextmanager
def loss_evaluator(parts: ModelParts, pool: Batch) -> Iterator[Evaluate]:
    """Yield a function that evaluates the loss of samples of ``pool``, for `hvdtrain.backends.loss_coupling`."""
    stage: Any = parts.stage
    floating = [p.dtype for p in parts.model.parameters() if p.is_floating_point()]
    eps = max((torch.finfo(dtype).eps for dtype in floating), default=2.0**-23)

    def evaluate(numbers: Sequence[int], training: bool) -> LossValue:
        batch = tuple(array[list(numbers)] for array in pool)
        with _evaluated(parts.model, training) as outputs:
            try:
                with torch.no_grad():
                    total, weight = stage.unrounded(batch)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                # a loss that differentiates the model, such as a gradient penalty
                outputs.clear()
                total, weight = stage.unrounded(batch)
        total, weight = (float(v.detach() if isinstance(v, torch.Tensor) else v) for v in (total, weight))
        leaves = [t.detach().double().cpu().numpy() for t in outputs if t.is_floating_point()]
        return LossValue(total, weight, _added(parts.model) * weight, eps, per_row(leaves, len(numbers)))

    with untouched(parts, pool), _without_tf32():
        yield evaluate


@contextlib.contextmanager
def _evaluated(model: torch.nn.Module, training: bool) -> Iterator[list[torch.Tensor]]:
    """Put ``model``, except `_NEUTRAL` layers, into that mode; yield a list that gets the outputs of its first call."""
    outputs: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, found: Any) -> None:
        outputs.extend(() if outputs else modules.tensors_of(found))

    keras_model = getattr(model, "keras_model", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(modes_kept(model))
        if keras_model is not None:
            from hvdtrain.backends.keras.losses import neutral_layers

            stack.enter_context(neutral_layers(keras_model, keep))
        for module in model.modules():
            module.training = module.training and training and not isinstance(module, _NEUTRAL)
        handle = model.register_forward_hook(keep)
        stack.callback(handle.remove)
        yield outputs


def _added(model: torch.nn.Module) -> float:
    """Return the loss that a Keras model's layers added in the last call."""
    keras_model = getattr(model, "keras_model", None)
    if keras_model is None or not model.of_layers:
        return 0.0
    return float(sum(float(loss.detach().sum()) for loss in keras_model.losses))


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Have GPUs multiply float32 in float32."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn] if torch.cuda.is_available() else []
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before):
            backend.allow_tf32 = allowed
