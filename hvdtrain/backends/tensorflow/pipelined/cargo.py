"""What a chunk of a Keras model gives the next one: a tree of tensors with masks, and losses of layers, as host arrays.

Owns the text that tells how the tree is put together. In a graph all of it is a flat list of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import host
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Cargo

ONE = json.dumps([0, [], 0])
"""The form of one tensor, which travels as ""."""


class Crossing(NamedTuple):
    """What is at a cut. ``value``: the tree, with Keras' masks on its tensors. ``losses``: scalars that the layers
    before the cut add to the loss."""

    value: Any
    losses: list[tf.Tensor]


def flat(crossing: Crossing) -> tuple[list[tf.Tensor], str]:
    """Return the tensors at a cut, and the form by which `crossing_of` puts them together.

    Errors: `UserError` for a tree that holds something else than tensors in dicts, lists and tuples.
    """
    tensors: list[tf.Tensor] = []
    tree = _encoded(crossing.value, tensors)
    masked = [i for i, x in enumerate(tensors) if getattr(x, "_keras_mask", None) is not None]
    masks = [tensors[i]._keras_mask for i in masked]
    losses = [tf.stack([tf.cast(x, tf.float32) for x in crossing.losses])] if crossing.losses else []
    form = json.dumps([tree, masked, len(crossing.losses)])
    return [*tensors, *masks, *losses], "" if form == ONE else form


def crossing_of(tensors: Sequence[tf.Tensor], form: str) -> Crossing:
    """Undo `flat`."""
    tree, masked, n_losses = json.loads(form or ONE)
    left = list(tensors)
    losses = tf.unstack(left.pop(), n_losses) if n_losses else []
    for i, mask in zip(reversed(masked), reversed(left)):
        left[i]._keras_mask = mask
    return Crossing(_decoded(tree, left), losses)


def has_gradient(x: tf.Tensor) -> bool:
    """Return whether a gradient of a tensor goes back over a cut."""
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def absent_form(absent: Sequence[int]) -> str:
    """Return the form of gradients of which those with the numbers ``absent`` are zeros in place of none.

    The blocks before the cut need the difference: weight decay would move variables that one process leaves alone.
    """
    return json.dumps(list(absent)) if absent else ""


def absent_of(cargo: Cargo) -> list[int]:
    """Undo `absent_form`."""
    return json.loads(cargo.form) if cargo.form else []


def to_cargo(tensors: Sequence[tf.Tensor], form: str = "") -> Cargo:
    """Return tensors in host memory, without a copy where they are there."""
    return Cargo(tuple(map(_array, tensors)), tuple(x.dtype.name for x in tensors), form)


def tensors_of(cargo: Cargo) -> list[tf.Tensor]:
    """Undo `to_cargo`."""
    return [tf.bitcast(host.view(array), tf.bfloat16) if name == "bfloat16" else host.view(array)
            for array, name in zip(cargo.arrays, cargo.dtypes)]


def _array(x: tf.Tensor) -> np.ndarray:
    if x.dtype == tf.bfloat16:
        x = tf.bitcast(x, tf.uint16)
    return np.asarray(memoryview(x))


def _encoded(value: Any, tensors: list[tf.Tensor]) -> Any:
    """``value`` in terms of JSON, its tensors by number; they are appended to ``tensors``."""
    if tf.is_tensor(value) and value.dtype != tf.string:
        tensors.append(value)
        return len(tensors) - 1
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_encoded(x, tensors) for x in value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _encoded(value[key], tensors) for key in sorted(value)}
    raise UserError(f"a block hands on a {type(value).__name__} where the model is cut", "tensors of numbers, alone or "
                    "in lists, tuples and dicts", "cut the model elsewhere, or have the block return tensors")


def _decoded(tree: Any, tensors: Sequence[tf.Tensor]) -> Any:
    if isinstance(tree, int):
        return tensors[tree]
    if isinstance(tree, dict):
        return {key: _decoded(part, tensors) for key, part in tree.items()}
    found = [_decoded(part, tensors) for part in tree[1:]]
    return tuple(found) if tree[0] == "tuple" else found
