"""The guard against ranks that train different models: fingerprints of the weights, compared inside the graph.

Owns when ranks compare and what each sends; `hvdtrain.faults.divergence` owns the verdict. One number per variable
travels (and two more that explain it), every ``every`` updates, so the cost is that of reading the weights once then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from hvdtrain.errors import UserError
from hvdtrain.faults.divergence import Diverged, Rows, judge
from hvdtrain.tensorflow import basics
from hvdtrain.tensorflow.nodes import node_name, through_trace

EARLY = (2, 8)
"""Updates after which ranks compare besides every N-th. Not the first: Horovod's own examples broadcast after it."""


class Guard:
    """Compares the weights of the ranks of ``process_set`` after updates 2, 8 and then every ``every``-th.

    ``distributed``: whether the updates are known to come from exchanged gradients; it decides the likely cause.
    ``every``: 0 never compares. Raises `Diverged` on every rank; inside a graph TensorFlow wraps it in an error of
    its own and `failure` keeps it.
    """

    def __init__(self, process_set: Any, every: int, name: str, distributed: bool = True) -> None:
        if not isinstance(every, int) or every < 0:
            raise UserError(f"check_every={every!r}", "a number of updates, 0 for never", "give for example 100")
        self.failure: Diverged | None = None
        self._process_set, self._every, self._name, self._distributed = process_set, every, name, distributed
        self._before: tf.Variable | None = None
        self._updates: tf.Variable | None = None
        self._names: list[str] = []
        self._eps = 0.0
        self._late = 0
        self._check: Callable[..., Any] | None = None

    def begin_after(self, updates: int) -> None:
        """Count from the update after the next ``updates``: ranks may differ until then (a broadcast will come)."""
        self._late = updates
        if self._updates is not None:
            self._updates.assign(-updates)

    def before_update(self, variables: Sequence[Any]) -> None:
        """Remember where this rank began; reads the weights once, in the first call only."""
        if not self._on or self._before is not None:
            return
        with tf.init_scope():
            plain = [_plain(v) for v in variables]
            self._names = [getattr(v, "path", None) or v.name for v in variables]
            self._eps = max((_eps(v.dtype) for v in plain), default=0.0)
            self._before = tf.Variable(fingerprints(plain)[0], trainable=False)
            self._updates = tf.Variable(-self._late, dtype=tf.int64, trainable=False)

    def after_update(self, variables: Sequence[Any]) -> None:
        """Count an update, and compare where it is time to. Works in a graph and eagerly."""
        if not self._on:
            return
        assert self._updates is not None, "after_update before before_update"
        plain = [_plain(v) for v in variables]
        count = self._updates.assign_add(1, read_value=True)
        if tf.executing_eagerly():
            if _due(int(count), self._every):
                self._compare(plain, count)
        else:
            due = tf.equal(count % self._every, 0) & (count > 0)
            for early in EARLY:
                due |= tf.equal(count, early)
            _whole(tf.cond(due, lambda: self._compare(plain, count), lambda: tf.constant(False)))

    def compare(self, variables: Sequence[Any]) -> None:
        """Count an update and compare if it is time to, from Python between steps."""
        self.before_update(variables)
        if self._check is None:
            self._check = tf.function(self._compare, jit_compile=False, autograph=False)
        assert self._updates is not None or not self._on
        if self._updates is not None and _due(int(self._updates.assign_add(1)), self._every):
            with told_apart(self):
                self._check([_plain(v) for v in variables], self._updates.read_value())

    @property
    def _on(self) -> bool:
        return self._every > 0 and ranks_of(self._process_set) > 1

    def _compare(self, plain: list[tf.Variable], count: tf.Tensor) -> tf.Tensor:
        """Gather the rows and judge them; collective."""
        assert self._before is not None
        prints_V, norms_V = fingerprints(plain)
        row_K = tf.concat([self._before.read_value(), prints_V, norms_V], 0)
        rows_PK = basics.wire(self._process_set).allgather(row_K, node_name(f"{self._name}_weights")).wait()
        if tf.executing_eagerly():
            self._judge(rows_PK.numpy(), count.numpy())
            self._before.assign(prints_V)
            return tf.constant(True)
        alike = tf.numpy_function(self._judge, [rows_PK, count], tf.bool)
        with tf.control_dependencies([alike]):
            self._before.assign(prints_V)
        return tf.ensure_shape(alike, [])

    def _judge(self, rows_PK: np.ndarray, count: np.ndarray) -> np.bool_:
        ranks = getattr(self._process_set, "ranks", None)
        self.failure = judge(Rows.unpack(rows_PK), self._names, int(count), self._eps, self._distributed, ranks)
        if self.failure is not None:
            raise through_trace(self.failure)
        return np.bool_(True)


class told_apart:
    """Raises a guard's own error where TensorFlow reports one from inside a graph."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.failure = None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, tf.errors.OpError) and self._guard.failure is not None:
            raise self._guard.failure from None


def ranks_of(process_set: Any) -> int:
    """Ranks that work together with this one; 1 where this rank is not in the set. `ValueError` before hvd.init()."""
    wire = basics.wire(process_set)
    return 1 if wire is None else int(wire.size)


def fingerprints(plain: Sequence[tf.Variable]) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum of each variable under pseudo-random signs, and its norm: float32 (V,) each."""
    prints, norms = [], []
    for variable in plain:
        x = tf.cast(variable, tf.float32)
        columns = x.shape[-1] if x.shape.rank else 1
        x_RC = tf.reshape(x, [-1, columns])
        signs_R, signs_C = _signs(tf.shape(x_RC)[0], 0), _signs(tf.constant(columns), 1)
        prints.append(tf.reduce_sum(signs_R * tf.reduce_sum(x_RC * signs_C, axis=1)))
        norms.append(tf.sqrt(tf.reduce_sum(tf.square(x_RC))))
    return tf.stack(prints), tf.stack(norms)


def _signs(n: tf.Tensor, salt: int) -> tf.Tensor:
    """n signs, the same on every rank: a bit of a multiplicative hash of the index."""
    i = tf.range(tf.cast(n, tf.int64), dtype=tf.int64)
    mixed = (i * (i + 40503 + 2 * salt) * 2654435761 // 65536 + i * 40503) // 64
    return tf.cast(1 - 2 * (mixed % 2), tf.float32)


def _due(count: int, every: int) -> bool:
    return count > 0 and (count in EARLY or count % every == 0)


def _eps(dtype: tf.DType) -> float:
    """Distance from 1 to the next number of a type."""
    return 2.0 ** -{"float16": 10, "bfloat16": 7}.get(dtype.name, 23)  # fingerprints are float32


def _whole(out: tf.Tensor) -> None:
    """Keep the branches of a cond that gave ``out`` as functions.

    TensorFlow would inline them with a switch for each variable they read, which costs every step, not only those
    that compare: 5 % of a small step with 120 variables.
    """
    branch = out.op.inputs[0].op if out.op.type == "Identity" else out.op
    if branch.type in ("If", "StatelessIf"):
        branch._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))


def _plain(variable: Any) -> tf.Variable:
    """TensorFlow's variable of a Keras one."""
    return variable if isinstance(variable, tf.Variable) else variable.value
