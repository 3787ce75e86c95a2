"""Have the layers of a Keras model compute as in evaluation, so that two evaluations of its loss can be compared.

Owns what must not differ between two evaluations beside the samples, on any backend of Keras: layers that draw random
numbers or take statistics of a batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

_L = keras.layers
_NEUTRAL = (_L.BatchNormalization, _L.Dropout, _L.SpatialDropout1D, _L.SpatialDropout2D, _L.SpatialDropout3D,
            _L.AlphaDropout, _L.GaussianDropout, _L.GaussianNoise, _L.RNN, _L.MultiHeadAttention,
            _L.GroupQueryAttention)
"""Layers that differ in training by drawing random numbers, or by taking statistics over a batch."""


@contextlib.contextmanager
def neutral_layers(model: Any, keep: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Have Keras' layers that draw or normalize compute as in evaluation, and layers of mixed policies in float32.

    ``keep(model, inputs, outputs)`` is called after each call of the model.
    """
    patched: list[Any] = []
    mixed = [(layer, layer.dtype_policy) for layer in model._flatten_layers()
             if layer.dtype_policy.name in ("mixed_bfloat16", "mixed_float16")]

    def replace(layer: Any, call: Callable[..., Any]) -> None:
        layer.__dict__["call"] = functools.wraps(layer.call)(call)
        patched.append(layer)

    def evaluating(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: plain(*args, **{**kwargs, "training": False})

    def keeping(*args: Any, plain: Callable[..., Any] = model.call, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        keep(model, args, outputs)
        return outputs

    try:
        for layer, _ in mixed:
            layer.dtype_policy = "float32"
        for layer in model._flatten_layers(include_self=False):
            if isinstance(layer, _NEUTRAL) and "training" in inspect.signature(layer.call).parameters:
                replace(layer, evaluating(layer.call))
        replace(model, keeping)
        yield
    finally:
        for layer in patched:
            layer.__dict__.pop("call", None)
        for layer, policy in mixed:
            layer.dtype_policy = policy


def computing_eps(model: Any) -> float:
    """Return the rounding of the coarsest type that a layer computes in, relative to 1."""
    narrow = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
    return max((narrow.get(layer.compute_dtype, 2.0**-23) for layer in model._flatten_layers()), default=2.0**-23)


def added_losses(model: Any) -> float:
    """Return what layers have added to the loss in the model's last call."""
    return sum(float(keras.ops.sum(loss)) for loss in model.losses)
