"""One training step of a Keras model on PyTorch: `TorchStep`, with what Keras keeps or says elsewhere.

Owns the places where the two differ, and nothing of the step itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from hvdtrain.backends.torch import state
from hvdtrain.backends.torch.keras import forget_generator
from hvdtrain.backends.torch.keras.alone import without_tensorflow
from hvdtrain.backends.torch.keras.module import KerasModule, dropping, normalising, seed_states
from hvdtrain.backends.torch.keras.optim import compiled_optimizer
from hvdtrain.backends.torch.keras.task import KerasMetrics, KerasTask
from hvdtrain.backends.torch.optim import Optimization
from hvdtrain.backends.torch.step import TorchStep
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.keras.compiled import build, setup_of
from hvdtrain.keras.seeds import generator_kept
from hvdtrain.precision.policy import FP32, Precision
from hvdtrain.protocols import Batch

_STRIDE = 1_000_003
"""Distance of two ranks' seeds."""


_COUNTER = re.compile(r"_\d+(?=[/_ ]|$)")
"""Keras' numbers of layers, which count within a process: ``dense_7/kernel`` here may be ``dense/kernel`` elsewhere."""


class KerasStep(TorchStep):
    """`TorchStep` over a `KerasModule`; ``spec.model`` is the `keras.Model`."""

    def __init__(self, spec: Any, config: Config, rank: int, steps_per_epoch: int, precision: Precision = FP32,
                 sample: Callable[[int], Batch] | None = None) -> None:
        with torch.no_grad(), without_tensorflow():
            build(spec, sample)
        self.keras_model: keras.Model = spec.model
        if config.sync_batchnorm and normalising(self.keras_model):
            raise UserError("sync_batchnorm with Keras' BatchNormalization on PyTorch",
                            "layers that look at one sample at a time, or statistics of each rank's own samples",
                            "use GroupNormalization, set sync_batchnorm: false, or KERAS_BACKEND=tensorflow")
        with without_tensorflow():
            task = KerasTask(spec, config)
            metrics = KerasMetrics(spec, config, task)
        inner = dataclasses.replace(spec, model=KerasModule(self.keras_model), task=task, metrics=None)
        super().__init__(inner, config, rank, steps_per_epoch, precision)
        self._metrics: Any = metrics
        self._adopted = compiled_optimizer(config, self.keras_model)
        if self._adopted is not None:
            self._opt = Optimization(config, self._params, steps_per_epoch, self._adopted)
            setup_of(self.keras_model).optimizer = self._adopted.own
        forget_generator()
        for seed in seed_states(self.keras_model):
            first, counter = (int(n) for n in keras.ops.convert_to_numpy(seed))
            seed.assign([(first + _STRIDE * rank) % 2**31, counter])

    def made_of(self) -> list[str]:
        """One line for each variable, without Keras' own counters; the compiled optimizer, its schedule and rate."""
        lines = [_COUNTER.sub("", line) for line in super().made_of()]
        if self._adopted is None:
            return lines
        words = [self._adopted.name, *self._adopted.describe().values(), f"rate {self._opt.rate():g}"]
        return [*lines[:-1], f"optimizer {' '.join(words)}"]

    def evaluate(self, batch: Batch) -> None:
        """Add one batch to the metrics' totals."""
        with without_tensorflow():  # metrics are made at the first
            super().evaluate(batch)

    def eval_results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Metrics by name, from totals that were summed over ranks."""
        return dict(self._metrics.results(totals))

    def caveats(self) -> list[str]:
        """Layers whose result depends on how a batch is cut (law 2)."""
        found = super().caveats()
        if normalising(self.keras_model):
            found.append("BatchNorm takes its statistics over each rank's own samples")
        if dropping(self.keras_model):
            found.append("dropout draws differ with the number of ranks")
        return found

    @contextlib.contextmanager
    def generators_kept(self) -> Iterator[None]:
        """Around what must not move the model's seeded generators, nor Keras' own."""
        kept = self._seeds()
        try:
            with generator_kept(), without_tensorflow():  # Keras asks for it where a model refuses its input
                yield
        finally:
            self._load_seeds(kept)

    def _once(self, batch: Batch, then: Callable[[], None] | None = None) -> None:
        kept = self._seeds()
        super()._once(batch, then)
        self._load_seeds(kept)

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`; a checkpoint that does not fit changes nothing."""
        self._opt.check(rest)
        if self._adopted is not None:
            own = state.optimizer_arrays(self._opt, self._names)
            state.check_names("optimizer", own, groups["optimizer"])
        super().load(groups, rest)

    def rank_state(self) -> dict[str, np.ndarray]:
        """Random generators, the model's own too, and compressor state of this rank."""
        return {**super().rank_state(), **self._seeds()}

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`; say what of the compressor's state does not fit."""
        seeds = {name: own[name] for name in self._seeds() if name in own}
        self._load_seeds(seeds)
        return super().load_rank({name: array for name, array in own.items() if name not in seeds})

    def _seeds(self) -> dict[str, np.ndarray]:
        return {f"keras.seed.{i}": np.array(keras.ops.convert_to_numpy(v))
                for i, v in enumerate(seed_states(self.keras_model))}

    def _load_seeds(self, seeds: dict[str, np.ndarray]) -> None:
        for i, variable in enumerate(seed_states(self.keras_model)):
            if f"keras.seed.{i}" in seeds:
                variable.assign(seeds[f"keras.seed.{i}"])

    def export(self, directory: Any) -> list[str]:
        """Write model.safetensors and Keras' own file; return their names.

        The latter is model.keras, or model.weights.h5 for a model whose class Keras cannot describe. With use_ema the
        averaged weights are written, as `keras.Model.fit` leaves them.
        """
        averaged = self._adopted is not None and self._adopted.own.use_ema
        kept = [p.detach().clone() for p in self._params]
        if averaged:
            assert self._adopted is not None
            self._adopted.own.finalize_variable_values(self.keras_model.trainable_variables)
        try:
            return _write(self.model, self.keras_model, Path(directory))
        finally:
            if averaged:
                with torch.no_grad():
                    for param, value in zip(self._params, kept):
                        param.copy_(value)


def _write(module: torch.nn.Module, model: keras.Model, directory: Path) -> list[str]:
    from safetensors.torch import save_model

    save_model(module, str(directory / "model.safetensors"))
    whole, only_weights = directory / "model.keras", directory / "model.weights.h5"
    with warnings.catch_warnings(), without_tensorflow():
        warnings.simplefilter("ignore")
        try:
            model.save(whole)
            return ["model.safetensors", whole.name]
        except (NotImplementedError, TypeError, ValueError):
            whole.unlink(missing_ok=True)
            model.save_weights(only_weights)
            return ["model.safetensors", only_weights.name]
