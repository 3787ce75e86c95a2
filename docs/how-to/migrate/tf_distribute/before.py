"""Digits under tf.distribute: one process for each worker, found through TF_CONFIG.

    TF_CONFIG='{"cluster": {"worker": ["localhost:20001", "localhost:20002"]}, "task": {"type": "worker", "index": 0}}' python before.py
    TF_CONFIG='{"cluster": {"worker": ["localhost:20001", "localhost:20002"]}, "task": {"type": "worker", "index": 1}}' python before.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

strategy = tf.distribute.MultiWorkerMirroredStrategy()

GLOBAL_BATCH = 64

x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split((x / 16).astype(np.float32), y, test_size=0.2, random_state=0)

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([
        keras.layers.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ])
    model.compile(
        optimizer=keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(x_train, y_train, batch_size=GLOBAL_BATCH, epochs=15, verbose=0)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"accuracy {accuracy:.3f}")
