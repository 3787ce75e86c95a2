"""Parts of a PyTorch model: unpartitioned, partitioned over devices or ranks, or of a Keras model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvdtrain.backends.misfit import told
from hvdtrain.backends.torch import keras, placement
from hvdtrain.backends.torch.maker import Maker, build_lazy
from hvdtrain.backends.torch.pipelined import create as pipelined
from hvdtrain.backends.torch.pipelined.stage import refuse_cut
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.machine import memory
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Batch, Collectives, Control
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.pipeline.partition import agree_devices
from hvdtrain.parallel.pipeline.plan import DevicePlan
from hvdtrain.parallel.precision import FP32, Precision
from hvdtrain.planning.pipeline.blocks import DeviceProfile


def make_parts(spec: Any, config: Config, control: Control, wire: Collectives, steps_per_epoch: int,
               precision: Precision = FP32, sample: Callable[[int], Batch] | None = None, data: Any = None,
               mesh: Mesh | None = None) -> ModelParts:
    """Return parts of ``spec.model``, on this rank's device or split over several; collective where it is split.

    ``sample``: n samples of the run's ``data``, to measure the blocks of a split model with, and to build a Keras model
    that has no variables yet, or lazy layers of PyTorch.
    """
    placement.defer_compiler()
    if placement.device().type == "cpu":
        # Under ZeRO gradients come and go among those that stay: of a large model their gaps would be much.
        short = config.data_parallel.name == "zero" and _nbytes(spec.model) >= memory.LARGE_BYTES
        if short:
            memory.map_large(settles=True)
        else:
            memory.keep_freed()

    if mesh is not None and mesh.deepest > 1:
        return pipelined.make_parts(spec, config, control, wire, steps_per_epoch, precision, sample, mesh)

    def begin() -> Maker:
        if not keras.is_keras(spec.model):
            refuse_cut(spec.model)
            build_lazy(spec.model, spec, sample)
            return Maker(spec, config, control.rank, wire, steps_per_epoch, precision, sample)
        if config.model_parallel > 1:
            raise UserError(f"model_parallel {config.model_parallel} with a Keras model on PyTorch",
                            "a model whose framework can partition it", "set model_parallel: 1, or "
                                                                        "KERAS_BACKEND=tensorflow")
        return keras.maker(spec, config, control.rank, wire, steps_per_epoch, precision, sample=sample, data=data)

    def measure() -> list[DeviceProfile]:
        source = sample or spec.example
        with told(spec.model, source(2) if source else ()):
            return maker.placement.measure(maker.task, sample, control, maker.precision, maker.optimizer_spec)

    def finish(plan: DevicePlan) -> ModelParts:
        maker.placement.split(plan)
        return maker.parts()

    if config.model_parallel == 1:
        return begin().parts()
    maker = agreed(control, begin, "model")
    plan = agree_devices(agreed(control, measure, "split"), config, control)
    return agreed(control, lambda: finish(plan), "split")


def _nbytes(model: Any) -> int:
    """Return the bytes of the parameters that exist; 0 for a model of Keras, which may have none yet."""
    if not isinstance(model, torch.nn.Module):
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters() if not is_lazy(p))
