"""Parts of a partitioned Keras model: the whole is built in host memory, measured, and one rank's blocks are kept.

Owns the check that a task needs the model's outputs alone. The partition is `hvdtrain.parallel.pipeline`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends import in_order
from hvdtrain.backends.keras import compiled
from hvdtrain.backends.keras.facts import KerasFacts
from hvdtrain.backends.keras.freezing import KerasFreezing
from hvdtrain.backends.keras.metrics import Evaluation, zeros_like_one
from hvdtrain.backends.keras.task import Phase, loss_name
from hvdtrain.backends.misfit import told
from hvdtrain.backends.tensorflow import placement, state
from hvdtrain.backends.tensorflow.chain import Chain, chain_of, check_same, profile
from hvdtrain.backends.tensorflow.gradients import Gradients
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.optimizer import Optimizer
from hvdtrain.backends.tensorflow.params import Params
from hvdtrain.backends.tensorflow.pipelined.crossing import CALLS, UNDO, Crossing, First, Last, Runs, input_of
from hvdtrain.backends.tensorflow.pipelined.deferred import (
    Deferred,
    Part,
    deferring,
    make,
    present,
    reads,
    refuse_released,
    release,
)
from hvdtrain.backends.tensorflow.pipelined.stage import Chunks, PartEvaluator, Sums
from hvdtrain.backends.tensorflow.pipelined.state import Names, PartBuffers, PartState
from hvdtrain.backends.tensorflow.placement import keep_excluded, move
from hvdtrain.backends.tensorflow.split import _seam
from hvdtrain.backends.tensorflow.task import ClassNumbers, Task
from hvdtrain.backends.tensorflow.transforms.precision import MixedPrecision
from hvdtrain.backends.tensorflow.transforms.remat import Remat
from hvdtrain.backends.tensorflow.trial import Trial
from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Layout, Mesh
from hvdtrain.core.protocols import Batch, Collectives, Control, ModelSpec
from hvdtrain.parallel.parts import ModelParts, replicas_of
from hvdtrain.parallel.pipeline.partition import agree, measured_samples
from hvdtrain.parallel.precision import LossScale, Precision
from hvdtrain.planning.pipeline.blocks import DeviceProfile, Needs

Sample = Callable[[int], Batch]


def cut_parts(spec: ModelSpec, config: Config, control: Control, wire: Collectives, steps_per_epoch: int,
              precision: Precision, sample: Sample | None, mesh: Mesh) -> ModelParts:
    """Return the parts of this rank's blocks of ``spec.model``; collective. The model's other blocks are released."""
    making = _Making(spec, config, precision, control.rank, mesh)
    chain = agreed(control, lambda: making.built(sample, steps_per_epoch), "model")
    samples = sample or spec.example

    def find() -> DeviceProfile:
        if samples is None:
            raise UserError("a pipeline without samples to measure blocks with", "data, or example(B) in the model "
                            "file", "give the model file an example(B)")
        check(chain, spec, making.task, samples(2))
        return measure(chain, making.task, config, control, mesh, making.slots(), samples)

    layout = agree(agreed(control, find, "pipeline"), config, control, mesh)
    return agreed(control, lambda: making.parts(chain, layout, wire), "model")


class _Making:
    """State between the steps of making parts."""

    def __init__(self, spec: Any, config: Config, precision: Precision, rank: int, mesh: Mesh) -> None:
        self._spec, self._config, self._precision, self._rank = spec, config, precision, rank
        scaled = [r for r in precision.scaled if mesh.copy_of(r) == mesh.copy]
        self._scaled = bool(scaled)
        self._scale = LossScale(config.loss_scale, precision.scaled)
        self._factor_of = scaled[0] if scaled else rank
        self._mixed = MixedPrecision(precision, self._scale)
        self.task: Task
        self._opt: Optimization
        self._names: Names

    def built(self, sample: Sample | None, steps_per_epoch: int) -> Chain:
        """Build the whole model in host memory, and an optimizer without state; return the model's blocks."""
        placement.require_tensorflow()
        _refuse(self._spec.model, self._config)
        placement.keep_sums()
        with deferring():
            compiled.build(self._spec, sample)
        if self._config.freeze:
            KerasFreezing(self._spec.model, self._config.freeze)
        if not self._spec.model.trainable_variables:
            raise UserError("the model has no trainable variable", "at least one", "set trainable on a layer")
        chain = chain_of(self._spec, "pipeline")
        self._mixed.install(self._spec.model)
        self.task = Task(self._spec, self._config)
        self._opt = Optimization(self._config, self._spec, steps_per_epoch, whole=False)
        if self._opt.optimizer.built:
            raise UserError("a pipeline over ranks with a compiled optimizer that has trained before, whose "
                            "state is for the whole model", "a fresh one", f"compile the model again, or {UNDO}")
        self._names = Names(self._spec.model)
        return chain

    def slots(self) -> float:
        return self._names.slots(self._opt.optimizer)

    def parts(self, chain: Chain, layout: Layout, wire: Collectives) -> ModelParts:
        """Keep this rank's blocks and make the parts of them. Collective over replicas."""
        spec, config, scale, opt, names = self._spec, self._config, self._scale, self._opt, self._names
        task, class_numbers = self.task, ClassNumbers(spec, config)
        part = self._kept(chain, layout)
        runs = Runs(chain, layout)
        evaluator = PartEvaluator(spec, Evaluation(spec, config, task), class_numbers, runs)
        opt.keep(part)
        of_optimizer, owners = names.of_optimizer(opt.optimizer, part.trainable_variables)
        if config.data_parallel.name != "zero":
            opt.build()
        replicas = replicas_of(layout, wire)
        buffers = PartBuffers(part, opt, replicas, chain.layers, owners)
        params = Params(part, opt, scale, chain.layers)
        params.specs = [dataclasses.replace(s, name=names.param(v)) for s, v in zip(params.specs, params.variables)]
        chunk_of = [next(k for k, chunk in enumerate(runs.chunks) if chain.owner[id(v)] in chunk)
                    for v in params.variables]
        remat = Remat([(chain.names[i], chain.layers[i]) for i in layout.blocks])
        remat.names = chain.names
        gradients = Gradients(part, task, self._scaled, remat=remat)
        facts = KerasFacts(spec.model)
        gradients.around = facts.as_begun
        stage = Chunks(part, task, class_numbers, buffers, gradients, lambda: scale.of(self._factor_of), None,
                       config.balance != "auto", loss_name(spec, config), runs=runs,
                       sums=Sums(params.variables, chunk_of), names=[s.name for s in params.specs],
                       evaluator=evaluator)
        return ModelParts(part, tuple(chain.layers[i] for i in layout.blocks), stage, params,
                     Optimizer(opt, params.variables, scale), buffers, evaluator,
                     PartState(part, opt, scale, buffers.restart, self._rank, names=names, of_optimizer=of_optimizer),
                     in_order(precision=self._mixed, remat=remat), self._precision, scale, remat=remat,
                     layout=layout, replicas=replicas, facts=facts, batch_weight=task.batch_weight)

    def _kept(self, chain: Chain, layout: Layout) -> Part:
        """Return this rank's blocks, on its device; release the others' memory."""
        self._mixed.remove(chain.model)
        opt = self._opt.optimizer
        keys = {opt._var_key(v): v for v in chain.model.trainable_variables if not isinstance(v, Deferred)}
        own = [chain.layers[i] for i in layout.blocks]
        part = Part(chain.model, own)
        mine = {id(v) for v in part.variables}
        release(v for layer in chain.layers for v in layer.variables if id(v) not in mine)
        make(part.variables)
        if not placement.in_host_memory():
            for variable in part.variables:
                move(variable, "/GPU:0")
        keep_excluded(opt, keys)
        placement.seed_model(state.seed_states(part), layout.mesh.copy)
        return part


def _refuse(model: Any, config: Config) -> None:
    for key, on in (("sync_batchnorm", config.sync_batchnorm), ("compile: auto", config.compile == "auto")):
        if on:
            raise UserError(f"{key} with a pipeline over ranks and Keras", "one of the two",
                            f"leave {key.partition(':')[0]} out, or {UNDO}")
    refuse_released(model)


def check(chain: Chain, spec: Any, task: Any, batch: Batch) -> None:
    """Raise `UserError` unless the blocks one after the other are the model, and ``task`` needs its outputs alone.

    The shapes of a compiled model's outputs are kept, since nobody can call it later.
    """
    tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
    with told(spec.model, batch), tf.device(placement.HOST):
        check_same(chain, _input(chain, task, tensors))
        Trial(chain.model, lambda given: _check_task(chain, task, given))(tensors)
        if spec.task is not None and spec.metrics is not None:
            last = Last(chain.model, lambda x, came, training: Crossing(chain.model(x, training=training), []))
            last.take(Crossing(None, []), CALLS)
            task(last, tensors, False)
            Phase(spec.metrics, last)(tensors, training=False)
        if spec.task is None and compiled.is_compiled(chain.model):
            outputs = chain.model(compiled.split(chain.model, tensors)[0], training=False)
            compiled.setup_of(chain.model).outputs = zeros_like_one(outputs)


def _input(chain: Chain, task: Any, batch: tuple[Any, ...]) -> Any:
    """Return the task's input of the model; `UserError` if it differs between two calls."""
    one, other = (input_of(task, First(chain.model), batch, True) for _ in range(2))
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other)):
        if not np.array_equal(a, b):
            raise UserError("the task gives the model a different x for the same batch, and the first "
                            "and last rank of a pipeline would draw different "
                            "ones", "a task whose x depends on the batch alone",
                            f"draw random numbers in the data or in a block, or {UNDO}")
    return one


def _check_task(chain: Chain, task: Any, batch: tuple[Any, ...]) -> list[tf.Tensor]:
    """Run the task on outputs that pass no gradient: only its own reads of parameters are left."""
    def run(x: Any, came: Crossing, training: bool) -> Crossing:
        before = len(found)
        with tape.stop_recording():
            y = chain.model(x, training=training)
            losses = [tf.convert_to_tensor(loss) for loss in chain.model.losses]
        del found[before:]
        return Crossing(tf.nest.map_structure(_seam, y), losses)

    last = Last(chain.model, run)
    last.take(Crossing(None, []))
    with tf.GradientTape() as tape, reads() as found:
        loss_sum, weight = task(last, batch, True)
    if not last.called:
        raise UserError("the task does not call the model", "a task that calls model(x)", "fix the model file's task")
    if found or tape.watched_variables():
        raise UserError("the task reads parameters of a partitioned model", "a loss of the outputs of "
                        "model(x) and the batch alone: the rank that computes it has only the last blocks",
                        f"add such terms with add_loss or a regularizer in the layers, or {UNDO}")
    return [loss_sum, weight]


def measure(chain: Chain, task: Any, config: Config, control: Control, mesh: Mesh, slots: float,
            sample: Callable[[int], Sequence[Any]]) -> DeviceProfile:
    """Return this device's profile, block by block, for ``slots``; `UserError` if one sample does not fit."""
    device = placement.HOST if placement.in_host_memory() else "/GPU:0"
    samples = measured_samples(config, mesh)
    blocks, why = profile(chain, sample, samples, device, lambda batch: _input(chain, task, batch), apart=True,
                                around=present)
    (capacity,), _ = placement.capacity_bytes((device,), control.local_size)
    buckets = float(len(mesh.copies) > 1)
    return DeviceProfile(blocks, samples, capacity, Needs(1.0 + buckets, slots), device.lstrip("/"), why=why)
