"""The gradients of a rank's chunks, summed over the micro-batches of a step where their variables are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.graphs import PLAIN


class Sums:
    """``variables``: the trainable ones of all chunks; ``chunk_of``: the chunk of each."""

    def __init__(self, variables: Sequence[keras.Variable], chunk_of: Sequence[int]) -> None:
        self._all = [v.value for v in variables]
        self._numbers = {chunk: [i for i, c in enumerate(chunk_of) if c == chunk] for chunk in set(chunk_of)}
        self._sums: list[tf.Variable] = []
        self._clear: Callable[[], None] | None = None

    def variables(self, chunk: int) -> list[tf.Variable]:
        """Return those of a chunk."""
        return [self._all[i] for i in self._numbers.get(chunk, ())]

    def clear(self) -> None:
        """Begin with zeros; makes the memory for them at the first call."""
        if not self._sums:
            for v in self._all:
                with tf.device(v.device):
                    self._sums.append(tf.Variable(tf.zeros_like(v), trainable=False))

            def clear() -> None:
                for total in self._sums:
                    total.assign(tf.zeros(total.shape, total.dtype), read_value=False)

            self._clear = tf.function(clear, **PLAIN).get_concrete_function()
            return
        assert self._clear is not None
        self._clear()

    def numbers(self, chunk: int, exist: Sequence[bool]) -> frozenset[int]:
        """Return the indices of a chunk's variables that have a gradient."""
        return frozenset(i for i, there in zip(self._numbers.get(chunk, ()), exist) if there)

    def add(self, chunk: int, grads: Sequence[Any]) -> None:
        """Add gradients of a chunk's variables, also while a graph is traced; one that is None is left out."""
        for i, grad in zip(self._numbers.get(chunk, ()), grads):
            if isinstance(grad, tf.IndexedSlices):
                self._sums[i].scatter_add(grad)
            elif grad is not None:
                self._sums[i].assign_add(grad, read_value=False)

    def read(self) -> list[tf.Tensor]:
        """Return the sums by variable."""
        return [total.read_value() for total in self._sums]
