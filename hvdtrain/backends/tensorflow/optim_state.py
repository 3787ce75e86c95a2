"""What a Keras optimizer holds: made anew, handed over to one over slices, and given back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.optim import Optimization, instead


def take_over(opt: Optimization, arrays: Iterable[np.ndarray]) -> None:
    """Give the optimizer over slices its part of the values of all variables of one over whole variables."""
    assert opt.slices is not None
    for place, (variable, array) in enumerate(zip(opt.optimizer.variables, arrays, strict=True)):
        part = opt.slices.get(place)
        state.assign(variable, array if part is None else np.array(array.reshape(-1)[part.begin:part.end]))


def give_back(own: keras.optimizers.Optimizer) -> None:
    """Take the state of a Keras optimizer, so that it is as if it had never been built."""
    for name, held in list(vars(own).items()):
        holds = isinstance(held, (list, tuple)) and any(isinstance(v, keras.Variable) for v in held)
        if holds and name != "_variables":
            object.__setattr__(own, name, [])
    for v in own.variables:
        if v is not own._iterations and v is not own._learning_rate:
            own._untrack_variable(v)
    own._trainable_variables_indices.clear()
    own.built = False
    own._iterations.assign(0)


def alike(own: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return an optimizer of the kind and settings of ``own`` with the same rate, also where callbacks change it."""
    with instead(own, "_learning_rate", tf.zeros([])):  # a schedule or function of a user's need not be told as text
        made = type(own).from_config(own.get_config())
    if callable(own._learning_rate):
        made._untrack_variable(made._learning_rate)
        object.__setattr__(made, "_learning_rate", own._learning_rate)
    else:
        share(made, "_learning_rate", own._learning_rate)
    return made


def share(made: Any, name: str, variable: keras.Variable) -> None:
    """Have an optimizer use ``variable`` in place of its own of that name."""
    own = getattr(made, name)
    place = next(i for i, v in enumerate(made._variables) if v is own)
    made._untrack_variable(own)
    made._variables.insert(place, variable)
    object.__setattr__(made, name, variable)
