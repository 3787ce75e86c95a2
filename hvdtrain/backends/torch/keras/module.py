"""A Keras model as a module of PyTorch: what trains is a parameter, what layers count on the way is a buffer.

Keras on PyTorch keeps every variable, BatchNorm's statistics and the states of random generators too, as a parameter
that its layers hold twice. Here each stands once, under a readable name, where `TorchStep` looks for its kind.
The tensors are the model's own.
"""

from __future__ import annotations

from typing import Any

import keras
import torch

from hvdtrain.backends.keras.saving import stable_names
from hvdtrain.core.errors import UserError


class KerasModule(torch.nn.Module):
    """``keras_model``, which has its variables, with ``training`` handed on to its layers.

    ``of_layers``: what its layers add is part of the loss.
    Parameters: trainable variables in the model's order, then frozen ones. Buffers: BatchNorm's statistics and their
    like. In neither: states of random generators (`seed_states`) and of metrics.
    """

    keras_model: keras.Model

    def __init__(self, keras_model: keras.Model, of_layers: bool = True) -> None:
        super().__init__()
        self.of_layers = of_layers
        self.__dict__["keras_model"] = keras_model  # not a submodule: its parameters would stand here twice
        weights = keras_model.weights
        names = dict(zip(map(id, weights), stable_names(weights)))
        trained = keras_model.trainable_variables
        meant = _meant_to_train(keras_model) - {id(v) for v in trained}
        frozen = [v for v in weights if id(v) in meant]
        rest = [v for v in weights if id(v) not in meant and not any(v is t for t in trained)]
        for variable in (*trained, *frozen):
            self.register_parameter(names[id(variable)], variable.value)
        for variable in rest:
            self.register_buffer(names[id(variable)], variable.value)

    def forward(self, *inputs: Any) -> Any:
        """Call the model in this module's mode."""
        return self.keras_model(*inputs, training=self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> KerasModule:
        """Move or cast in place, as the variables are also Keras'; `UserError` where Keras computes elsewhere."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            assert tensor is not None
            moved = fn(tensor.data)
            if moved.device.type != tensor.device.type:
                raise UserError(f"Keras keeps its tensors on {tensor.device.type} and this rank computes on "
                                f"{moved.device.type}", "one device for both",
                                "unset KERAS_TORCH_DEVICE, and build the model in no keras.device(...)")
            tensor.data = moved
        return self


def _meant_to_train(model: keras.Model) -> set[int]:
    """Ids of the variables that layers made to be trained, frozen or not."""
    return {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}


def seed_states(model: keras.Model) -> list[Any]:
    """The states of the model's seeded random generators, in its order: what is neither a weight nor a metric."""
    counted = {id(v) for v in (*model.weights, *model.metrics_variables)}
    own = [v for v in model.variables if id(v) not in counted]
    return [v for v in own if v.path.rpartition("/")[2].startswith("seed_generator_state")]


def normalising(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers in training mode that take statistics over a batch, and keep them."""
    return [layer for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]


def dropping(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers that draw random numbers while training."""
    def draws(layer: Any) -> bool:
        rates = (getattr(layer, name, 0.0) for name in ("rate", "dropout", "recurrent_dropout", "stddev"))
        return any(isinstance(r, (int, float)) and not isinstance(r, bool) and r > 0 for r in rates)
    return [layer for layer in model._flatten_layers() if draws(layer)]
