"""Parts of a Keras model on PyTorch: names of variables, seeded generators, metrics, checkpoint state, files.

The optimizer of ``model.compile`` is `hvdtrain.backends.torch.keras.optim`'s, all else PyTorch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from hvdtrain.backends.keras import saving
from hvdtrain.backends.keras.compiled import build, setup_of
from hvdtrain.backends.keras.facts import KerasFacts
from hvdtrain.backends.keras.freezing import KerasFreezing
from hvdtrain.backends.keras.losses import check_stateful, generator_kept
from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.keras.saving import stable_names
from hvdtrain.backends.keras.task import Task
from hvdtrain.backends.model_spec import refuse_groups
from hvdtrain.backends.torch import placement, resuming, state
from hvdtrain.backends.torch.buffers import Buffers
from hvdtrain.backends.torch.keras import without_tensorflow
from hvdtrain.backends.torch.keras.optim import CompiledOptimizer, compiled_optimizer
from hvdtrain.backends.torch.maker import Maker
from hvdtrain.backends.torch.optimizer import Slices, TorchOptimizer
from hvdtrain.backends.torch.params import TorchParams
from hvdtrain.backends.torch.placement import Generators
from hvdtrain.backends.torch.task import TorchEvaluator
from hvdtrain.backends.torch.transforms import precision as widths
from hvdtrain.backends.torch.transforms.compile import TorchCompile
from hvdtrain.checkpoint import weights
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch, Collectives
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.precision import Precision

_STRIDE = 1_000_003
"""Distance of two ranks' seeds."""

_COUNTER = re.compile(r"_\d+(?=[/_ ]|$)")
"""Keras' numbers of layers, which count within a process: ``dense_7/kernel`` here may be ``dense/kernel`` elsewhere."""


class KerasMaker(Maker):
    """Makes the parts of a `keras.Model`, which is ``spec.model``, by way of a `KerasModule`."""

    def __init__(self, spec: Any, config: Config, rank: int, wire: Collectives, steps_per_epoch: int,
                 precision: Precision, sample: Callable[[int], Batch] | None = None) -> None:
        refuse_groups(spec, "a Keras model on PyTorch",
                      "compile the model with its optimizer, or set KERAS_BACKEND=tensorflow")
        with torch.no_grad(), without_tensorflow():
            build(spec, sample)
            check_stateful(spec.model, config, "torch")
        self._freezing = KerasFreezing(spec.model, config.freeze) if config.freeze else None
        self.keras_model: keras.Model = spec.model
        if config.sync_batchnorm and normalising(self.keras_model):
            raise UserError("sync_batchnorm with Keras' BatchNormalization on PyTorch",
                            "layers that use one sample at a time, or statistics of each rank's own samples",
                            "use GroupNormalization, set sync_batchnorm: false, or KERAS_BACKEND=tensorflow")
        with without_tensorflow():
            task = Task(spec, config, widths.full)
            self._evaluation = Evaluation(spec, config, task)
        inner = dataclasses.replace(
            spec, model=KerasModule(self.keras_model, task.of_layers), metrics=None, blocks=None,
            task=lambda module, batch: task(self.keras_model, batch, module.training))
        super().__init__(inner, dataclasses.replace(config, freeze=[]), rank, wire, steps_per_epoch, precision)
        self.batch_weight = task.batch_weight
        self.generators = KerasGenerators(self.placement.devices, self.keras_model)
        self._adopted = compiled_optimizer(config, self.keras_model)
        if self._adopted is not None:
            setup_of(self.keras_model).optimizer = self._adopted.own
        placement.forget_keras_generator()
        for seed in seed_states(self.keras_model):
            first, counter = (int(n) for n in keras.ops.convert_to_numpy(seed))
            seed.assign([(first + _STRIDE * rank) % 2**31, counter])

    def parts(self) -> ModelParts:
        made = super().parts()
        facts = KerasFacts(self.keras_model, made.facts)
        if self._freezing is not None:
            facts.freeze(self._freezing)
        made.facts, made.state.facts = facts, facts.saved  # type: ignore[attr-defined]
        return made

    def params(self) -> KerasParams:
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
        """Return a transform that compiles no block: Keras' layers are no modules to compile one by one."""
        return TorchCompile(self.model, [], self.placement.home.type, why="Keras layers on PyTorch run "
                            "uncompiled; KERAS_BACKEND=tensorflow compiles them")

    def evaluator(self) -> KerasEvaluator:
        return KerasEvaluator(self.model, self._evaluation, self.placement, self.precision)

    def state(self, params: TorchParams, optimizer: TorchOptimizer, buffers: Buffers) -> KerasState:
        return KerasState(self.keras_model, self.model, params.names, optimizer, buffers, self.scale, self.generators)

    def caveats(self) -> list[str]:
        found = super().caveats()
        if normalising(self.keras_model):
            found.append("BatchNorm computes its statistics over each rank's own samples")
        if dropping(self.keras_model):
            found.append("dropout draws differ with the number of ranks")
        return found


class KerasParams(TorchParams):
    """`TorchParams` without Keras' counters in what ranks compare."""

    def made_of(self) -> list[str]:
        return [_COUNTER.sub("", line) for line in super().made_of()]


class KerasEvaluator(TorchEvaluator):
    """`TorchEvaluator` of Keras' metrics, which keep totals of their own shapes."""

    def add(self, batch: Batch) -> None:
        with without_tensorflow():  # metrics are made at the first
            super().add(batch)

    def measure(self, batch: Any) -> None:
        self._metrics.count(self._metrics.measure(batch))

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        return dict(self._metrics.results(totals))

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        with without_tensorflow():
            return super().outputs(batch)

    def computed(self, batch: Any) -> Any:
        return self._metrics.outputs(batch)


class KerasGenerators(Generators):
    """`Generators`, and the seeded ones of ``model``'s layers."""

    def __init__(self, devices: Sequence[torch.device], model: keras.Model) -> None:
        super().__init__(devices)
        self._model = model

    def state(self) -> dict[str, np.ndarray]:
        return {**super().state(), **{f"keras.seed.{i}": np.array(keras.ops.convert_to_numpy(v))
                                      for i, v in enumerate(seed_states(self._model))}}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        super().load(arrays)
        for i, variable in enumerate(seed_states(self._model)):
            if f"keras.seed.{i}" in arrays:
                variable.assign(arrays[f"keras.seed.{i}"])

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore all states after the body, Keras' own generator of unseeded calls too."""
        with super().kept(), generator_kept(), without_tensorflow():  # asked for where a model refuses its input
            yield


class KerasState(state.TorchState):
    """`TorchState`, with all state of a compiled optimizer and with Keras' files."""

    def __init__(self, keras_model: keras.Model, *args: Any) -> None:
        super().__init__(*args)
        self._keras_model, self.finalized = keras_model, False
        self._adopted = self.optimizer.optimizer if isinstance(self.optimizer.optimizer, CompiledOptimizer) else None

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        resuming.check(self.optimizer, rest)
        if self._adopted is not None:
            own = state.optimizer_arrays(self.optimizer, self.names)
            alone = set(map(_slot, own)) ^ set(map(_slot, groups["optimizer"]))  # by the settings of one of the runs
            kept = [{name: array for name, array in side.items() if _slot(name) not in alone}
                    for side in (own, groups["optimizer"])]
            state.check_names("optimizer", *kept)
            groups = {**groups, "optimizer": kept[1]}
        super().load(groups, rest)

    def try_export(self) -> str:
        with without_tensorflow():
            return super().try_export() or saving.left_out(self._keras_model)

    def export(self, directory: Path) -> list[str]:
        """Write model.safetensors and Keras' own file; return their names.

        The latter is model.keras, or model.weights.h5 for a model whose class Keras cannot describe. With use_ema the
        averaged weights are written, as `keras.Model.fit` leaves them.
        """
        use_ema = self._adopted is not None and self._adopted.own.use_ema and not self.finalized
        averaged = self._adopted if use_ema else None
        kept = [tensor.detach().clone() for tensor in self.optimizer.tensors] if averaged else []
        if averaged:
            averaged.own.finalize_variable_values(averaged.own._trainable_variables)
        try:
            return _write(self.model, self._keras_model, Path(directory))
        finally:
            with torch.no_grad():
                for tensor, value in zip(self.optimizer.tensors, kept):
                    tensor.copy_(value)


def _write(module: torch.nn.Module, model: keras.Model, directory: Path) -> list[str]:
    state.write_safetensors(module, directory / weights.FILE)
    with without_tensorflow():
        return [weights.FILE, *saving.write(model, directory)]


def _slot(name: str) -> str:
    """Return the slot's name in an optimizer's array of a checkpoint, such as momentum."""
    return name.rpartition("/")[2]


class KerasModule(torch.nn.Module):
    """``keras_model``, which has its variables, as a module of PyTorch with the model's own tensors.

    Keras on PyTorch keeps every variable, BatchNorm's statistics and states of random generators too, as a parameter
    that its layers hold twice. Here each stands once, under a readable name. Parameters: trainable variables in the
    model's order, then frozen ones. Buffers: BatchNorm's statistics and the like. In neither: states of random
    generators (`seed_states`) and of metrics. ``of_layers``: losses that layers add are part of the loss.
    """

    keras_model: keras.Model

    def __init__(self, keras_model: keras.Model, of_layers: bool = True) -> None:
        super().__init__()
        self.of_layers = of_layers
        self.__dict__["keras_model"] = keras_model  # not a submodule: its parameters would stand here twice
        weights = keras_model.weights
        names = dict(zip(map(id, weights), stable_names(weights)))
        trained = keras_model.trainable_variables
        meant = {id(v) for layer in keras_model._flatten_layers() for v in layer._trainable_variables}
        meant -= {id(v) for v in trained}
        frozen = [v for v in weights if id(v) in meant]
        rest = [v for v in weights if id(v) not in meant and not any(v is t for t in trained)]
        for variable in (*trained, *frozen):
            self.register_parameter(names[id(variable)], variable.value)
        for variable in rest:
            self.register_buffer(names[id(variable)], variable.value)

    def forward(self, *inputs: Any) -> Any:
        return self.keras_model(*inputs, training=self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> KerasModule:
        """Move or cast in place, as the variables are also Keras'; `UserError` where Keras computes elsewhere."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            assert tensor is not None
            moved = fn(tensor.data)
            if moved.device.type != tensor.device.type:
                raise UserError(f"Keras keeps its tensors on {tensor.device.type} and this rank computes on "
                                f"{moved.device.type}", "one device for both",
                                "unset KERAS_TORCH_DEVICE, and build the model outside keras.device(...)")
            tensor.data = moved
        return self


def seed_states(model: keras.Model) -> list[Any]:
    """Return the states of the model's seeded random generators, in its order: neither weights nor metrics."""
    counted = {id(v) for v in (*model.weights, *model.metrics_variables)}
    own = [v for v in model.variables if id(v) not in counted]
    return [v for v in own if v.path.rpartition("/")[2].startswith("seed_generator_state")]


def normalising(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the layers in training mode that take statistics over a batch, and keep them."""
    return [layer for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]


def dropping(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the layers that draw random numbers while training."""
    def draws(layer: Any) -> bool:
        rates = (getattr(layer, name, 0.0) for name in ("rate", "dropout", "recurrent_dropout", "stddev"))
        return any(isinstance(r, (int, float)) and not isinstance(r, bool) and r > 0 for r in rates)
    return [layer for layer in model._flatten_layers() if draws(layer)]
