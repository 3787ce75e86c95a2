"""Compare fingerprints of weights and learning rates over ranks every N updates, to detect ranks that diverged.

Owns when ranks compare and what each sends; `hvdtrain.engine.weight_checks` judges weights. Under ``fit`` ranks
compare between steps; in a custom training loop inside the step's graph, in a branch taken when due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from hvdtrain.core.errors import UserError
from hvdtrain.engine.weight_checks import Diverged, FingerprintRows, judge
from hvdtrain.tensorflow import basics
from hvdtrain.tensorflow.nodes import node_name, through_trace

EARLY = (2, 8)
"""Updates after which ranks compare besides every N-th. Not the first: Horovod's own examples broadcast after it."""

MEAN_SQUARE = 13 / 12  # of numbers spread evenly from 0.5 to 1.5
RATE_ROUNDING = 1e-6  # relative difference between learning rates that is taken for float32 rounding


class DivergenceGuard:
    """Compare weights and learning rates of the ranks of ``process_set`` after updates 2, 8 and every ``every``-th.

    ``every``: 0 never compares. ``distributed``: whether the updates are known to come from exchanged gradients, which
    decides the likely cause. Raises `hvdtrain.engine.weight_checks.Diverged` on every rank; from inside a graph as
    an error of TensorFlow's with the same message.
    """

    def __init__(self, process_set: Any, every: int, name: str, distributed: bool = True) -> None:
        if not isinstance(every, int) or every < 0:
            raise UserError(f"check_every={every!r}", "a number of updates, 0 for never", "give for example 200")
        self._process_set, self._every, self.name, self._distributed = process_set, every, name, distributed
        self._variables: list[tf.Variable] = []
        self._names: list[str] = []
        self._rate: Callable[[], Any] | None = None
        self._before: tf.Variable | None = None
        self._updates: tf.Variable | None = None
        self._eps = 0.0
        self._between = 0.0
        self._late = 0
        self._driven = False
        self._rows: Callable[[float], tf.Tensor] | None = None

    def begin_after(self, updates: int) -> None:
        """Count from the update after the next ``updates``: ranks may differ until a broadcast."""
        self._late = updates
        self._between = -updates
        if self._updates is not None:
            self._updates.assign(-updates)

    def before_update(self, variables: Sequence[Any], rate: Callable[[], Any] | None = None,
                      frozen: Callable[[], list[Any]] = list) -> None:
        """Remember what is compared and this rank's first values; reads the weights once, in the first call.

        ``rate``: returns the current learning rate, in a graph too. ``frozen``: returns weights that are compared
        besides ``variables``, which the optimizer updates.
        """
        if self._before is not None or not self._every or ranks_of(self._process_set) == 1:
            return
        with tf.init_scope():
            compared = [*variables, *frozen()]
            self._variables = [v if isinstance(v, tf.Variable) else v.value for v in compared]
            self._names = [getattr(v, "path", None) or v.name for v in compared]
            # Of the updated ones: a frozen weight of a narrow type must not widen the tolerance of all.
            self._eps = max((_eps(v.dtype) for v in self._variables[:len(variables)]), default=0.0)
            self._before = tf.Variable(fingerprints(self._variables)[0], trainable=False)
            self._rate = rate

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Leave the count of steps in the body to `between_steps`."""
        self._driven = True
        try:
            yield
        finally:
            self._driven = False

    def between_steps(self, updates: float) -> None:
        """Count ``updates``, and compare if due; outside of graphs. Collective."""
        if self._before is None:
            return
        before, self._between = self._between, self._between + updates
        due = self._every * np.floor(self._between / self._every)
        if before < due > 0 or any(before < early <= self._between for early in EARLY):
            self._compare_now()

    def after_epoch(self, stops: bool = False, fit: bool = False) -> None:
        """Compare at the end of an epoch or of ``fit``; outside of graphs. Collective.

        ``stops``: this rank leaves ``fit`` before its last epoch, where the others would wait for its gradients.
        ``fit``: the fit ends, and with it any broadcast after its first update: one update is enough.
        """
        updates = self._between + self._late if fit else self._between
        if self._before is not None and updates >= (1 if fit else EARLY[0]):
            self._compare_now(stops)

    def _compare_now(self, stops: bool = False) -> None:
        assert self._before is not None
        if self._rows is None:
            self._rows = tf.function(self._gathered, input_signature=[tf.TensorSpec([], tf.float32)],
                                     jit_compile=False, autograph=False)
        self._judge(self._rows(float(stops)).numpy(), self._between)
        self._before.assign(fingerprints(self._variables)[0])

    def after_update(self) -> None:
        """Count an update, and compare if due, within the step. Collective."""
        if self._before is None or self._driven:
            return
        if tf.executing_eagerly():
            self.between_steps(1)
            return
        with tf.init_scope():
            if self._updates is None:
                self._updates = tf.Variable(-self._late, dtype=tf.int64, trainable=False)
        count = self._updates.assign_add(1, read_value=True)
        due = tf.equal(count % self._every, 0) & (count > 0)
        for early in EARLY:
            due |= tf.equal(count, early)
        _keep_branches(tf.cond(due, lambda: self._compare(count), lambda: tf.constant(False)))

    def _compare(self, count: tf.Tensor) -> tf.Tensor:
        assert self._before is not None
        rows_PK = self._gathered()
        alike = tf.numpy_function(self._judge, [rows_PK, count], tf.bool)
        with tf.control_dependencies([alike]):
            self._before.assign(fingerprints(self._variables)[0])
        return tf.ensure_shape(alike, [])

    def _gathered(self, stops: Any = 0.0) -> tf.Tensor:
        """Gather float32 (P, 3V + 2): old and new fingerprints, norms, learning rate, ``stops``."""
        assert self._before is not None
        rate = 0.0 if self._rate is None else keras.ops.convert_to_tensor(self._rate())
        scalars_2 = [tf.cast(x, tf.float32) for x in (rate, stops)]
        row_K = tf.concat([self._before.read_value(), *fingerprints(self._variables), scalars_2], 0)
        return basics.wire(self._process_set).allgather(row_K, node_name(f"{self.name}_weights")).wait()

    def _judge(self, rows_PK: np.ndarray, count: float) -> np.bool_:
        ranks = getattr(self._process_set, "ranks", None) or None
        found = _settings_apart(rows_PK[:, -2:], int(count), ranks)  # first: a rate that differs explains the weights
        if found is None:
            rows = FingerprintRows.unpack(rows_PK[:, :-2])
            found = judge(rows, self._names, int(count), self._eps, self._distributed, ranks)
        if found is not None:
            raise through_trace(found)
        return np.bool_(True)


class GuardCallback(keras.callbacks.Callback):
    """Compare at the end of each epoch and of ``fit``, after all other callbacks. Collective."""

    def __init__(self, guard: DivergenceGuard) -> None:
        super().__init__()
        self._guard = guard

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._guard.after_epoch(stops_early(self, epoch))

    def on_train_end(self, logs: dict | None = None) -> None:
        self._guard.after_epoch(fit=True)


def frozen_weights(model: keras.Model) -> list[Any]:
    """Return the weights of frozen layers, without variables that layers make as not trainable."""
    trained = {id(v) for v in model.trainable_variables}
    made = {id(v): v for layer in model._flatten_layers() for v in layer._trainable_variables}
    return [v for key, v in made.items() if key not in trained]


def stops_early(callback: Any, epoch: int) -> bool:
    """Return whether this rank's ``fit`` ends after ``epoch`` though more epochs were asked for."""
    return bool(callback.model.stop_training) and epoch + 1 < callback.params.get("epochs", 0)


def _settings_apart(rows_P2: np.ndarray, count: int, ranks: Sequence[int] | None) -> Diverged | None:
    """Return the error for learning rates that differ by more than rounding, or for ranks that stop alone."""
    numbers = list(range(len(rows_P2)) if ranks is None else ranks)
    for name, column_P, said, expected, do in (
            ("learning_rate", rows_P2[:, 0].astype(np.float64), "have different learning rates: {:g}",
             "one learning rate", "give callbacks that change the rate, such as ReduceLROnPlateau"),
            ("stop_training", rows_P2[:, 1], "do not stop training together: model.stop_training is {:g}",
             "one decision to stop", "give callbacks that stop training, such as EarlyStopping")):
        apart_P = ~np.isclose(column_P, column_P[0], rtol=RATE_ROUNDING, atol=0.0, equal_nan=True)
        if apart_P.any():
            other = int(np.argmax(apart_P))
            return Diverged(f"after update {count} the ranks {said.format(column_P[0])} on rank {numbers[0]} and "
                            f"{column_P[other]:g} on rank {numbers[other]}", f"{expected} on every rank",
                            f"{do}, to every rank, after MetricAverageCallback", name,
                            tuple(numbers[r] for r in np.flatnonzero(apart_P)))
    return None


def ranks_of(process_set: Any) -> int:
    """Return the number of cooperating ranks; 1 where this rank is not in the set. `ValueError` before hvd.init()."""
    wire = basics.wire(process_set)
    return 1 if wire is None else int(wire.size)


def fingerprints(variables: Sequence[tf.Variable]) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the sum of each variable under pseudo-random weights, and its norm: float32 (V,) each."""
    prints, norms = [], []
    for variable in variables:
        x = tf.cast(variable, tf.float32)
        columns = x.shape[-1] if x.shape.rank else 1
        x_RC = tf.reshape(x, [-1, columns])
        weights_R, weights_C = _weights(tf.shape(x_RC)[0], 0), _weights(tf.constant(columns), 1)
        prints.append(tf.reduce_sum(weights_R * tf.reduce_sum(x_RC * weights_C, axis=1)))
        norms.append(tf.sqrt(tf.reduce_sum(tf.square(x_RC))))
    return tf.stack(prints), tf.stack(norms)


def _weights(n: tf.Tensor, salt: int) -> tf.Tensor:
    """Return n signed hashes of the index of mean square 1; not bare signs, which hide an added constant."""
    i = tf.range(tf.cast(n, tf.int64), dtype=tf.int64)
    mixed = (i * (i + 40503 + 2 * salt) * 2654435761 // 65536 + i * 40503) // 64
    return tf.cast((1 - 2 * (mixed % 2)) * (512 + mixed // 2 % 1024), tf.float32) / (1024 * MEAN_SQUARE ** 0.5)


def _eps(dtype: tf.DType) -> float:
    return 2.0 ** -{"float16": 10, "bfloat16": 7}.get(dtype.name, 23)  # fingerprints are float32


def _keep_branches(out: tf.Tensor) -> None:
    """Keep the branches of a cond as functions: inlined, each step would pay a switch for each variable."""
    branch = out.op.inputs[0].op if out.op.type == "Identity" else out.op
    if branch.type in ("If", "StatelessIf"):
        branch._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))
