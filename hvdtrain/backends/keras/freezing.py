"""Layers and variables of a Keras model that the key ``freeze`` keeps from training, on any backend of Keras.

The patterns are `hvdtrain.planning.freezing`'s; `hvdtrain.backends.keras.facts` has the run follow a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from hvdtrain.planning.freezing import ALWAYS, Freeze, epochs_frozen


class KerasFreezing:
    """The layers and variables of ``model`` that ``freeze`` names; their names are those of layers, joined by dots.

    The constructor freezes what stays frozen for the whole run, and makes trainable what is unfrozen later, so that the
    run's parts include it. A layer is frozen with its last variable: BatchNormalization of Keras then normalizes with
    its running statistics. ``objects``: name, layer or variable, and epoch of what is unfrozen later.
    """

    def __init__(self, model: keras.Model, freeze: Freeze) -> None:
        named = dict(_named(model))
        trained = {name: v for name, (layer, v) in named.items() if any(v is t for t in layer._trainable_variables)}
        epochs = epochs_frozen(freeze, list(trained), [name for name in named if name not in trained])
        layers = [(path, layer) for path, layer in _layers(model) if layer.weights]
        spans = [(path, layer, min((e for name, e in epochs.items() if name.startswith(f"{path}.")), default=0))
                 for path, layer in layers]
        found = [*spans, *((name, v, epochs[name]) for name, v in trained.items())]
        self.objects = [(name, x, int(span)) for name, x, span in found if 0 < span < ALWAYS]
        for _, x, span in found:
            if span:
                switch(x, span < ALWAYS)

    def flags(self, epoch: int) -> dict[int, bool]:
        """Map the id of each of ``objects`` to whether it is trained in the epoch that begins."""
        return {id(x): epoch >= span for _, x, span in self.objects}

    def set_epoch(self, epoch: int) -> None:
        """Freeze and unfreeze for the epoch that begins."""
        for _, x, span in self.objects:
            switch(x, epoch >= span)


def switch(x: Any, trained: bool) -> None:
    """Set `trainable` of a variable, or of a layer without what is in it."""
    if isinstance(x, keras.layers.Layer):
        x._trainable = trained
    else:
        x.trainable = trained


def _layers(model: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the layers of ``model`` by name, an outer one before those in it; a shared layer by each of its names."""
    for layer in model._flatten_layers(include_self=False, recursive=False):
        name = f"{path}.{layer.name}".lstrip(".")
        yield name, layer
        yield from _layers(layer, name)


def _named(model: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield layer and variable by the variable's name."""
    for path, layer in (("", model), *_layers(model)):
        for v in (*layer._trainable_variables, *layer._non_trainable_variables):
            yield f"{path}.{v.name}".lstrip("."), (layer, v)
