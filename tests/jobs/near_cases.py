"""``fit`` over shared memory with one thread of TensorFlow's each, and a rank that ends in it; run by mpirun.

``python near_cases.py STEPS``: rank 1 is killed at its fourth step where STEPS is 0, and has only so many steps where
STEPS is below 0; else all ranks take so many.
"""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.tensorflow import basics


class Gone(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(steps):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(2048), keras.layers.Dense(4)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), check_every=200 * (steps > 0))
    model.compile(optimizer, "mse", metrics=["mae"])
    rows = np.random.default_rng(hvd.rank()).standard_normal((8, 36)).astype(np.float32)
    data = tf.data.Dataset.from_tensors((rows[:, :32], rows[:, 32:])).repeat()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    if steps <= 0:  # nothing but the exchange, which would tell otherwise
        callbacks = [Gone()] if steps == 0 else []
    most = -steps if steps < 0 and hvd.rank() == 1 else steps if steps > 0 else 1000
    model.fit(data, steps_per_epoch=most, verbose=0, callbacks=callbacks)
    assert basics.shared_wire(hvd.global_process_set) is not None
    print(f"trained {steps} steps", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
