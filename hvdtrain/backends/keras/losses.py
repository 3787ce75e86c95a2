"""Losses of Keras: by name and unreduced, with checks of shapes, and evaluated without randomness.

Owns the known names and the messages about targets and outputs that do not fit, on any backend of Keras.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state

from hvdtrain.backends.misfit import out_of_memory
from hvdtrain.config import Config, Named
from hvdtrain.core.errors import UserError, nearest


def by_name(named: Named) -> Callable[[Any, Any], Any]:
    """Return ``loss(y, outputs)``, one value per element, of a class or function of keras.losses.

    The name in any case, with or without underscores. One of shares of classes takes class numbers too. Errors:
    `UserError` for an unknown name, for one that does not say which cross entropy, and for arguments it does not take.
    """
    name = key(named.name)
    if name in ("crossentropy", "ce"):
        raise UserError(f"loss {named.name!r} does not say which cross entropy", "its full name",
                        "name binary_crossentropy, categorical_crossentropy or sparse_categorical_crossentropy")
    classes = {n.lower(): c for n, c in vars(keras.losses).items()
               if isinstance(c, type) and issubclass(c, keras.losses.Loss) and c is not keras.losses.Loss}
    functions = {key(n): f for n, f in vars(keras.losses).items()
                 if inspect.isfunction(f) and n not in ("get", "serialize", "deserialize")}
    if name not in {**classes, **functions}:
        with contextlib.suppress(ValueError):  # Keras' short names, such as mse
            functions[name] = keras.losses.get(named.name.lower())
    if name not in {**classes, **functions}:
        raise UserError(f"loss {named.name!r} is not in keras.losses",
                        nearest(named.name, [c.__name__ for c in classes.values()]), "correct loss.name")
    args = without_reduction(named)
    try:
        if name in classes:
            found = guarded(classes[name](**args, reduction=None), named.name)
        else:
            inspect.signature(functions[name]).bind(None, None, **args)
            found = guarded(partial(functions[name], **args), named.name)
    except (TypeError, ValueError) as error:
        raise UserError(f"loss {named.name} refused its args {named.args}: {error}", "keyword arguments it accepts",
                        "correct loss.args") from None
    return (lambda y, outputs: found(as_shares(y, outputs), outputs)) if of_shares(name) else found


def without_reduction(named: Named) -> dict[str, Any]:
    """Return the arguments without ``reduction``; `UserError` for one that is no mean over samples."""
    reduction = named.args.get("reduction")
    if reduction not in (None, "mean", "sum_over_batch_size"):
        raise UserError(f"loss {named.name} with reduction {reduction!r}", "reduction mean or sum_over_batch_size",
                        "leave reduction out; for the steps of a sum, multiply lr by global_batch")
    return {name: value for name, value in named.args.items() if name != "reduction"}


OF_CLASSES = ("ctc", "circle", "categoricalgeneralizedcrossentropy")
"""Losses of keras.losses, beside the sparse ones, whose targets are class numbers and of another shape."""
_ERRORS = (IndexError, ValueError, RuntimeError, TypeError)
_BACKENDS = {"tensorflow": "TensorFlow", "torch": "PyTorch"}


def guarded(loss: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return Keras' loss ``name(y, outputs)``, which raises `UserError` if it refuses its inputs or broadcasts one over
    the other.

    A user's own loss function is not guarded: its errors keep their traceback.
    """
    def checked(y: Any, outputs: Any) -> Any:
        got = f"the model's output is {kind(outputs)} and the targets are {kind(y)}"
        of_classes = sparse(name) or key(name) in OF_CLASSES or name == "auto" and is_integer(y)
        if not (of_classes or _fit(y, outputs)):
            raise UserError(f"loss {name}: {got}", "equal shapes, of which a last dimension of 1 may be omitted",
                            "reshape the targets, or the output in the model")
        try:
            return loss(y, outputs)
        except Exception as error:
            if not isinstance(error, _ERRORS) and type(error).__name__ != "InvalidArgumentError":
                raise
            if out_of_memory(error) or "CUDA error" in str(error):  # of the machine, not of the data
                raise
            span, classes = _span(y), outputs.shape[-1] if (_rank(outputs) or 0) > 1 else None
            if of_classes and span and classes and not 0 <= span[0] <= span[1] < classes:
                raise out_of_range(name, got, *span, classes) from error
            said = (re.sub(r"{{.*?}} ?", "", str(error)).strip().splitlines() or [type(error).__name__])[0]
            by = _BACKENDS.get(keras.backend.backend(), "Keras")
            numbers = f" from {span[0]} to {span[1]}" if span else ""
            raise UserError(f"loss {name} refused its inputs: {got}{numbers} ({by}: {said})",
                            "shapes and types that the loss takes",
                            "correct loss, the targets, or the model's output") from error
    return checked


def out_of_range(name: str, got: str, low: int, high: int, classes: int) -> UserError:
    """Return the error that class numbers run from ``low`` to ``high`` for a model with ``classes`` outputs."""
    return UserError(f"loss {name}: {got}; targets run from {low} to {high}",
                     f"0..{classes - 1} for a model with {classes} outputs",
                     "number the classes from 0, or give the model more outputs")


def _span(y: Any) -> tuple[int, int] | None:
    """Return the least and the greatest class number; None for other targets, and in a graph."""
    if not is_integer(y):
        return None
    with contextlib.suppress(Exception):
        numbers = np.asarray(keras.ops.convert_to_numpy(y))
        return int(numbers.min()), int(numbers.max())
    return None


def key(name: str) -> str:
    """Return ``name`` without case and underscores."""
    return name.lower().replace("_", "")


def sparse(name: str) -> bool:
    """Return whether a loss of this name takes class numbers."""
    return key(name).startswith("sparsecategorical")


def of_shares(name: str) -> bool:
    """Return whether a loss of this name takes shares of classes, into which class numbers are converted."""
    return key(name).startswith("categorical") and key(name) not in OF_CLASSES


def as_shares(y: Any, outputs: Any) -> Any:
    """Convert class numbers (B, ...) or (B, ..., 1) for outputs (B, ..., C) to one-hot; return other targets as they
    are.

    A number outside 0..C-1 gives NaN, since a row of zeros would hide it.
    """
    ops, rank = keras.ops, _rank(outputs) or 0
    if not is_integer(y) or rank < 2 or _rank(y) is None:
        return y
    if len(y.shape) == rank and y.shape[-1] == 1 != outputs.shape[-1]:
        y = ops.squeeze(y, axis=-1)
    if len(y.shape) != rank - 1:
        return y
    classes = outputs.shape[-1]
    inside = ops.logical_and(y >= 0, y < classes)
    hot = ops.one_hot(ops.where(inside, y, ops.zeros_like(y)), classes, dtype=outputs.dtype)
    return ops.where(ops.expand_dims(inside, -1), hot, ops.full_like(hot, float("nan")))


def refuse_mask(outputs: Any) -> None:
    """Raise `UserError` for an output with a mask of Keras, whose mean is over what the mask leaves."""
    if getattr(outputs, "_keras_mask", None) is not None:
        raise UserError("the model's output carries a mask (mask_zero, Masking), so that the elements "
                        "of its mean are known only after the forward pass", "an output without a mask",
                        "give sample weights (B, T) of 0 and 1 and mean_with_sample_weight, or a task "
                        "and a weight(batch) in the model file")


def has_fixed_batch(model: Any) -> bool:
    """Return whether ``model`` was built for one number of samples."""
    return any(x.shape[0] is not None for x in keras.tree.flatten(getattr(model, "inputs", None) or ()))


def weight_of_batch(loss: Any, outputs: Any, alike: bool) -> Any:
    """Return the weight of a ``loss`` that is one number for the whole batch: its samples, in the type of the loss.

    `hvdtrain.backends.loss_coupling` decides whether the batch may be divided. Errors: `UserError` where samples do not
    count ``alike`` or `loss_coupling` cannot judge.
    """
    if not alike:
        raise UserError("the loss returns one number for the whole batch, and samples or labels have "
                        "weights, or the model has a fixed batch size", "one value per sample", "remove the "
                        "loss's own reduction (Keras' Dice and Tversky: axis=(1, 2, 3)), or give the model file a "
                        "task(model, batch)")
    return keras.ops.cast(keras.ops.shape(keras.tree.flatten(outputs)[0])[0], loss.dtype)


def counted(labels: Any, ignored: int) -> Any:
    """Return 1 for labels that count and 0 for ``ignored`` ones, float32."""
    return keras.ops.cast(keras.ops.not_equal(labels, keras.ops.cast(ignored, labels.dtype)), "float32")


def is_integer(tensor: Any) -> bool:
    """Return whether a tensor holds whole numbers."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return dtype.startswith(("int", "uint"))


def kind(tensor: Any) -> str:
    """Return dtype[shape], the number of samples as B: a graph may leave it open."""
    rank = _rank(tensor)
    extents = ["..."] if rank is None else ["B", *tuple(tensor.shape)[1:]] if rank else []
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return f"{dtype}[{', '.join('?' if n is None else str(n) for n in extents)}]"


def _rank(tensor: Any) -> int | None:
    """Return the number of dimensions, None where a graph leaves even that open."""
    try:
        return len(tensor.shape)
    except ValueError:
        return None


def _fit(y: Any, outputs: Any) -> bool:
    """Return whether a loss of elements may take these shapes: Keras adds or drops a last 1, and broadcasts others."""
    if _rank(y) is None or _rank(outputs) is None:
        return True
    longer, shorter = sorted((list(y.shape), list(outputs.shape)), key=len, reverse=True)
    if len(longer) == len(shorter) + 1 and longer[-1] in (1, None):
        longer = longer[:-1]
    return len(longer) == len(shorter) and all(a == b or None in (a, b) for a, b in zip(longer, shorter))


def check_stateful(model: Any, config: Config, backend: str) -> None:
    """Raise `UserError` for a stateful RNN (``stateful=True``) whose state would meet other samples than it came from.

    A state belongs to the rows of a batch: one micro-batch of the same rows in every step is fine.
    """
    layer = next((one for one in model._flatten_layers() if getattr(one, "stateful", False) is True), None)
    if layer is None:
        return
    if backend == "torch":
        raise UserError(f"the stateful layer {layer.name!r} with Keras on PyTorch, where Keras has no gradient for the "
                        "layer",
                        "a layer without stateful=True", "build it without, or set KERAS_BACKEND=tensorflow")
    shares = config.shares.values() if isinstance(config.shares, Mapping) else config.shares
    found = [name for name, is_so in {
        "unequal shares": len(set(shares)) > 1, "accumulate, micro_batch or balance": config.in_parts,
        "a pipeline": config.pipeline.stages > 1 or bool(config.pipeline.depths),
        "model_parallel": config.model_parallel > 1, "resume, since no checkpoint holds its state": bool(config.resume),
    }.items() if is_so]
    if found:
        raise UserError(f"the stateful layer {layer.name!r} with {found[0]}", "a state that sees "
                        "the same rows in every step", "leave that key at its default, or build without stateful=True")


_L = keras.layers
_NEUTRAL = (_L.BatchNormalization, _L.Dropout, _L.SpatialDropout1D, _L.SpatialDropout2D, _L.SpatialDropout3D,
            _L.AlphaDropout, _L.GaussianDropout, _L.GaussianNoise, _L.RNN, _L.MultiHeadAttention,
            _L.GroupQueryAttention)
"""Layers that differ in training by drawing random numbers, or by taking statistics over a batch."""


@contextlib.contextmanager
def neutral_layers(model: Any, keep: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Have Keras' layers that draw or normalize compute as in evaluation, and layers of mixed policies in float32.

    So two evaluations of a loss differ by their samples only. ``keep(model, inputs, outputs)`` is called after each
    call of the model.
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


_NAME = "global_seed_generator"


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    """Restore Keras' own generator, which serves ``keras.random`` calls without a seed; one made within is dropped."""
    own = global_state.get_global_attribute(_NAME)
    before = None if own is None else np.array(keras.ops.convert_to_numpy(own.state))
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAME, own)
        if own is not None:
            own.state.assign(before)
