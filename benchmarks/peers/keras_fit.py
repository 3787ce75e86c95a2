"""Plain ``model.fit`` through `hvdtrain.keras`, with the callbacks of a Horovod script, one batch at a time.

``fit`` owns its loop, so it runs in a thread of its own that a callback holds before each batch until the bench asks
for one: two changes of threads a step are in what is timed. The batches are a `tf.data.Dataset` in memory.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np

from benchmarks.peers import IDLE_S, Prepared, Setup
from benchmarks.peers import tensorflow_common as common


def prepare(setup: Setup, check_every: int = 200) -> Prepared:
    """Compile with the distributed optimizer, and start to fit, with the callbacks that broadcast and average metrics.

    ``check_every``: updates between two looks of the guard.
    """
    import keras
    import tensorflow as tf

    import hvdtrain.keras as hvd
    from hvdtrain.tensorflow.basics import shared_wire

    model, loss, optimizer = common.build(setup, setup.begin)
    hvd.init()
    assert hvd.size() == setup.control.size, "Horovod did not find the ranks"
    tokens = setup.workload.vocab > 0

    def mean_loss(y: Any, logits: Any) -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), logits)  # Keras made them floats
        return tf.reduce_mean(losses, axis=1) if tokens else losses

    wire = "shared" if shared_wire(hvd.global_process_set) else "horovod"
    model.compile(hvd.DistributedOptimizer(optimizer, check_every=check_every), mean_loss, jit_compile=False)
    pace = _pace(keras)
    batches = tf.data.Dataset.from_tensor_slices(tuple(np.stack(arrays) for arrays in zip(*setup.batches))).repeat()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), pace]
    fit = partial(model.fit, batches, steps_per_epoch=10**9, callbacks=callbacks, verbose=0)
    threading.Thread(target=fit, name="fit", daemon=True).start()
    return Prepared(lambda i: pace.step(), pace.loss, partial(common.arrays_of, model), wire,
                    partial(common.sync, model))


def _pace(keras: Any) -> Any:
    """Return a callback that lets ``fit`` take a batch for each call of ``step``."""
    class Pace(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
            self._steps, self._mean, self._last = 0, 0.0, float("nan")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._asked.acquire()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            mean, self._steps = float((logs or {})["loss"]), self._steps + 1
            self._last = mean * self._steps - self._mean * (self._steps - 1)  # Keras logs the mean since the start
            self._mean = mean
            self._done.release()

        def step(self) -> None:
            self._asked.release()
            if not self._done.acquire(timeout=IDLE_S):
                raise RuntimeError("model.fit did not come back with its batch")

        def loss(self) -> float:
            return self._last

    return Pace()
