"""Digits with Horovod's Keras API, as written for TensorFlow 2.12 and Keras 2.

    horovodrun -np 2 python before.py
"""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

hvd.init()

# Pin one GPU to each process.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

x, y = load_digits(return_X_y=True)
x = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
x_train, y_train = x_train[hvd.rank()::hvd.size()], y_train[hvd.rank()::hvd.size()]

model = tf.keras.Sequential([
    tf.keras.layers.Input((8, 8, 1)),
    tf.keras.layers.Conv2D(32, 3, activation="relu"),
    tf.keras.layers.MaxPooling2D(),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(64, activation="relu"),
    tf.keras.layers.Dense(10),
])

# Each process computes a batch of its own, so the global batch grows with their number, and the rate with it.
rate = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(rate))
model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3),
]
model.fit(x_train, y_train, batch_size=32, epochs=12, callbacks=callbacks, verbose=0)

if hvd.rank() == 0:
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"accuracy {accuracy:.3f}")
