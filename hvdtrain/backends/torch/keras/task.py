"""Loss and metrics of a Keras model on PyTorch, as sums.

A model file's own ``task(model, batch)`` comes before everything here; then config's loss, by Keras' names; then what
``model.compile`` was given (`hvdtrain.keras.compiled`, `hvdtrain.keras.states`); then cross entropy of logits for
integer targets and squared error for others. The loss is a sum over samples in all of them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import torch

from hvdtrain.backends.torch.transforms import precision
from hvdtrain.backends.torch.keras.module import KerasModule
from hvdtrain.backends.torch.task import Loss, Pair, checked_pair, loss_sum
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.keras import losses
from hvdtrain.keras.compiled import CompiledTask, is_compiled, refuse_own_training, setup_of, split, with_class_weight
from hvdtrain.keras.shapes import guarded
from hvdtrain.keras.states import CompiledMetrics
from hvdtrain.resolve import load_callable

Batch = tuple[torch.Tensor, ...]


class KerasTask:
    """``task(module, batch) -> (loss_sum, weight)`` of a spec whose model is a `keras.Model`."""

    def __init__(self, spec: Any, config: Config) -> None:
        self._named = config.loss
        self._own = None if spec.task is None else Phase(spec.task)
        self._compiled: Any = None
        self._loss: Loss | None = None
        if self._own is not None:
            return
        refuse_own_training(spec.model)
        if config.loss.name != "auto":
            loss = losses.by_name(config.loss)
            self._loss = lambda outputs, targets: loss(targets, outputs)
        elif is_compiled(spec.model) and not config.loss.args:
            self._compiled = CompiledTask(spec.model)

    def __call__(self, module: KerasModule, batch: Batch) -> Pair:
        """Run the model once, in the module's mode."""
        if self._own is not None:
            return checked_pair(self._own.of(module, batch), "task", "(loss_sum, weight)")
        outputs = self.outputs(module, batch)
        if self._compiled is not None:
            total, weight = self._compiled.of_outputs(module.keras_model, outputs, batch, module.training)
            return total, weight
        return self._plain(module, outputs, batch)

    def outputs(self, module: KerasModule, batch: Batch) -> Any:
        """What the model makes of a batch, in float32."""
        x, _, _ = split(module.keras_model, batch)
        return keras.tree.map_structure(precision.widened, module(x))

    def pairs(self, module: KerasModule, outputs: Any, batch: Batch) -> dict[str, Pair]:
        """The losses of an evaluation by name: "loss", and for a compiled model one for each output."""
        if self._compiled is not None:
            return dict(self._compiled.pairs(module.keras_model, outputs, batch))
        return {"loss": self._plain(module, outputs, batch)}

    def _plain(self, module: KerasModule, outputs: Any, batch: Batch) -> Pair:
        """The configured loss, or the one that suits the targets; what layers add counts once for each sample."""
        model = module.keras_model
        _, targets, weights = split(model, batch)
        setup = setup_of(model)
        if module.training and setup.class_weight is not None:
            weights = with_class_weight(setup.class_weight, targets, weights)
        if module.training and setup.follow is not None:
            setup.follow(targets, outputs, weights)
        n, added = batch[0].shape[0], [extra.sum().float() for extra in model.losses]
        if targets is None and getattr(model, "compiled", False) and added:  # layers bring all of the loss
            return n * torch.stack(added).sum(), n
        if not isinstance(targets, torch.Tensor):
            raise UserError(f"the data's targets are {'missing' if targets is None else 'several'}",
                            "one array, where the loss is by name", "compile the model with a loss for each output")
        loss = self._loss
        if loss is None:
            outputs, loss = _suiting(outputs, targets, self._named.args)
        total = loss_sum(loss, outputs, targets, () if weights is None else (weights,), self._named)
        return (total + n * torch.stack(added).sum().to(total.dtype) if added else total), n


class Phase(keras.layers.Layer):
    """Runs a model file's ``function(model, batch)`` as a Keras layer, so that layers inside know whether they train.

    Keras also forgets what the model's layers added to the loss in the call before.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name="phase", autocast=False)
        self._function = function
        self._takes_training = "training" in inspect.signature(function).parameters
        self.built = True

    def of(self, module: KerasModule, batch: Batch) -> Any:
        """The function's result in the module's mode; the model is its own, not the module around it."""
        self.__dict__["_module"] = module  # not tracked as a part of this layer
        return self(batch, training=module.training)

    def call(self, batch: Batch, training: bool = False) -> Any:
        """Call the function; ``training`` reaches nested layers through Keras' call context."""
        more = {"training": training} if self._takes_training else {}
        return self._function(self.__dict__["_module"].keras_model, batch, **more)


def _suiting(outputs: Any, targets: torch.Tensor, args: dict[str, Any]) -> tuple[Any, Loss]:
    """(outputs, loss): cross entropy of logits for integer targets, with the classes moved from the last dimension to
    the second, where PyTorch has them; squared error for others.
    """
    if targets.is_floating_point() or not isinstance(outputs, torch.Tensor):
        squared = guarded(keras.losses.MeanSquaredError(**{"reduction": None, **args}), "auto")
        return outputs, lambda o, t: squared(t, o)
    if outputs.dim() < 2 or outputs.shape[-1] == 1:
        raise UserError(f"the targets are integers and the model's output has shape {tuple(outputs.shape)}",
                        "one output per class", "set loss, for example to BinaryCrossentropy")
    settings = {"from_logits": True, "reduction": None, "axis": 1, **args}
    entropy = keras.losses.SparseCategoricalCrossentropy(**settings)
    return outputs.movedim(-1, 1), lambda o, t: entropy(t, o)


class KerasMetrics:
    """Totals of the loss, of config's and the compiled metrics, as float64[k] by name."""

    def __init__(self, spec: Any, config: Config, task: KerasTask) -> None:
        self._task, self._own = task, spec.task is not None
        self._more = Phase(spec.metrics) if self._own and spec.metrics is not None else None
        names = [] if self._own else config.metrics
        self._users = {name.rpartition(":")[2]: load_callable(name, "metrics") for name in names if ":" in name}
        more = {name: name for name in names if ":" not in name}
        self._states = None if self._own else CompiledMetrics(spec.model, more=more, taken=("loss", *self._users))
        setup_of(spec.model).metrics = self._states
        self._totals: dict[str, np.ndarray] = {}

    def add(self, module: KerasModule, batch: Batch) -> None:
        """Add one batch; the model runs once, or once more for a model file that defines ``metrics``."""
        if self._states is None:
            self._count("loss", self._task(module, batch))
            if self._more is not None:
                found = self._more.of(module, batch)
                if not isinstance(found, Mapping):
                    raise UserError(f"metrics returned a {type(found).__name__}", "a dict of name: (sum, weight)",
                                    "mend the model file's metrics")
                for name, pair in found.items():
                    self._count(name, checked_pair(pair, f"metric {name!r}", "(sum, weight)"))
            return
        _, y, weights = split(module.keras_model, batch)
        outputs = self._task.outputs(module, batch)
        for name, pair in self._task.pairs(module, outputs, batch).items():
            self._count(name, pair)
        for name, metric in self._users.items():
            self._count(name, checked_pair(metric(outputs, y), f"metric {name!r}", "(sum, weight)"))
        if not self._states.built:
            self._states.build(y, outputs, weights)
        self._states.update(y, outputs, weights)

    def _count(self, name: str, pair: Pair) -> None:
        step_2 = np.array([float(value) for value in pair])
        self._totals[name] = self._totals.get(name, 0.0) + step_2

    def take(self) -> dict[str, np.ndarray]:
        """The totals by name, "loss" first; they start anew. Empty where no batch was seen."""
        totals, self._totals = self._totals, {}
        if totals and self._states is not None:
            totals |= self._states.take()
        return totals

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Each metric from its total over all ranks; what is no metric of Keras' is (sum, weight)."""
        if self._states is not None:
            return self._states.results(totals)
        return {name: float(t[0] / t[1]) if t[1] else math.nan for name, t in totals.items()}
