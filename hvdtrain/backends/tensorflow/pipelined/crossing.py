"""Values between the chunks of a partitioned Keras model, and placeholders of the model for a task on a rank with some
chunks.

Owns the text that encodes a tree of tensors with masks and losses, and the calls of a chunk's blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import ops
from hvdtrain.backends.tensorflow.chain import Chain
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Layout
from hvdtrain.core.protocols import Cargo

ONE = json.dumps([0, [], 0])
"""The form of one tensor, which travels as ""."""


class Crossing(NamedTuple):
    """A value between two chunks: the tree, with Keras' masks on its tensors, and ``losses``, scalars that the layers
    before add to the loss.
    """

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
    """Return whether a gradient of a tensor goes back to the chunk before."""
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def absent_form(absent: Sequence[int]) -> str:
    """Return the form of gradients of which those with the numbers ``absent`` are zeros in place of none.

    The blocks before need the difference: weight decay would move variables that one process leaves alone.
    """
    return json.dumps(list(absent)) if absent else ""


def absent_of(cargo: Cargo) -> list[int]:
    """Undo `absent_form`."""
    return json.loads(cargo.form) if cargo.form else []


def to_cargo(tensors: Sequence[tf.Tensor], form: str = "") -> Cargo:
    """Return tensors in host memory, without a copy if they are there."""
    return Cargo(tuple(map(_array, tensors)), tuple(x.dtype.name for x in tensors), form)


def tensors_of(cargo: Cargo) -> list[tf.Tensor]:
    """Undo `to_cargo`."""
    return [tf.bitcast(ops.view(array), tf.bfloat16) if name == "bfloat16" else ops.view(array)
            for array, name in zip(cargo.arrays, cargo.dtypes)]


def _array(x: tf.Tensor) -> np.ndarray:
    if x.dtype == tf.bfloat16:
        x = tf.bitcast(x, tf.uint16)
    return np.asarray(memoryview(x))


def _encoded(value: Any, tensors: list[tf.Tensor]) -> Any:
    """Return ``value`` in terms of JSON, its tensors by number; they are appended to ``tensors``."""
    if tf.is_tensor(value) and value.dtype != tf.string:
        tensors.append(value)
        return len(tensors) - 1
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_encoded(x, tensors) for x in value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _encoded(value[key], tensors) for key in sorted(value)}
    raise UserError(f"a block returns a {type(value).__name__} at a stage boundary", "tensors of numbers, alone or "
                    "in lists, tuples and dicts", "partition the model elsewhere, or make the block return tensors")


def _decoded(tree: Any, tensors: Sequence[tf.Tensor]) -> Any:
    if isinstance(tree, int):
        return tensors[tree]
    if isinstance(tree, dict):
        return {key: _decoded(part, tensors) for key, part in tree.items()}
    found = [_decoded(part, tensors) for part in tree[1:]]
    return tuple(found) if tree[0] == "tuple" else found


UNDO = "leave pipeline out"
CALLS = 2
"""Calls of the model for a batch of an evaluation: by the task, and by the model file's metrics."""


class _Reached(BaseException):
    """The task has called the model. No Exception, so that no task takes it for an error of the model."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.x = x


class ModelPlaceholder:
    """Stands for ``model`` in a task, which may call it and read plain values (numbers, words) and ``losses``.

    It is equal to its model, so that `hvdtrain.backends.keras.compiled.setup_of` finds the model's set-up.
    """

    def __init__(self, model: keras.Model, place: str = "partitioned over ranks", undo: str = UNDO) -> None:
        self._model, self._place, self._undo = model, place, undo
        self.losses: list[tf.Tensor] = []

    def __hash__(self) -> int:
        return hash(self._model)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._model

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if value is None or isinstance(value, (bool, int, float, str, tuple, dict)):
            return value
        raise UserError(f"the task uses model.{name} of a model that is {self._place}", "a task that calls model(x) "
                        "and reads plain values", f"compute it inside a block, or {self._undo}")


class First(ModelPlaceholder):
    """Placeholder on the rank of the first chunk: `input_of` gets the model's input from it."""

    def __call__(self, x: Any, training: bool | None = None) -> Any:
        raise _Reached(x)


class Last(ModelPlaceholder):
    """Placeholder on the rank of the last chunk: called, it returns the model's output. ``run``: the last chunk."""

    def __init__(self, model: keras.Model, run: Callable[[Any, Crossing, bool], Crossing]) -> None:
        super().__init__(model)
        self._run = run
        self._came = Crossing(None, [])
        self.called, self._most = 0, 1
        self._x: list[Any] = []

    def take(self, came: Crossing, calls: int = 1) -> None:
        """Take the last chunk's input, before a task runs. ``calls``: how often the task may call the model."""
        self._came, self.called, self._most, self._x = came, 0, calls, []

    def __call__(self, x: Any, training: bool | None = None) -> Any:
        """Run the last chunk. Another call must be of the same input, which this rank does not have."""
        leaves = tf.nest.flatten(x)
        same = not self.called or len(leaves) == len(self._x) and all(a is b for a, b in zip(leaves, self._x))
        self.called, self._x = self.called + 1, leaves
        if self.called > self._most or not same:
            raise UserError("the task calls a partitioned model more than once for a batch", "a single call",
                            f"do all of its work in one forward pass, or {UNDO}")
        made = self._run(x, self._came, bool(training))
        self.losses = made.losses
        return made.value


def input_of(task: Callable[[Any, Any, bool], Any], first: First, batch: Sequence[Any], training: bool) -> Any:
    """Return the input with which the task calls the model for a flat ``batch``."""
    try:
        task(first, batch, training)
    except _Reached as reached:
        return reached.x
    raise UserError("the task does not call the model", "a task that calls model(x)", "fix the model file's task")


class Runs:
    """A rank's chunks, as runs of blocks. ``chunks``: their block numbers; ``ending``: the number of the one that ends
    the model, -1 without it.
    """

    def __init__(self, chain: Chain, layout: Layout) -> None:
        self._chain = chain
        self.whole, self.chunks = chain.model, layout.mine
        self.ending = len(self.chunks) - 1 if self.chunks[-1].stop == len(chain.layers) else -1

    def run(self, chunk: int, came: Crossing, training: bool) -> Crossing:
        """Call the blocks of a chunk; the losses of their layers follow those of earlier ones."""
        layers = [self._chain.layers[i] for i in self.chunks[chunk]]
        for layer in layers:
            layer._clear_losses()
        x = self._chain.run(came.value, training, self.chunks[chunk])
        return Crossing(x, [*came.losses, *(loss for layer in layers for loss in layer.losses)])

    def last(self, x: Any, came: Crossing, training: bool) -> Crossing:
        """Call the blocks of the chunk that ends the model; ``x``: its input if it is all of the model."""
        whole = self.chunks[self.ending].start == 0
        return self.run(self.ending, self.entered(x) if whole else came, training)

    def entered(self, x: Any) -> Crossing:
        return Crossing(self._chain.entry(x), [])
