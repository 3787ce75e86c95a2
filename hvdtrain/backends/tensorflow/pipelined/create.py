"""How the parts of a Keras model that is cut over ranks are made: the whole in host memory, of which a part is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hvdtrain.backends import in_order
from hvdtrain.backends.keras import compiled
from hvdtrain.backends.keras.facts import KerasFacts
from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.keras.task import loss_name
from hvdtrain.backends.tensorflow import placement, state
from hvdtrain.backends.tensorflow.chain import Chain, chain_of
from hvdtrain.backends.tensorflow.gradients import Gradients
from hvdtrain.backends.tensorflow.moving import keep_excluded, move
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.optimizer import Optimizer
from hvdtrain.backends.tensorflow.params import Params
from hvdtrain.backends.tensorflow.pipelined.buffers import PartBuffers
from hvdtrain.backends.tensorflow.pipelined.deferred import Deferred, deferring, make
from hvdtrain.backends.tensorflow.pipelined.ends import UNDO
from hvdtrain.backends.tensorflow.pipelined.evaluator import PartEvaluator
from hvdtrain.backends.tensorflow.pipelined.measuring import check, measure
from hvdtrain.backends.tensorflow.pipelined.names import Names
from hvdtrain.backends.tensorflow.pipelined.part import Part, refuse_released, release
from hvdtrain.backends.tensorflow.pipelined.runs import Runs
from hvdtrain.backends.tensorflow.pipelined.stage import Chunks
from hvdtrain.backends.tensorflow.pipelined.state import PartState
from hvdtrain.backends.tensorflow.pipelined.sums import Sums
from hvdtrain.backends.tensorflow.task import ClassNumbers, Task
from hvdtrain.backends.tensorflow.transforms.precision import MixedPrecision
from hvdtrain.backends.tensorflow.transforms.remat import Remat
from hvdtrain.cluster.control import agreed
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Layout, Mesh
from hvdtrain.core.protocols import Batch, Collectives, Control, ModelSpec
from hvdtrain.parallel.parts import ModelParts, replicas_of
from hvdtrain.parallel.pipeline.partition import agree
from hvdtrain.parallel.precision import LossScale, Precision
from hvdtrain.planning.pipeline.blocks import DeviceProfile

Sample = Callable[[int], Batch]


def cut_parts(spec: ModelSpec, config: Config, control: Control, wire: Collectives, steps_per_epoch: int,
              precision: Precision, sample: Sample | None, mesh: Mesh) -> ModelParts:
    """Return the parts of this rank's blocks of ``spec.model``; collective. The model's other blocks hold nothing then.
    """
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
    """What is known while parts are made."""

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
        if not self._spec.model.trainable_variables:
            raise UserError("the model has no trainable variable", "at least one", "set trainable on a layer")
        chain = chain_of(self._spec, "pipeline")
        self._mixed.install(self._spec.model)
        self.task = Task(self._spec, self._config)
        self._opt = Optimization(self._config, self._spec, steps_per_epoch, whole=False)
        if self._opt.optimizer.built:
            raise UserError("a pipeline over ranks with a compiled optimizer that has trained before, whose state is "
                            "of the whole model", "a fresh one", f"compile the model anew, or {UNDO}")
        self._names = Names(self._spec.model)
        return chain

    def slots(self) -> float:
        """Return how many tensors the optimizer holds for each parameter."""
        return self._names.slots(self._opt.optimizer)

    def parts(self, chain: Chain, layout: Layout, wire: Collectives) -> ModelParts:
        """Keep this rank's blocks and make the parts of them. Collective, where copies meet."""
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
        """This rank's blocks, on its device; the others' memory is given back."""
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
    """Raise `UserError` for what does not go together with a model that is cut over ranks."""
    for key, on in (("sync_batchnorm", config.sync_batchnorm), ("compile: auto", config.compile == "auto")):
        if on:
            raise UserError(f"{key} with a pipeline over ranks and Keras", "one of the two",
                            f"leave {key.partition(':')[0]} out, or {UNDO}")
    refuse_released(model)
