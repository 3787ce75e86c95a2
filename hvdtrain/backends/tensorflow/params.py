"""The trainable variables of a Keras model: singly, as flat buckets, and under an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import host, state
from hvdtrain.backends.tensorflow.ops import HostVector, Ops
from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.optimizer import Optimizer
from hvdtrain.backends.tensorflow.sliced import Sliced
from hvdtrain.backends.tensorflow.split import Split
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.parallel.precision import LossScale
from hvdtrain.planning.shards import in_bucket

VIEWED = ("float32", "float64")
"""Types that are looked at in host memory: Python's buffers lack bfloat16."""


class Params:
    """Implements `hvdtrain.core.protocols.Params` in the model's own order.

    ``blocks``: the layers that the model file names as the model's blocks. ``opt``: the run's optimizer.
    """

    def __init__(self, model: keras.Model, opt: Optimization, scale: LossScale, blocks: Sequence[Any] = (),
                 split: Split | None = None) -> None:
        self._model, self._opt, self._scale, self._split = model, opt, scale, split
        self.variables = list(model.trainable_variables)
        owner: dict[int, int] = {}
        for number, layer in enumerate(blocks):
            for variable in layer.variables:
                owner.setdefault(id(variable), number)
        self.specs = [ParamSpec(name, tuple(v.shape), keras.backend.standardize_dtype(v.dtype),
                                split.place(v) if split else 0, owner.get(id(v), 0))
                      for name, v in state.named(self.variables).items()]

    def made_of(self) -> list[str]:
        """Return a line for each variable of the model, then the optimizer with its schedule and variables.

        Without Keras' own counters in names (``dense_7``), which count within a process.
        """
        def line(kind: str, v: Any) -> str:
            dtype = keras.backend.standardize_dtype(v.dtype)
            return f"{kind} {state.without_counters(v.path)} {dtype}{list(v.shape)}"

        return [*(line("variable" if v.trainable else "frozen variable", v) for v in self._model.weights),
                f"optimizer {self._opt.made_of()}",
                *(line("variable of the optimizer", v) for v in self._opt.optimizer.variables)]

    def frozen(self) -> frozenset[int]:
        """Return nothing: variables that are trainable when a run begins stay so."""
        return frozenset()

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> tf.Tensor:
        """Return a copy of the variables of ``bucket`` as one vector (n,).

        Of elements [begin, end), if those are asked for, a view in host memory if they lie in one variable there.
        Whoever holds it makes a later `write` copy the variable.
        """
        pieces = []
        inside = in_bucket(bucket, begin, bucket.n if end is None else end)
        if end is not None and len(inside) == 1 and bucket.dtype in VIEWED:
            i, (a, b) = inside[0]
            return state.view(self.variables[i]).reshape(-1)[a:b].view(HostVector)
        for i, (a, b) in inside:
            flat_N = tf.reshape(self.variables[i].value.read_value(), [-1])
            pieces.append(flat_N if b - a == self.specs[i].n else tf.slice(flat_N, [a], [b - a]))
        return tf.identity(Ops().pack(pieces)) if pieces else tf.zeros([0], bucket.dtype)

    def write(self, bucket: Bucket, flat_N: tf.Tensor, known: tuple[int, int] = (0, 0)) -> None:
        """Undo `flat`, except for variables that lie within ``known``: to write a whole one is faster than a shard of
        it.

        Values in host memory are copied into the variables, else they would keep that memory.
        """
        for i, begin, shape in zip(bucket.params, bucket.offsets, bucket.shapes):
            end = begin + self.specs[i].n
            if known[0] <= begin and end <= known[1]:
                continue
            if isinstance(flat_N, np.ndarray):
                _overwrite(self.variables[i].value, flat_N[begin:end].reshape(shape))
            else:
                self.variables[i].assign(tf.reshape(flat_N[begin:end], shape))

    def optimizer(self, vectors: Sequence[tf.Variable]) -> Optimizer:
        """Return an optimizer of the run's kind over ``vectors``, variables (n,), with state of its own.

        It uses the run's own rate, also if that is a variable that a callback changes.
        """
        made = copy.copy(self._opt)
        own = self._opt.optimizer
        made.optimizer = type(own).from_config(own.get_config())
        if not callable(own._learning_rate):
            object.__setattr__(made.optimizer, "_learning_rate", own._learning_rate)
        variables = [_as_keras(vector) for vector in vectors]
        made.optimizer.build(variables)
        return Optimizer(made, variables, self._scale)

    def sliced(self, spans: Sequence[tuple[int, int]]) -> Sliced:
        if self._split:
            raise UserError("data_parallel zero with model_parallel and Keras on TensorFlow", "one of the two",
                            "set model_parallel: 1, or data_parallel: replicate")
        return Sliced(self._opt, self.variables, self._scale, spans)


def _overwrite(variable: tf.Variable, values: np.ndarray) -> None:
    """Copy ``values`` into the memory of a variable; memory that somebody else reads, such as a save, is left to them.
    """
    if not values.ndim:
        variable.assign(tf.convert_to_tensor(values))
        return
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=[0] * values.ndim, end=list(values.shape), strides=[1] * values.ndim,
        value=host.view(values))


def _as_keras(vector: tf.Variable) -> keras.Variable:
    """Return a Keras variable around ``vector`` itself."""
    made = keras.Variable(tf.zeros([0], vector.dtype), dtype=keras.backend.standardize_dtype(vector.dtype))
    made._value, made._shape = vector, tuple(vector.shape)
    return made
