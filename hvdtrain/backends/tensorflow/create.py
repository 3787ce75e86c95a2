"""The parts of a Keras model on TensorFlow: whole, or split over this rank's devices; and its blocks' costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends import in_order
from hvdtrain.backends.keras import compiled
from hvdtrain.backends.keras.facts import KerasFacts
from hvdtrain.backends.keras.freezing import KerasFreezing
from hvdtrain.backends.keras.losses import check_stateful
from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.keras.task import loss_name
from hvdtrain.backends.misfit import told
from hvdtrain.backends.tensorflow import placement, recompute, state
from hvdtrain.backends.tensorflow.buffers import Buffers
from hvdtrain.backends.tensorflow.chain import Chain, chain_of
from hvdtrain.backends.tensorflow.gradients import Gradients
from hvdtrain.backends.tensorflow.ops import Ops
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.optimizer import Optimizer, SplitOptimizer
from hvdtrain.backends.tensorflow.params import Params
from hvdtrain.backends.tensorflow.pipelined.create import cut_parts
from hvdtrain.backends.tensorflow.pipelined.deferred import refuse_released
from hvdtrain.backends.tensorflow.split import Split, measured
from hvdtrain.backends.tensorflow.stage import Stage
from hvdtrain.backends.tensorflow.state import ModelState
from hvdtrain.backends.tensorflow.task import ClassNumbers, Evaluator, Task
from hvdtrain.backends.tensorflow.transforms import sync_batchnorm
from hvdtrain.backends.tensorflow.transforms.compile import XlaCompile
from hvdtrain.backends.tensorflow.transforms.placement import Placement
from hvdtrain.backends.tensorflow.transforms.precision import MixedPrecision
from hvdtrain.backends.tensorflow.transforms.remat import Remat, named_blocks
from hvdtrain.backends.tensorflow.trial import Trial
from hvdtrain.cluster.control import agreed
from hvdtrain.cluster.machine import memory as heap
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Batch, BlockCost, Collectives, Control, ModelSpec
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.pipeline.partition import agree_devices
from hvdtrain.parallel.precision import FP32, LossScale, Precision


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
        self._freezing = KerasFreezing(model, self._config.freeze) if self._config.freeze else None
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
            # Gradients come and go among what stays: of a large model their gaps would be much. For good: to keep what
            # steps free takes about a byte a parameter more.
            heap.map_large()
        sync_batchnorm.release(model)
        placement.seed_model(state.seed_states(model), self._rank)

    def parts(self, split: Split | None) -> ModelParts:
        """Return the parts, of a model that is spread by ``split`` or whole."""
        model, config, scale = self._spec.model, self._config, self._scale
        across = sync_batchnorm.Across(self._wire, config.in_parts) if config.sync_batchnorm else None
        if across and split and sync_batchnorm.norms(model):
            raise UserError("sync_batchnorm with model_parallel, where each part of a micro-batch has its own "
                            "statistics",
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
        facts = KerasFacts(model, retrace=lambda: retrace())
        gradients.around = facts.as_begun
        stage = Stage(model, self._task, self._class_numbers, buffers, gradients, lambda: scale.of(self._rank), across,
                      config.balance != "auto", loss_name(self._spec, config))
        optimizer.unused_in_trace = lambda: stage.unused & gradients.unused

        def retrace() -> None:
            gradients.retrace()
            stage.calls.drop()

        if self._freezing is not None:
            facts.freeze(self._freezing)
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
            why = "XLA compiles for one device, and model_parallel partitions the model over several"
        elif config.sync_batchnorm and self._wire.size > 1:
            why = "sync_batchnorm sums over ranks inside the model, which XLA does not support"
        elif config.balance == "auto":
            why = "balance: auto changes micro-batch sizes, and XLA would recompile for each"
        elif state.seed_states(self._spec.model):
            why = "XLA draws dropout masks that differ from TensorFlow's: the results would differ"
        return XlaCompile(why, remat)

    def _blocks(self) -> tuple[Any, ...]:
        named = self._spec.blocks
        return () if named is None else tuple(layer for _, layer in named(self._spec.model))


SLOT_S = 0.05
"""About how long one block is timed."""


class Costs:
    """Measures blocks of ``model``, whose calls the caller marks. ``across``: sums BatchNorm's moments over ranks."""

    def __init__(self, model: keras.Model, gradients: Gradients, across: sync_batchnorm.Across | None) -> None:
        self._model, self._gradients, self._across = model, gradients, across

    def forward(self, batch: Batch) -> recompute.Recording:
        return self._recorded(batch, lambda parts: self._gradients.task(self._model, parts, True))

    def measure(self, batch: Batch) -> dict[str, BlockCost]:
        split = self._gradients.split
        n_parts = split.parts(len(tf.nest.flatten(tuple(batch))[0])) if split else 1
        scale = tf.constant(1.0, tf.float64)
        found = self._recorded(batch, lambda parts: self._gradients.traced(parts, scale, n_parts))
        seconds = self._seconds(batch)
        read = {recompute.source(t).name for op in found.graph.get_operations()[found.n_forward:] for t in op.inputs}
        costs: dict[str, BlockCost] = {}
        for block in recompute.blocks(found, {call.name for call in found.calls}):
            inner = recompute.nbytes(block.read().values())
            more = recompute.nbytes(t for name, t in block.inputs().items() if name not in read)
            before = costs.get(block.name, BlockCost(block.name, 0, seconds.get(block.name, 0.0)))
            costs[block.name] = BlockCost(block.name, before.saved_bytes + inner - more, before.forward_s,
                                          max(before.inner_bytes, inner))
        return costs

    def _recorded(self, batch: Batch, work: Callable[[Any], Any]) -> recompute.Recording:
        leaves = [tf.convert_to_tensor(x) for x in tf.nest.flatten(tuple(batch))]
        kept: list[recompute.Recording] = []

        def trace(*parts: tf.Tensor) -> None:
            with recompute.recording() as found:
                work(tf.nest.pack_sequence_as(tuple(batch), parts))
                kept.append(found)

        with sync_batchnorm.local_statistics(self._across):
            function = tf.function(trace, jit_compile=False, autograph=False)
            self._graph = function.get_concrete_function(*leaves)  # operations live as long as it
        self._model._clear_losses()
        return kept[0]

    def _seconds(self, batch: Batch) -> dict[str, float]:
        """Return the median time of each block's forward passes on ``batch``, all calls of a block together."""
        tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
        seconds: dict[str, float] = {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            function = tf.function(call, jit_compile=False, autograph=False)
            y = function()
            took: list[float] = []
            while len(took) < 3 or sum(took) < SLOT_S and len(took) < 20:
                begin = time.perf_counter()
                for tensor in tf.nest.flatten(function()):
                    if tf.is_tensor(tensor) and "GPU" in tensor.device:
                        tensor[:1].numpy()  # a copy to the host waits for the device
                took.append(time.perf_counter() - begin)
            seconds[name] = seconds.get(name, 0.0) + sorted(took)[len(took) // 2]
            return y

        def work(_: tuple[Any, ...]) -> list[tf.Tensor]:
            with recompute.instead(timed), sync_batchnorm.local_statistics(self._across):
                self._gradients.task(self._model, tensors, True)
            return []

        Trial(self._model, work)(batch)
        self._model._clear_losses()
        return seconds
