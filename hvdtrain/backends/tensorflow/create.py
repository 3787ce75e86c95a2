"""The parts of a Keras model on TensorFlow: whole, or split over this rank's devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hvdtrain.backends import in_order
from hvdtrain.backends.keras import compiled
from hvdtrain.backends.keras.facts import KerasFacts
from hvdtrain.backends.keras.losses import check_stateful
from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.keras.task import loss_name
from hvdtrain.backends.misfit import told
from hvdtrain.backends.tensorflow import placement, state
from hvdtrain.backends.tensorflow.buffers import Buffers
from hvdtrain.backends.tensorflow.chain import Chain, chain_of
from hvdtrain.backends.tensorflow.gradients import Gradients
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.optimizer import Optimizer, SplitOptimizer
from hvdtrain.backends.tensorflow.params import Params
from hvdtrain.backends.tensorflow.pipelined.create import cut_parts
from hvdtrain.backends.tensorflow.pipelined.deferred import refuse_released
from hvdtrain.backends.tensorflow.recompute_costs import Costs
from hvdtrain.backends.tensorflow.split import Split, measured
from hvdtrain.backends.tensorflow.stage import Stage
from hvdtrain.backends.tensorflow.state import ModelState
from hvdtrain.backends.tensorflow.task import ClassNumbers, Evaluator, Task
from hvdtrain.backends.tensorflow.transforms import sync_batchnorm
from hvdtrain.backends.tensorflow.transforms.compile import XlaCompile
from hvdtrain.backends.tensorflow.transforms.placement import Placement
from hvdtrain.backends.tensorflow.transforms.precision import MixedPrecision
from hvdtrain.backends.tensorflow.transforms.remat import Remat, named_blocks
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.machine import memory as heap
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Collectives, Control, ModelSpec
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.pipeline.partition import agree_devices
from hvdtrain.parallel.precision import FP32, LossScale, Precision

if TYPE_CHECKING:
    from hvdtrain.core.protocols import Batch


def make_parts(spec: ModelSpec, config: Config, control: Control, wire: Collectives, steps_per_epoch: int,
               precision: Precision = FP32, sample: Callable[[int], Batch] | None = None, data: Any = None,
               mesh: Mesh | None = None) -> ModelParts:
    """Return the parts of ``spec.model`` on this rank's device or devices.

    A model that has no variables yet is built from ``sample(1)`` of the run's ``data``, which knows how nested inputs
    lie. With ``model_parallel`` it is collective: the parts are made in host memory, every rank measures its blocks on
    ``sample(n)`` (n samples as numpy arrays; without it the model file's example), and all agree on one partition.
    """
    compiled.begin(spec.model, data)
    if mesh is not None and mesh.deepest > 1:
        return cut_parts(spec, config, control, wire, steps_per_epoch, precision, sample, mesh)
    making = _Making(spec, config, wire, steps_per_epoch, precision, control.rank)
    if config.model_parallel == 1:
        making.begin(sample)
        return making.parts(None)
    samples = sample or spec.example

    def begin() -> Chain:
        placement.split_devices(config.model_parallel)
        if samples is None:
            raise UserError("model_parallel without samples to measure blocks with", "data, or example(B) in the "
                            "model file", "give the model file an example(B)")
        with tf.device(placement.HOST):
            making.begin(sample)
        return chain_of(spec)

    chain = agreed(control, begin, "model")
    own = making.opt.optimizer

    def measure() -> Any:
        with told(spec.model, samples(2)):
            return measured(chain, own, config, control, samples)

    found = agreed(control, measure, "split")
    return making.parts(Split(chain, agree_devices(found, config, control), own))


class _Making:
    """State between the steps of making parts. ``opt``: the optimizer, from `begin` on."""

    def __init__(self, spec: ModelSpec, config: Config, wire: Collectives, steps_per_epoch: int, precision: Precision,
                 rank: int) -> None:
        self._spec, self._config, self._wire, self._steps = spec, config, wire, steps_per_epoch
        self._precision, self._rank = precision, rank
        self._scale = LossScale(config.loss_scale, precision.scaled)
        self.opt: Optimization

    def begin(self, sample: Callable[[int], Batch] | None) -> None:
        """Build model and optimizer, and move the model's random generators to this rank's own stream."""
        placement.require_tensorflow()
        placement.keep_sums()
        model: keras.Model = self._spec.model
        refuse_released(model)
        compiled.build(self._spec, sample)
        check_stateful(model, self._config, "tensorflow")
        self._sample = sample or self._spec.example
        if not model.trainable_variables:
            raise UserError("the model has no trainable variable", "at least one", "set trainable on a layer")
        self._mixed = MixedPrecision(self._precision, self._scale)
        self._mixed.install(model)  # a split is measured in the types that it will compute in
        self._task, self._class_numbers = Task(self._spec, self._config), ClassNumbers(self._spec, self._config)
        self._evaluator = Evaluator(Evaluation(self._spec, self._config, self._task), self._class_numbers)
        divided = self._config.data_parallel.name == "zero" and self._wire.size > 1 and self._config.model_parallel == 1
        self.opt = Optimization(self._config, self._spec, self._steps, whole=not divided)
        if divided and not placement.on_gpu(model) and state.nbytes(model.trainable_variables) >= heap.LARGE_BYTES:
            # Gradients come and go among what stays: of a large model their gaps would be much. For good: TensorFlow
            # makes new parameters in every update, so that none has a lasting place.
            heap.map_large()
        sync_batchnorm.release(model)
        placement.seed_model(state.seed_states(model), self._rank)

    def parts(self, split: Split | None) -> ModelParts:
        """Return the parts, of a model that is spread by ``split`` or whole."""
        model, config, scale = self._spec.model, self._config, self._scale
        across = sync_batchnorm.Across(self._wire, config.in_parts) if config.sync_batchnorm else None
        if across and split and sync_batchnorm.norms(model):
            raise UserError("sync_batchnorm with model_parallel, whose parts of a micro-batch each have statistics",
                            "one of the two", "set sync_batchnorm: false, or model_parallel: 1")
        blocks = split.chain.layers if split else self._blocks()
        params = Params(model, self.opt, scale, blocks, split)
        optimizer = SplitOptimizer(self.opt, params.variables, scale, split) if split else Optimizer(
            self.opt, params.variables, scale)
        buffers = Buffers(model, self.opt, Transport(self._wire, Ops()))
        named = named_blocks(self._spec)
        remat = Remat(named, self._sample) if named else None
        gradients = Gradients(model, self._task, self._rank in self._precision.scaled, split, remat)
        if remat:
            remat.measures = Costs(model, gradients, across)
        compile = self._compile(remat) if config.compile == "auto" else None
        gradients.compile = compile
        facts = KerasFacts(model, retrace=gradients.retrace)
        gradients.around = facts.as_begun
        stage = Stage(model, self._task, self._class_numbers, buffers, gradients, lambda: scale.of(self._rank), across,
                      config.balance != "auto", loss_name(self._spec, config))
        optimizer.unused_in_trace = lambda: stage.unused & gradients.unused
        transforms = in_order(placement=Placement(split) if split else None, precision=self._mixed,
                              sync_batchnorm=across, compile=compile, remat=remat)
        model_state = ModelState(model, self.opt, scale, buffers.restart, self._rank)
        model_state.facts = facts.saved
        return ModelParts(model, blocks, stage, params, optimizer, buffers, self._evaluator, model_state, transforms,
                     self._precision, scale,
                     [Ops(device) for device in split.plan.devices] if split else (), remat,
                     compile, facts=facts, batch_weight=self._task.batch_weight)

    def _compile(self, remat: Remat | None) -> XlaCompile:
        config = self._config
        why = ""
        if config.model_parallel > 1:
            why = "XLA compiles for one device, and model_parallel splits the model over several"
        elif config.sync_batchnorm and self._wire.size > 1:
            why = "sync_batchnorm sums over ranks in the middle of the model, for which XLA has no code"
        elif config.balance == "auto":
            why = "balance: auto changes the size of a micro-batch, for each of which XLA would compile again"
        elif state.seed_states(self._spec.model):
            why = "XLA draws other masks than TensorFlow: a model with dropout would train to other results"
        return XlaCompile(why, remat)

    def _blocks(self) -> tuple[Any, ...]:
        named = self._spec.blocks
        return () if named is None else tuple(layer for _, layer in named(self._spec.model))
