"""Variables that ranks share outside the gradient exchange: the initial weights, the optimizer's state, the buffers.

Sharing is collective, eager, rarely called, and does nothing in a world of one rank. Beside it `Buffers`, which is
local: it takes back what the forward of a step did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.optim import Optimization
from hvdtrain.backends.tensorflow.state import assign, to_numpy, without_counters
from hvdtrain.exchange.reducer import Reducer

CHUNK_BYTES = 1 << 28
"""Largest single broadcast: MPI counts elements in 31 bits."""


def made_of(model: keras.Model, opt: Optimization) -> list[str]:
    """One line for each variable of the model, then the optimizer with its schedule and variables.

    Without Keras' own counters in names (``dense_7``), which go on counting within a process.
    """
    def line(kind: str, v: Any) -> str:
        return f"{kind} {without_counters(v.path)} {keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}"

    return [*(line("variable" if v.trainable else "frozen variable", v) for v in model.weights),
            f"optimizer {opt.made_of()}", *(line("variable of the optimizer", v) for v in opt.optimizer.variables)]


def share_initial(model: keras.Model, opt: Optimization, reducer: Reducer) -> None:
    """Give every rank rank 0's weights, optimizer state and base rate, bit by bit; seed generators stay.

    They travel as bytes, so that every dtype can. The ranks' variables are alike: `made_of` is compared before.
    """
    if reducer.collectives.size == 1:
        return
    base_lr = tf.Variable(np.nan if opt.base_lr is None else opt.base_lr, trainable=False, dtype=tf.float64)
    variables = [*model.weights, *opt.optimizer.variables, base_lr]
    _from_root(variables, reducer, "initial")
    opt.base_lr = None if np.isnan(base_lr.numpy()) else float(base_lr.numpy())


def sync_buffers(model: keras.Model, reducer: Reducer, n_seen: int) -> None:
    """Average floating non-trainable weights (BatchNorm statistics) over ranks, each by its samples; collective.

    ``n_seen``: samples of this rank since the last call. With n_r of rank r and base the values of the lowest rank
    that saw any::

        mean = base + sum_r n_r * (own_r - base) / sum_r n_r

    so that weights which are equal everywhere (frozen layers) keep their bits. Types that are not averaged are
    that rank's. Without a sample anywhere there is nothing to do.
    """
    wire = reducer.collectives
    if wire.size == 1:
        return
    counts_P = _gathered(reducer, n_seen, "buffers.seen")
    if not counts_P.any():
        return
    ran = int(np.flatnonzero(counts_P)[0])
    averaged: dict[str, list[Any]] = {"float32": [], "float64": []}
    others: list[Any] = []
    for variable in model.non_trainable_weights:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        wide = "float64" if dtype == "float64" else "float32"
        (averaged[wide] if "float" in dtype and wide in wire.dtypes else others).append(variable)
    _from_root(others, reducer, f"buffers.others.from{ran}", ran)
    for dtype, variables in averaged.items():
        if not variables:
            continue
        own_N = reducer.ops.pack([tf.cast(v.value, dtype) for v in variables])
        sent = reducer.outgoing(tf.identity(own_N))
        base_N = reducer.arrived(wire.broadcast(sent, f"buffers.{dtype}.from{ran}", ran).wait())
        zeros_N = tf.zeros_like(own_N)
        # Not 0 * NaN; equal infinities (an attention mask) have no difference.
        apart_N = tf.where(own_N == base_N, zeros_N, (own_N - base_N) * n_seen) if n_seen else zeros_N
        total_N = reducer.arrived(wire.allreduce(reducer.outgoing(apart_N), f"buffers.{dtype}.sum").wait())
        means = reducer.ops.unpack(base_N + total_N / int(counts_P.sum()), [v.shape for v in variables])
        for variable, mean in zip(variables, means):
            variable.assign(tf.cast(mean, variable.dtype))


class Buffers:
    """Copies of the floating variables that layers update in their forward, to undo a step that is skipped.

    Frozen parameters are not among them. Without such variables nothing is kept and nothing is done.
    """

    def __init__(self, model: keras.Model) -> None:
        found = {id(v): v for layer in model._flatten_layers() for v in layer._non_trainable_variables}
        own = [v.value for v in found.values() if "float" in keras.backend.standardize_dtype(v.dtype)]
        copies = [tf.Variable(v, trainable=False) for v in own]
        self._kept = False
        self._keep, self._put_back = _copying(own, copies), _copying(copies, own)

    def keep(self) -> None:
        """Copy them as they are now."""
        self._keep()
        self._kept = True

    def put_back(self) -> None:
        """Undo what happened to them since `keep`."""
        if self._kept:
            self._put_back()


def _copying(sources: Sequence[tf.Variable], targets: Sequence[tf.Variable]) -> Callable[[], None]:
    """One call that copies all; eager assignments of each would take milliseconds in a deep model."""
    if not sources:
        return lambda: None

    def copy() -> None:
        for source, target in zip(sources, targets):
            target.assign(source.read_value())

    return tf.function(copy, input_signature=[], jit_compile=False, autograph=False)


def _gathered(reducer: Reducer, number: int, name: str) -> np.ndarray:
    """One whole number of each rank, int64 (P,)."""
    sent = reducer.outgoing(tf.constant([number], tf.int64))
    return np.array(reducer.arrived(reducer.collectives.allgather(sent, name).wait())).reshape(-1)


def _from_root(variables: Sequence[Any], reducer: Reducer, name: str, root: int = 0) -> None:
    wire = reducer.collectives
    held = [to_numpy(v) for v in variables]
    if not held:
        return
    own = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in held])
    parts = []
    for i, begin in enumerate(range(0, own.size, CHUNK_BYTES)):
        sent = reducer.outgoing(tf.constant(own[begin:begin + CHUNK_BYTES]))
        parts.append(np.array(reducer.arrived(wire.broadcast(sent, f"{name}.{i}", root).wait())))
    ends = np.cumsum([a.nbytes for a in held])
    for variable, like, part in zip(variables, held, np.split(np.concatenate(parts), ends[:-1])):
        assign(variable, part.view(like.dtype).reshape(like.shape))
