"""Evaluate the loss of a PyTorch model on a few samples, for `hvdtrain.backends.loss_coupling`.

Owns what must not differ between two evaluations beside the samples: layers that draw random numbers or take
statistics of a batch compute as in evaluation. What is put back is `first_sample`'s and `trial`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hvdtrain.backends.loss_coupling import Evaluate, LossValue, per_row
from hvdtrain.backends.torch import trees
from hvdtrain.backends.torch.first_sample import untouched
from hvdtrain.backends.torch.modes import modes_kept
from hvdtrain.backends.torch.trial import out_of_memory
from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import Parts

_NEUTRAL = (_BatchNorm, _DropoutNd, torch.nn.RNNBase, torch.nn.MultiheadAttention)
"""Layers that differ in training by drawing random numbers, or by taking statistics over a batch."""


@contextlib.contextmanager
def loss_evaluator(parts: Parts, pool: Batch) -> Iterator[Evaluate]:
    """Yield a function that evaluates the loss of samples of ``pool``; leave everything as it was."""
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
        outputs.extend(() if outputs else trees.tensors_of(found))

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
    """Return what the layers of a Keras model have added to the loss in its last call."""
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
