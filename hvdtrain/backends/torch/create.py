"""How a step is made: over a whole model, over one that is split, over a Keras model.

Owns that choice, and the agreement of all ranks that a split takes. What a step does is in `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdtrain.backends.torch import keras
from hvdtrain.backends.torch.step import TorchStep
from hvdtrain.cluster.exit import agreed
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.misfit import told
from hvdtrain.parallel.plan import agree
from hvdtrain.precision.policy import FP32, Precision
from hvdtrain.protocols import Batch


def create_step(spec: Any, config: Config, control: Any, steps_per_epoch: int, precision: Precision = FP32,
                sample: Callable[[int], Batch] | None = None, data: Any = None) -> Any:
    """A step over ``spec.model``, on this rank's device or split over several; collective where it is split.

    ``sample``: so many samples of the run's ``data``, to measure the blocks of a split model with, and to build a Keras
    model that has no variables yet, or lazy layers of PyTorch.
    """
    def make() -> Any:
        given = (spec, config, control.rank, steps_per_epoch, precision)
        if not keras.is_keras(spec.model):
            _build(spec, sample)
            return TorchStep(*given)
        if config.model_parallel > 1:
            raise UserError(f"model_parallel {config.model_parallel} with a Keras model on PyTorch",
                            "a model whose framework splits it", "set model_parallel: 1, or KERAS_BACKEND=tensorflow")
        return keras.create_step(*given, sample=sample, data=data)

    def measure() -> Any:
        source = sample or spec.example
        with told(spec.model, source(2) if source else ()):
            return step.measure(sample, control)

    if config.model_parallel == 1:
        return make()
    step = agreed(control, make, "model")
    measured = agreed(control, measure, "split")
    plan = agree(measured, config, control)
    agreed(control, lambda: step.split(plan), "split")
    return step


def _build(spec: Any, sample: Callable[[int], Batch] | None) -> None:
    """Give lazy layers (`torch.nn.LazyLinear`) their parameters by one sample, in evaluation: nothing is counted."""
    model = spec.model
    if sample is None or not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return
    batch = sample(1)
    tensors = tuple(torch.from_numpy(np.array(array)) for array in batch)
    tensors = tuple(t.float() if t.is_floating_point() else t for t in tensors)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with told(model, batch), torch.no_grad():
        model(tensors[0]) if spec.task is None else spec.task(model, tensors)
    for module, training in modes:
        module.training = training
