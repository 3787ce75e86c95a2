"""Judge the loss of a Keras model on a few samples, for `hvdtrain.loss_coupling`, and refuse it over
`hvdtrain.keras.shard`.

Owns what must not differ between two evaluations beside the samples, on any backend of Keras: layers that draw random
numbers or take statistics of a batch compute as in evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain import loss_coupling
from hvdtrain.keras.data import Shard

_L = keras.layers
_NEUTRAL = (_L.BatchNormalization, _L.Dropout, _L.SpatialDropout1D, _L.SpatialDropout2D, _L.SpatialDropout3D,
            _L.AlphaDropout, _L.GaussianDropout, _L.GaussianNoise, _L.RNN, _L.MultiHeadAttention,
            _L.GroupQueryAttention)
"""Layers that differ in training by drawing random numbers, or by taking statistics over a batch."""

_accepted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By model, the compiled loss that is a mean over samples."""


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


def check_shard(model: Any, shard: Shard, ranks: int) -> None:
    """Refuse a loss of ``model`` that is no mean over samples, for a fit over ``shard``; collective over ``ranks``.

    Errors: `UserError`, the same on every rank. On one rank a warning names the loss.
    """
    from hvdtrain.tensorflow import objects

    loss = getattr(model, "_compile_loss", None)
    if loss is not None and _accepted.get(model) is loss:
        return
    finding = _judge(model, shard)
    if ranks > 1:
        finding = loss_coupling.first_of(objects.gathered(finding))
    if finding is None or finding.outputs or finding.unjudged:
        if finding is not None and finding.unjudged and shard.size > 1 and shard.rank == 0:
            warnings.warn(finding.got, stacklevel=4)
        if loss is not None:
            _accepted[model] = loss
        return
    if shard.size > 1:
        raise loss_coupling.refusal(finding, "the ranks of hvdtrain.keras.shard")
    warnings.warn(loss_coupling.note_of(finding), stacklevel=4)


def _judge(model: Any, shard: Shard) -> loss_coupling.Finding | None:
    """Judge the loss on samples of ``shard``."""
    from hvdtrain.backends.tensorflow.loss_coupling import evaluator_of

    pool = shard.spread(loss_coupling.CANDIDATES)
    rows = loss_coupling.choose_rows(keras.tree.flatten(pool), max(shard.count(0), 1))
    x, y, weight = (keras.tree.map_structure(lambda a: a[rows], part) for part in pool)
    try:
        if not model.built:
            model(keras.tree.map_structure(lambda a: a[:1], x), training=False)
    except Exception:  # noqa: BLE001  (fit reports what fails)
        return None

    def of_samples(numbers: Sequence[int], training: bool) -> tuple[Any, Any]:
        some = [keras.tree.map_structure(lambda a: keras.ops.convert_to_tensor(a[np.asarray(numbers)]), part)
                for part in (x, y, weight)]
        outputs = model(some[0], training=training)
        more = {"training": training} if "training" in inspect.signature(model.compute_loss).parameters else {}
        return model.compute_loss(x=some[0], y=some[1], y_pred=outputs, sample_weight=some[2], **more) * len(
            numbers), len(numbers)

    with evaluator_of(model, of_samples) as evaluate:
        return loss_coupling.judge(evaluate, len(rows))
