"""The parts of a Keras model on PyTorch: PyTorch's, but for what Keras keeps or says elsewhere.

Owns which parts those are: names of variables, seeded generators, metrics, the optimizer of ``model.compile``, files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import torch

from hvdtrain.backends.keras.compiled import build, setup_of
from hvdtrain.backends.keras.facts import KerasFacts
from hvdtrain.backends.keras.losses import check_stateful, generator_kept
from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.keras.saving import stable_names
from hvdtrain.backends.keras.task import Task
from hvdtrain.backends.model_spec import refuse_groups
from hvdtrain.backends.torch import placement
from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.evaluator import TorchEvaluator
from hvdtrain.backends.torch.generators import Generators
from hvdtrain.backends.torch.keras.alone import without_tensorflow
from hvdtrain.backends.torch.keras.module import KerasModule, dropping, normalising, seed_states
from hvdtrain.backends.torch.keras.optim import compiled_optimizer
from hvdtrain.backends.torch.keras.state import KerasState
from hvdtrain.backends.torch.maker import Maker
from hvdtrain.backends.torch.optimizer import TorchOptimizer
from hvdtrain.backends.torch.params import TorchParams
from hvdtrain.backends.torch.slices import Slices
from hvdtrain.backends.torch.transforms import precision as widths
from hvdtrain.backends.torch.transforms.compile import TorchCompile
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch, Collectives
from hvdtrain.parallel.parts import Parts
from hvdtrain.parallel.precision.policy import Precision

_STRIDE = 1_000_003
"""Distance of two ranks' seeds."""

_COUNTER = re.compile(r"_\d+(?=[/_ ]|$)")
"""Keras' numbers of layers, which count within a process: ``dense_7/kernel`` here may be ``dense/kernel`` elsewhere."""


class KerasMaker(Maker):
    """Makes the parts of a `keras.Model`, which is ``spec.model``, by way of a `KerasModule`."""

    def __init__(self, spec: Any, config: Config, rank: int, wire: Collectives, steps_per_epoch: int,
                 precision: Precision, sample: Callable[[int], Batch] | None = None) -> None:
        refuse_groups(spec, "a Keras model on PyTorch",
                      "compile the model with the optimizer that it is to have, or set KERAS_BACKEND=tensorflow")
        with torch.no_grad(), without_tensorflow():
            build(spec, sample)
            check_stateful(spec.model, config, "torch")
        self.keras_model: keras.Model = spec.model
        if config.sync_batchnorm and normalising(self.keras_model):
            raise UserError("sync_batchnorm with Keras' BatchNormalization on PyTorch",
                            "layers that look at one sample at a time, or statistics of each rank's own samples",
                            "use GroupNormalization, set sync_batchnorm: false, or KERAS_BACKEND=tensorflow")
        with without_tensorflow():
            task = Task(spec, config, widths.full)
            self._evaluation = Evaluation(spec, config, task)
        inner = dataclasses.replace(
            spec, model=KerasModule(self.keras_model, task.of_layers), metrics=None, blocks=None,
            task=lambda module, batch: task(self.keras_model, batch, module.training))
        super().__init__(inner, config, rank, wire, steps_per_epoch, precision)
        self.batch_weight = task.batch_weight
        self.generators = KerasGenerators(self.placement.devices, self.keras_model)
        self._adopted = compiled_optimizer(config, self.keras_model)
        if self._adopted is not None:
            setup_of(self.keras_model).optimizer = self._adopted.own
        placement.forget_keras_generator()
        for seed in seed_states(self.keras_model):
            first, counter = (int(n) for n in keras.ops.convert_to_numpy(seed))
            seed.assign([(first + _STRIDE * rank) % 2**31, counter])

    def parts(self) -> Parts:
        """PyTorch's, with what callbacks may change of Keras' layers."""
        made = super().parts()
        facts = KerasFacts(self.keras_model, made.facts)
        made.facts, made.state.facts = facts, facts.saved  # type: ignore[attr-defined]
        return made

    def params(self) -> KerasParams:
        """Tensors that are compared between ranks without Keras' counters."""
        make = partial(TorchOptimizer, self.config, steps_per_epoch=self.steps_per_epoch, scale=self.scale)

        def make_for(tensors: Sequence[torch.Tensor], *, names: Sequence[str] = (),
                     slices: Slices | None = None) -> TorchOptimizer:
            own = [p for _, p in self.model.named_parameters() if p.requires_grad]
            same = len(own) == len(tensors) and all(map(lambda a, b: a is b, own, tensors))
            adopted = self._adopted if self._adopted is None or same else self._adopted.over(tensors)
            return make(tensors, adopted=adopted, slices=slices, names=names)

        return KerasParams(self.model, [], self.placement.places(), make_for)

    def buffers(self) -> Buffers:
        """Return the variables under their names in the module; a model may declare them by their paths."""
        own, weights = {id(t): n for n, t in self.model.named_buffers()}, self.keras_model.weights
        plain = keras.layers.BatchNormalization
        counted = [own[id(v.value)] for layer in self.keras_model._flatten_layers()
                   if isinstance(layer, plain) and type(layer).call is plain.call
                   for v in (layer.moving_mean, layer.moving_variance) if id(v.value) in own]
        paths = {v.path: name for v, name in zip(weights, stable_names(weights))}
        return Buffers(self.model, self.transport, statistics=counted, aliases=paths)

    def compile(self) -> TorchCompile:
        """Nothing: Keras' layers are no modules that could be compiled one by one."""
        return TorchCompile(self.model, [], self.placement.home.type, why="Keras' layers on PyTorch are computed as "
                            "they are; KERAS_BACKEND=tensorflow compiles them")

    def evaluator(self) -> KerasEvaluator:
        """Keras' metrics."""
        return KerasEvaluator(self.model, self._evaluation, self.placement, self.precision)

    def state(self, params: TorchParams, optimizer: TorchOptimizer, buffers: Buffers) -> KerasState:
        """With Keras' files, and a compiled optimizer's state."""
        return KerasState(self.keras_model, self.model, params.names, optimizer, buffers, self.scale, self.generators)

    def caveats(self) -> list[str]:
        """Layers whose result depends on how a batch is cut (law 2)."""
        found = super().caveats()
        if normalising(self.keras_model):
            found.append("BatchNorm takes its statistics over each rank's own samples")
        if dropping(self.keras_model):
            found.append("dropout draws differ with the number of ranks")
        return found


class KerasParams(TorchParams):
    """`TorchParams` without Keras' counters in what ranks compare."""

    def made_of(self) -> list[str]:
        """Return a line for each variable."""
        return [_COUNTER.sub("", line) for line in super().made_of()]


class KerasEvaluator(TorchEvaluator):
    """`TorchEvaluator` of Keras' metrics, which keep totals of their own shapes."""

    def add(self, batch: Batch) -> None:
        """Add one batch to the metrics' totals."""
        with without_tensorflow():  # metrics are made at the first
            super().add(batch)

    def measure(self, batch: Any) -> None:
        """Add one batch of tensors in the modes of an evaluation."""
        self._metrics.count(self._metrics.measure(batch))

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Return metrics by name, from totals that were summed over ranks."""
        return dict(self._metrics.results(totals))


class KerasGenerators(Generators):
    """`Generators`, and the seeded ones of ``model``'s layers."""

    def __init__(self, devices: Sequence[torch.device], model: keras.Model) -> None:
        super().__init__(devices)
        self._model = model

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of each by name."""
        return {**super().state(), **{f"keras.seed.{i}": np.array(keras.ops.convert_to_numpy(v))
                                      for i, v in enumerate(seed_states(self._model))}}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Undo `state`."""
        super().load(arrays)
        for i, variable in enumerate(seed_states(self._model)):
            if f"keras.seed.{i}" in arrays:
                variable.assign(arrays[f"keras.seed.{i}"])

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """After it, each is as it was before it, Keras' own generator of unseeded calls too."""
        with super().kept(), generator_kept(), without_tensorflow():  # asked for where a model refuses its input
            yield
