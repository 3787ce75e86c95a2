"""Hands a graph's gradients to a sink outside of it, bucket by bucket, while the rest of backward runs.

Owns the nodes that do so. Each is a call of Python on one of TensorFlow's threads, which copies a bucket's gradients to
where they are summed and returns: a wire that goes on by itself (`Collectives.overlaps`) does the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import host
from hvdtrain.backends.tensorflow.nodes import telling
from hvdtrain.core.protocols import GradientSink


class Leaving:
    """The nodes of one sink. ``memory``: numpy memory of each bucket to copy to; else the sink is given tensors."""

    def __init__(self, sink: GradientSink, memory: Sequence[Any], in_place: bool) -> None:
        self._sink, self._memory, self._in_place = sink, memory, in_place
        self._lock = threading.Lock()  # a sink takes one bucket at a time

    def handed_over(self, tensors: Sequence[tf.Tensor], zero: tf.Tensor) -> tf.Tensor:
        """Return when each bucket was handed over, float64 (B,), while a graph is traced.

        ``tensors``: the gradients by variable, or with a sink that is given tensors those of its buckets. ``zero``: a
        scalar that TensorFlow cannot know before the graph runs.
        """
        buckets = self._sink.buckets
        groups = [[tensors[i] for i in b.params] for b in buckets] if self._in_place else [[x] for x in tensors]
        return tf.stack([self._node(i, group, zero) for i, group in enumerate(groups)])

    def _node(self, index: int, group: Sequence[tf.Tensor], zero: tf.Tensor) -> tf.Tensor:
        bucket = self._sink.buckets[index]

        def leave(_: np.ndarray, *arrays: np.ndarray) -> np.float64:
            with telling(f"gradients of {bucket.name}"):
                if self._in_place:
                    host.fill(self._memory[index], bucket, arrays)
                with self._lock:
                    self._sink.put(index, self._memory[index] if self._in_place else tf.constant(arrays[0]))
            return np.float64(time.perf_counter())

        # Nodes with a state wait for whatever else has one in the graph. One without, fed constants alone, such as
        # gradients that are known to be zero, TensorFlow would run while it optimises the graph, and not again.
        return tf.ensure_shape(tf.numpy_function(leave, [zero, *group], tf.float64, stateful=False), [])
