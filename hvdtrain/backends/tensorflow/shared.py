"""Variables of a model that ranks share outside the gradient exchange: the initial weights and the buffers.

Collective, eager, rarely called. Every function does nothing in a world of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.state import assign, to_numpy
from hvdtrain.exchange.reducer import Reducer

CHUNK_BYTES = 1 << 28
"""Largest single broadcast: MPI counts elements in 31 bits."""


def share_initial(model: keras.Model, reducer: Reducer) -> None:
    """Give every rank rank 0's weights, bit by bit, as bytes so that every dtype travels; seed generators stay."""
    if reducer.collectives.size > 1:
        _from_root(model.weights, reducer, "initial")


def sync_buffers(model: keras.Model, reducer: Reducer) -> None:
    """Average floating non-trainable weights (BatchNorm statistics) over ranks; others are rank 0's.

    The mean is taken of the distances to rank 0's values, so that weights which are equal everywhere (frozen
    layers) keep their bits.
    """
    if reducer.collectives.size == 1:
        return
    wire = reducer.collectives
    by_dtype: dict[str, list[Any]] = {}
    for variable in model.non_trainable_weights:
        by_dtype.setdefault(keras.backend.standardize_dtype(variable.dtype), []).append(variable)
    for dtype, variables in sorted(by_dtype.items()):
        if dtype not in ("float16", "float32", "float64") or dtype not in wire.dtypes:
            _from_root(variables, reducer, f"buffers.{dtype}")
            continue
        own_N = reducer.ops.pack([v.value for v in variables])
        sent = reducer.outgoing(tf.identity(own_N))
        root_N = reducer.arrived(wire.broadcast(sent, f"buffers.{dtype}.root").wait())
        total_N = reducer.arrived(wire.allreduce(reducer.outgoing(own_N - root_N), f"buffers.{dtype}.sum").wait())
        means = reducer.ops.unpack(root_N + total_N / wire.size, [v.shape for v in variables])
        for variable, mean in zip(variables, means):
            variable.assign(mean)


def _from_root(variables: Sequence[Any], reducer: Reducer, name: str) -> None:
    wire = reducer.collectives
    held = [to_numpy(v) for v in variables]
    if not held:
        return
    own = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in held])
    parts = []
    for i, begin in enumerate(range(0, own.size, CHUNK_BYTES)):
        sent = reducer.outgoing(tf.constant(own[begin:begin + CHUNK_BYTES]))
        parts.append(np.array(reducer.arrived(wire.broadcast(sent, f"{name}.{i}").wait())))
    ends = np.cumsum([a.nbytes for a in held])
    for variable, like, part in zip(variables, held, np.split(np.concatenate(parts), ends[:-1])):
        assign(variable, part.view(like.dtype).reshape(like.shape))
