"""When each bucket of a graph was full and when its sum was there, in a graph for the steps of a trace.

Owns the stamps. TensorFlow runs operations with a state, such as its own clock, one after another as they were traced:
the stamp of a sum would wait for the last gradient. These have none, so each follows what it stamps alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.core.protocols.types import Bucket, itemsize
from hvdtrain.core.timeline import current


def wanted() -> bool:
    """Return whether graphs of this thread are to stamp their buckets now."""
    timeline = current()
    return timeline is not None and timeline.closely


def after(x_N: tf.Tensor) -> tf.Tensor:
    """Return when ``x_N`` was there, float64 () of `time.perf_counter`, while a graph is traced."""
    first = tf.cast(x_N[:1], tf.float32)  # what travels to Python; a constant would be stamped while it is optimised
    return tf.ensure_shape(tf.numpy_function(_now, [first], tf.float64, stateful=False), [])


def _now(x: np.ndarray) -> np.float64:
    return np.float64(time.perf_counter())


def tell(buckets: Sequence[Bucket], stamps: Sequence[float]) -> None:
    """Tell a trace, if one is being taken, of each bucket's way; ``stamps``: when they were full, when summed."""
    timeline = current()
    taker = timeline.taker if timeline is not None else None
    for i, bucket in enumerate(buckets if taker is not None else ()):
        assert taker is not None
        full_s, summed_s = stamps[i], stamps[len(buckets) + i]
        taker.take(f"{bucket.name}.r0", "wire", full_s, max(full_s, summed_s),
                   {"bytes": bucket.n * itemsize(bucket.dtype), "beside": True})
