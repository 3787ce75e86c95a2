"""A batch computed for its time and memory alone: forward and backward, after which all is as it was.

Owns what has to be put back: statistics that layers update in their forward, random generators. Exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow import state
from hvdtrain.backends.tensorflow.buffers import Kept, written_in_forward
from hvdtrain.core.protocols import Batch


class Trial:
    """Calls ``gradients(batch)``, a graph of forward and backward, on ``model`` and puts back what that changed."""

    def __init__(self, model: keras.Model, gradients: Callable[[tuple[Any, ...]], list[tf.Tensor]]) -> None:
        self._model, self._gradients = model, gradients
        self._buffers = Kept(written_in_forward(model))

    def __call__(self, batch: Batch) -> list[tf.Tensor]:
        """Return the gradients, when they are there."""
        random = state.random_arrays(self._model)
        self._buffers.keep()
        try:
            tensors = self._gradients(tuple(batch))
            for tensor in tensors:
                if "GPU" in tensor.device:
                    tensor[:1].numpy()  # a copy to the host waits for the device
            return tensors
        finally:
            self._buffers.put_back()
            state.load_random(self._model, random)


def free_cached() -> None:
    """Nothing: TensorFlow gives nothing back before the process ends."""


def hold_bytes(n: int) -> None:
    """Nothing: Keras has made the optimizer's state before."""


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device's memory did not suffice."""
    return isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))


def peak_bytes(work: Callable[[], None]) -> int:
    """Most bytes that the device held at once while ``work`` ran, all there is of this process; 0 on a CPU."""
    if not tf.config.list_physical_devices("GPU"):
        work()
        return 0
    tf.config.experimental.reset_memory_stats("GPU:0")
    work()
    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


def peak_so_far() -> int:
    """Most bytes that the device has held at once in this process; 0 on a CPU."""
    gpus = tf.config.list_physical_devices("GPU")
    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) if gpus else 0
