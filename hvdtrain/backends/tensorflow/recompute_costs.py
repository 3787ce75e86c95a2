"""Bytes that recomputing a block of a Keras model saves, its seconds, and the blocks that forward calls.

Owns the measurement: bytes from the graph that a step traces, on a real batch; seconds of each block's forward in a
graph of its own. Exchanges nothing, and restores everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow import recompute
from hvdtrain.backends.tensorflow.gradients import Gradients
from hvdtrain.backends.tensorflow.transforms import sync_batchnorm
from hvdtrain.backends.tensorflow.trial import Trial
from hvdtrain.core.protocols import Batch, BlockCost

SLOT_S = 0.05
"""About how long one block is timed."""


class Costs:
    """Measures blocks of ``model``, whose calls the caller has marked. ``across``: sums BatchNorm's moments over ranks.
    """

    def __init__(self, model: keras.Model, gradients: Gradients, across: sync_batchnorm.Across | None) -> None:
        self._model, self._gradients, self._across = model, gradients, across

    def forward(self, batch: Batch) -> recompute.Recording:
        return self._recorded(batch, lambda parts: self._gradients.task(self._model, parts, True))

    def measure(self, batch: Batch) -> dict[str, BlockCost]:
        split = self._gradients.split
        n_parts = split.parts(len(tf.nest.flatten(tuple(batch))[0])) if split else 1
        scale = tf.constant(1.0, tf.float64)
        found = self._recorded(batch, lambda parts: self._gradients.traced(parts, scale, n_parts))
        seconds = self._seconds(batch)
        read = {recompute.source(t).name for op in found.graph.get_operations()[found.n_forward:] for t in op.inputs}
        costs: dict[str, BlockCost] = {}
        for block in recompute.blocks(found, {call.name for call in found.calls}):
            inner = recompute.nbytes(block.read().values())
            more = recompute.nbytes(t for name, t in block.inputs().items() if name not in read)
            before = costs.get(block.name, BlockCost(block.name, 0, seconds.get(block.name, 0.0)))
            costs[block.name] = BlockCost(block.name, before.saved_bytes + inner - more, before.forward_s,
                                          max(before.inner_bytes, inner))
        return costs

    def _recorded(self, batch: Batch, work: Callable[[Any], Any]) -> recompute.Recording:
        leaves = [tf.convert_to_tensor(x) for x in tf.nest.flatten(tuple(batch))]
        kept: list[recompute.Recording] = []

        def trace(*parts: tf.Tensor) -> None:
            with recompute.recording() as found:
                work(tf.nest.pack_sequence_as(tuple(batch), parts))
                kept.append(found)

        with sync_batchnorm.local_statistics(self._across):
            function = tf.function(trace, jit_compile=False, autograph=False)
            self._graph = function.get_concrete_function(*leaves)  # operations live as long as it
        self._model._clear_losses()
        return kept[0]

    def _seconds(self, batch: Batch) -> dict[str, float]:
        """Return the median time of each block's forward passes on ``batch``, all calls of a block together."""
        tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
        seconds: dict[str, float] = {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            function = tf.function(call, jit_compile=False, autograph=False)
            y = function()
            took: list[float] = []
            while len(took) < 3 or sum(took) < SLOT_S and len(took) < 20:
                begin = time.perf_counter()
                for tensor in tf.nest.flatten(function()):
                    if tf.is_tensor(tensor) and "GPU" in tensor.device:
                        tensor[:1].numpy()  # a copy to the host waits for the device
                took.append(time.perf_counter() - begin)
            seconds[name] = seconds.get(name, 0.0) + sorted(took)[len(took) // 2]
            return y

        def work(_: tuple[Any, ...]) -> list[tf.Tensor]:
            with recompute.instead(timed), sync_batchnorm.local_statistics(self._across):
                self._gradients.task(self._model, tensors, True)
            return []

        Trial(self._model, work)(batch)
        self._model._clear_losses()
        return seconds
