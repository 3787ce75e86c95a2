"""Parts of a PyTorch model; a pipeline and Keras replace some. `hvdtrain.backends.torch.create` calls it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdtrain.backends import in_order
from hvdtrain.backends.misfit import told
from hvdtrain.backends.torch import modules
from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.freezing import TorchFreezing
from hvdtrain.backends.torch.modules import modes_kept, set_modes
from hvdtrain.backends.torch.ops import Ops
from hvdtrain.backends.torch.optim import optimizer_spec
from hvdtrain.backends.torch.optimizer import TorchOptimizer
from hvdtrain.backends.torch.params import TorchFacts, TorchParams, trainable
from hvdtrain.backends.torch.placement import Generators
from hvdtrain.backends.torch.stage import TorchStage
from hvdtrain.backends.torch.state import TorchState
from hvdtrain.backends.torch.task import Metrics, TorchEvaluator, make_task
from hvdtrain.backends.torch.transforms.compile import TorchCompile
from hvdtrain.backends.torch.transforms.placement import Placement
from hvdtrain.backends.torch.transforms.precision import MixedPrecision
from hvdtrain.backends.torch.transforms.remat import Remat
from hvdtrain.backends.torch.transforms.sync_batchnorm import SyncBatchNorm
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config
from hvdtrain.core.protocols import Batch, Collectives
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.precision import LossScale, Precision


class Maker:
    """Makes the parts of one model; a Keras model and a pipeline replace some of them.

    The constructor checks the model and brings it to its device, or to where its blocks are measured.
    """

    whole = True

    def __init__(self, spec: Any, config: Config, rank: int, wire: Collectives, steps_per_epoch: int,
                 precision: Precision, sample: Callable[[int], Batch] | None = None) -> None:
        self.sample = sample or spec.example
        self.spec, self.config, self.rank, self.steps_per_epoch = spec, config, rank, steps_per_epoch
        self.model: torch.nn.Module = spec.model
        self.freezing = TorchFreezing(self.model, config.freeze) if config.freeze else None
        self.optimizer_spec = optimizer_spec(spec, config)  # by name, while all parameters are there
        self.placement = self.place()
        modules.check_model(self.model)
        self.transport = Transport(wire, Ops())
        self.sync = SyncBatchNorm(self.model, self.transport, config.in_parts) if config.sync_batchnorm else None
        frozen = self.freezing.norms if self.freezing else []
        set_modes(self.model, {m: False for m in self.model.modules()
                               if self.model.training and not m.training or m in frozen})
        trainable(self.model)
        self.scale = LossScale(config.loss_scale, self.scaled(precision))
        self.policy = precision
        self.precision = MixedPrecision(precision, self.scale, self.placement.devices)
        self.precision.install(self.model)
        self.task = make_task(spec, config)
        self.batch_weight = getattr(self.task, "batch_weight", None)
        self.generators = Generators(self.placement.devices)

    def place(self) -> Placement:
        """Bring the model to where it belongs, or to where its blocks are measured."""
        return Placement(self.spec, self.config)

    def scaled(self, precision: Precision) -> Collection[int]:
        """Return the ranks that multiply their loss by the loss scale."""
        return precision.scaled

    def parts(self) -> ModelParts:
        """Return the parts; a split model is on its devices by now."""
        params = self.params()
        optimizer = params.optimizer()
        buffers = self.buffers()
        stage = self.stage(params, buffers)
        remat = self.remat(stage)
        compile = self.compile() if self.config.compile == "auto" else None
        state = self.state(params, optimizer, buffers)
        plain = self.config.model_parallel == 1 and self.config.compile == "off" and self.config.remat == "off"
        transforms = in_order(placement=self.placement, precision=self.precision, sync_batchnorm=self.sync,
                              compile=compile, remat=remat)
        return ModelParts(self.model, self.blocks(), stage, params, optimizer, buffers, self.evaluator(),
                     state, transforms, self.policy, self.scale, self.placement.ops(), remat, compile,
                     facts=TorchFacts(self.model, params, state, plain, self.freezing),
                          batch_weight=self.batch_weight)

    def buffers(self) -> Buffers:
        return Buffers(self.model, self.transport)

    def stage(self, params: TorchParams, buffers: Buffers) -> TorchStage:
        return TorchStage(self.model, self.task, params, buffers, self.placement, self.precision, self.sync,
                          self.generators, self.rank, self.caveats)

    def remat(self, stage: TorchStage) -> Remat | None:
        """Return the transform that recomputes blocks; None where no block has a name."""
        sequence = list(self.model.named_children()) if isinstance(self.model, torch.nn.Sequential) else []
        named = sequence if self.spec.blocks is None else self.spec.blocks(self.model)
        if not named:
            return None
        return Remat(self.model, [(str(name), block) for name, block in named], stage, self.sync, self.sample)

    def blocks(self) -> list[torch.nn.Module]:
        """Return the blocks that the model file names, or none."""
        return [] if self.spec.blocks is None else [block for _, block in self.spec.blocks(self.model)]

    def compile(self) -> TorchCompile:
        named = [] if self.spec.blocks is None else self.spec.blocks(self.model)
        waits = self.sync is not None and self.transport.size > 1
        return TorchCompile(self.model, named, self.placement.home.type, waits)

    def params(self) -> TorchParams:
        make = partial(TorchOptimizer, self.config, steps_per_epoch=self.steps_per_epoch, scale=self.scale,
                       spec=self.optimizer_spec)
        return TorchParams(self.model, self.blocks(), self.placement.places(), make, self.whole)

    def evaluator(self) -> TorchEvaluator:
        return TorchEvaluator(self.model, Metrics(self.spec, self.config, self.task), self.placement, self.precision)

    def state(self, params: TorchParams, optimizer: TorchOptimizer, buffers: Buffers) -> TorchState:
        return TorchState(self.model, params.names, optimizer, buffers, self.scale, self.generators)

    def caveats(self) -> list[str]:
        return modules.caveats(self.model, self.sync is not None)


def build_lazy(model: torch.nn.Module, spec: Any, sample: Callable[[int], Batch] | None) -> None:
    """Give lazy layers (`torch.nn.LazyLinear`) their parameters by one sample, in evaluation: nothing is counted."""
    if sample is None or not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return
    batch = sample(1)
    tensors = tuple(torch.from_numpy(np.array(array)) for array in batch)
    tensors = tuple(t.float() if t.is_floating_point() else t for t in tensors)
    with modes_kept(model), told(model, batch), torch.no_grad():
        model.eval()
        model(tensors[0]) if spec.task is None else spec.task(model, tensors)
