"""Variables of a partitioned Keras model without memory: not made yet, or released because another rank keeps them.

Owns these variables, and the model of a rank's own layers. The whole model stays as an object that knows its input and
compiled loss.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.placement import HOST
from hvdtrain.core.errors import UserError

LEAST_BYTES = 1 << 16
"""Smaller variables are made at once."""

_building = threading.local()
_made_at_once = keras.Variable._initialize_with_initializer


class Deferred(keras.Variable):  # type: ignore[misc]
    """A variable without values yet. ``begins``: its initializer.

    A Keras initializer with a number for a seed gives the same values each time, so the rank that keeps a block makes
    the values that one process would have. Until then a read makes its initial values for that moment, and an
    assignment makes it an ordinary variable.
    """

    begins: Any

    @property
    def value(self) -> Any:
        """The initial values, made for this read."""
        if getattr(_building, "reads", None) is not None:
            _building.reads.append(self.path)
        return self._maybe_autocast(self.begins(self._shape, dtype=self._dtype))

    def _direct_assign(self, value: Any) -> None:
        _as(self, keras.Variable)
        with tf.init_scope(), tf.device(HOST):
            self._initialize(tf.cast(value, self._dtype))


@contextmanager
def deferring() -> Iterator[None]:
    """Build models within in host memory, without the weights that can be made later."""
    before, _building.on = getattr(_building, "on", False), True
    keras.Variable._initialize_with_initializer = _initialize
    try:
        with tf.device(HOST):
            yield
    finally:
        _building.on = before


@contextmanager
def reads() -> Iterator[list[str]]:
    """Yield a list of the paths of deferred variables that are read within."""
    _building.reads = found = list[str]()
    try:
        yield found
    finally:
        _building.reads = None


@contextmanager
def present(variables: Iterable[Any]) -> Iterator[None]:
    """Have ``variables`` in host memory within, and restore them afterwards."""
    made = [v for v in variables if isinstance(v, Deferred)]
    begins = [v.begins for v in made]
    make(made)
    try:
        yield
    finally:
        for variable, initializer in zip(made, begins):
            _defer(variable, initializer)


def make(variables: Iterable[Any]) -> None:
    """Make those that hold nothing yet, in host memory."""
    for variable in variables:
        if isinstance(variable, Deferred):
            initializer = variable.begins
            _as(variable, keras.Variable)
            with tf.init_scope(), tf.device(HOST):
                _made_at_once(variable, initializer)


def forget(variable: Any) -> None:
    """Make a variable an ordinary one, without values so far."""
    if isinstance(variable, Deferred):
        _as(variable, keras.Variable)


def _initialize(self: Any, initializer: Any) -> None:
    nbytes = math.prod(self._shape) * tf.as_dtype(self._dtype).size
    if not getattr(_building, "on", False) or nbytes < LEAST_BYTES or not _repeats(initializer):
        _made_at_once(self, initializer)
        return
    _defer(self, initializer)


def _defer(variable: Any, initializer: Any) -> None:
    variable._value = None
    object.__setattr__(variable, "begins", initializer)
    _as(variable, Deferred)


def _as(variable: Any, kind: type) -> None:
    object.__setattr__(variable, "__class__", kind)


def _repeats(initializer: Any) -> bool:
    """Return whether an initializer gives the same values each time: Keras' own, without a seed or with a number."""
    if not isinstance(initializer, keras.initializers.Initializer) or not type(initializer).__module__.startswith(
            "keras."):
        return False
    return not hasattr(initializer, "seed") or isinstance(initializer.seed, int)


def building(devices: int, over_ranks: bool = False) -> Any:
    """Return the scope in which a model for so many devices is built: host memory, since no one device may hold all of
    it.

    ``over_ranks``: its weights are made by the ranks that keep them.
    """
    if over_ranks:
        return deferring()
    return tf.device(HOST) if devices > 1 else nullcontext()


class Part(keras.Model):
    """A rank's ``layers`` of ``whole``; it has its optimizer's settings, and is not to be called."""

    def __init__(self, whole: keras.Model, layers: Sequence[Any]) -> None:
        super().__init__(name=whole.name)
        object.__setattr__(whole, "call", _refuse_call)
        self.held = list(layers)
        object.__setattr__(self, "whole", whole)  # plainly set, Keras would hold it for a layer of this one
        self.dtype_policy = whole.dtype_policy
        self.built = True

    def call(self, x: Any) -> Any:
        """Raise `UserError`: the other ranks have the rest."""
        _refuse_call(x)


def _refuse_call(*given: Any, **named: Any) -> None:
    raise UserError("a call of a model of which this rank of a pipeline has only some blocks", "the whole model",
                    "build the model again and load the weights of the run's folder, or use Trainer.evaluate")


def release(variables: Iterable[keras.Variable]) -> None:
    """Free the memory of ``variables``, which stay with their names, shapes and types."""
    for variable in variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        forget(variable)
        with tf.init_scope(), tf.device(HOST):
            variable._value = tf.Variable(tf.zeros([0], dtype), shape=tf.TensorShape(None), dtype=dtype,
                                          trainable=variable.trainable, name=variable.name)


def refuse_released(model: keras.Model) -> None:
    """Raise `UserError` for a model that an earlier run has partitioned over ranks: `release` has taken variables."""
    if any(v._value is not None and v._value.shape.rank is None for v in model.weights):
        raise UserError("a model of which an earlier pipeline run left only some blocks on this rank",
                        "the whole model", "build the model again and load the weights of that run's folder")
