"""Models that are built without their weights: each variable knows how it begins, and is made when its turn comes.

Owns the variables in between. A Keras initializer with a number for a seed gives the same values whenever it is asked,
so the rank that keeps a block makes just the values that one process would have. Until then whoever reads such a
variable gets its initial values made for that moment, and whoever assigns to it makes it a variable as any other.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.placement import HOST

LEAST_BYTES = 1 << 16
"""Smaller variables are made at once."""

_building = threading.local()
_made_at_once = keras.Variable._initialize_with_initializer


class Deferred(keras.Variable):  # type: ignore[misc]
    """A variable that holds nothing yet. ``begins``: its initializer."""

    begins: Any

    @property
    def value(self) -> Any:
        """The initial values, made for whoever reads them."""
        if getattr(_building, "reads", None) is not None:
            _building.reads.append(self.path)
        return self._maybe_autocast(self.begins(self._shape, dtype=self._dtype))

    def _direct_assign(self, value: Any) -> None:
        _as(self, keras.Variable)
        with tf.init_scope(), tf.device(HOST):
            self._initialize(tf.cast(value, self._dtype))


@contextmanager
def deferring() -> Iterator[None]:
    """Build models within it in host memory, without the weights that can be made later."""
    before, _building.on = getattr(_building, "on", False), True
    keras.Variable._initialize_with_initializer = _initialize
    try:
        with tf.device(HOST):
            yield
    finally:
        _building.on = before


@contextmanager
def reads() -> Iterator[list[str]]:
    """Within it note the paths of those that are read."""
    _building.reads = found = list[str]()
    try:
        yield found
    finally:
        _building.reads = None


@contextmanager
def present(variables: Iterable[Any]) -> Iterator[None]:
    """Have ``variables`` in host memory within it; afterwards they hold what they held."""
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
    """Have a variable be as any other, without values so far."""
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
    """Whether it gives the same values each time: one of Keras' own whose seed, if it has one, is a number."""
    if not isinstance(initializer, keras.initializers.Initializer) or not type(initializer).__module__.startswith(
            "keras."):
        return False
    return not hasattr(initializer, "seed") or isinstance(initializer.seed, int)


def building(devices: int, over_ranks: bool = False) -> Any:
    """The scope in which a model for so many devices is built: host memory, where no one device may hold all of it.

    ``over_ranks``: it is cut over ranks, and its weights are made by the ranks that keep them.
    """
    if over_ranks:
        return deferring()
    return tf.device(HOST) if devices > 1 else nullcontext()
