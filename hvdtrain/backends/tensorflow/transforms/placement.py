"""Calls of a model that is partitioned over devices: each block computes on its own device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.split import Split
from hvdtrain.backends.tensorflow.transforms.sync_batchnorm import norms

_MARK = "_hvdtrain_split"
"""Attribute of a wrapped ``call``: the layer's own one, if its user had set it on the instance."""


class Placement:
    """Implements `hvdtrain.core.protocols.Transform` for ``split``'s blocks, whose variables keep their devices."""

    collective = False

    def __init__(self, split: Split) -> None:
        self._split = split

    def install(self, model: keras.Model, blocks: Sequence[Any] = ()) -> None:
        """Wrap the ``call`` of each block, also for evaluation and callbacks."""
        plan, layers = self._split.plan, self._split.chain.layers
        for stage, device in zip(plan.stages, plan.devices):
            for i in stage:
                if not hasattr(layers[i].call, _MARK):
                    wrapped = _on_device(layers[i].call, device, i == stage.start)
                    setattr(wrapped, _MARK, vars(layers[i]).get("call"))
                    object.__setattr__(layers[i], "call", wrapped)

    def remove(self, model: keras.Model) -> None:
        for layer in self._split.chain.layers:
            if hasattr(layer.call, _MARK):
                users = getattr(layer.call, _MARK)
                object.__delattr__(layer, "call") if users is None else object.__setattr__(layer, "call", users)

    def describe(self) -> dict[str, str]:
        return self._split.describe()

    def caveats(self) -> list[str]:
        model, found = self._split.chain.model, []
        if norms(model):
            found.append("BatchNorm computes its statistics over each part of a micro-batch (split_micro_batches)")
        if state.seed_states(model):
            found.append("dropout draws differ with split_micro_batches")
        return found


def _on_device(call: Callable[..., Any], device: str, first: bool) -> Callable[..., Any]:
    """Return a layer's ``call`` under ``device``; ``first`` of its stage: its input is copied there."""
    @functools.wraps(call)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        with tf.device(device):
            if first:
                args = tf.nest.map_structure(lambda x: _moved(x) if tf.is_tensor(x) else x, args)
            return call(*args, **kwargs)

    return on_device


def _moved(x: tf.Tensor) -> tf.Tensor:
    moved = tf.identity(x)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        moved._keras_mask = mask
    return moved
