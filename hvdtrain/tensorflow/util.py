"""What Horovod's scripts ask of ``horovod.tensorflow.util``."""

from __future__ import annotations

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Whether operations run as they are called, outside of graphs and functions."""
    return bool(tf.executing_eagerly())
