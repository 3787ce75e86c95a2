"""Keras variables from one device to another, with what an optimizer holds of them.

A `keras.Variable` stays the same object; the `tf.Variable` inside it, which lives on one device for good, is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf


def move(variable: keras.Variable, device: str) -> None:
    """Make the inside of a Keras variable anew on ``device``, with its value; nothing if it is there."""
    old = variable._value
    if _short(old.device) == _short(device):
        return
    with tf.init_scope(), tf.device(device):
        variable._value = tf.Variable(old.read_value(), dtype=old.dtype, trainable=old.trainable,
                                      name=variable.name, aggregation=old.aggregation,
                                      synchronization=old.synchronization)


@contextmanager
def lent(variables: Sequence[keras.Variable], device: str) -> Iterator[None]:
    """Copies of ``variables`` on ``device``; afterwards they are where and what they were."""
    own = [v._value for v in variables]
    try:
        for variable in variables:
            move(variable, device)
        yield
    finally:
        for variable, value in zip(variables, own):
            variable._value = value


def move_slots(optimizer: Any, variables: Sequence[keras.Variable], old_keys: dict[Any, keras.Variable]) -> None:
    """Put what an optimizer, built for ``variables``, holds of each beside it, and let it find them under new keys.

    Keras' optimizers hold one list for each kind of slot, in the variables' order. ``old_keys``: the keys by which the
    optimizer knew the variables before they were moved.
    """
    own = {id(v) for v in optimizer.variables} - {id(optimizer.iterations)}
    for name, held in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(held, (list, tuple)):
            continue
        if len(held) == len(variables):
            for slot, variable in zip(held, variables):
                if id(slot) in own:
                    move(slot, variable._value.device)
    for i, variable in enumerate(variables):
        optimizer._trainable_variables_indices[optimizer._var_key(variable)] = i
    keep_excluded(optimizer, old_keys)


def keep_excluded(optimizer: Any, old_keys: dict[Any, keras.Variable]) -> None:
    """Let an optimizer leave out of its weight decay what it left out under ``old_keys``."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded:
        now = {key: optimizer._var_key(variable) for key, variable in old_keys.items()}
        optimizer._exclude_from_weight_decay = type(excluded)(now.get(key, key) for key in excluded)
        optimizer._exclude_from_weight_decay_cache = {}


def _short(device: str) -> str:
    """CPU:1 of /CPU:1 and of /job:localhost/replica:0/task:0/device:CPU:1."""
    return device.rpartition("/")[2].removeprefix("device:")
