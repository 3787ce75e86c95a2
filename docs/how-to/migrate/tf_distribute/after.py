"""The same training under MPI: no TF_CONFIG, no addresses, no strategy scope.

    mpirun -np 2 python after.py
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain.keras as hvd

hvd.init()

GLOBAL_BATCH = 64

x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split((x / 16).astype(np.float32), y, test_size=0.2, random_state=0)

keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.layers.Input((64,)),
    keras.layers.Dense(128, activation="relu"),
    keras.layers.Dense(10),
])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.003)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

train = hvd.shard(x_train, y_train, global_batch=GLOBAL_BATCH)  # this rank's part of every global batch
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
history = model.fit(train, epochs=15, callbacks=callbacks, verbose=0)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.3f}")
