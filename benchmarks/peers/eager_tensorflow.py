"""Single calls of Horovod's TensorFlow API outside of graphs, of hvdtrain.tensorflow and of Horovod itself alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

Case = Callable[[Any], Any]


def apis() -> tuple[Any, Any]:
    """(hvdtrain.tensorflow, initialized, horovod.tensorflow); both over the same Horovod. Collective."""
    import horovod.tensorflow as bare

    import hvdtrain.tensorflow as ours

    ours.init()
    assert bare.is_initialized() and bare.size() == ours.size(), "both are to share one Horovod"
    return ours, bare


def cases() -> dict[str, Case]:
    """Return the calls by the name that a table shows: each takes one of the `apis` and returns its result."""
    import tensorflow as tf

    x, large, rows = tf.ones([1000]), tf.ones([1 << 20]), tf.ones([8 * 3 * 5, 10])
    group, large_group = [tf.ones([1000]) for _ in range(5)], [tf.ones([1 << 18]) for _ in range(5)]
    numbers = itertools.count()
    return {
        "allreduce": lambda hvd: hvd.allreduce(x, name="bench"),
        "allreduce, a new name each": lambda hvd: hvd.allreduce(x, name=f"bench.{next(numbers)}"),
        "allreduce of 4 MiB": lambda hvd: hvd.allreduce(large, name="bench.large"),
        "grouped_allreduce of 5": lambda hvd: hvd.grouped_allreduce(group, name="bench.group"),
        "grouped_allreduce of 5 x 1 MiB": lambda hvd: hvd.grouped_allreduce(large_group, name="bench.large_group"),
        "allgather": lambda hvd: hvd.allgather(rows, name="bench"),
        "grouped_allgather of 5": lambda hvd: hvd.grouped_allgather([rows] * 5, name="bench.group"),
        "broadcast": lambda hvd: hvd.broadcast(x, 0, name="bench"),
        "alltoall": lambda hvd: hvd.alltoall(rows, name="bench"),
        "reducescatter": lambda hvd: hvd.reducescatter(rows, name="bench"),
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two results are equal."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one.numpy(), other.numpy())
