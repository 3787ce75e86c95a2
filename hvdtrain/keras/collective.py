"""Collectives on values, as in Horovod's Keras API: anything that converts to a tensor goes in, a tensor comes out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain import tensorflow as hvd
from hvdtrain.tensorflow import Average, Compression


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: Any = None, compression: Any = Compression.none) -> tf.Tensor:
    """Return the average over the ranks, or another reduction; ``average``: the old way to choose. Collective."""
    return hvd.allreduce(tf.convert_to_tensor(value), average=average, name=name, prescale_factor=prescale_factor,
                         postscale_factor=postscale_factor, op=op, compression=compression)


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Return all ranks' values along dimension 0, which may differ; collective."""
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return the value of ``root_rank``; collective."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Return this rank's shard, along dimension 0, of the reduced value; collective."""
    return hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)
