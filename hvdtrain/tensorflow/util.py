"""Names of ``horovod.tensorflow.util`` for Horovod's scripts."""

from __future__ import annotations

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Return whether operations run as they are called, outside of graphs and functions."""
    return bool(tf.executing_eagerly())
