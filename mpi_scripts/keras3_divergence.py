"""Does training stay in step on every rank? Horovod's own Keras wrapper against hvdtrain, on Keras 3.

    mpirun -np 2 python mpi_scripts/keras3_divergence.py

Trains a dense model on scikit-learn's digits for 2 epochs with ``horovod.tensorflow.keras.DistributedOptimizer`` and
``fit``, each rank on its own half, then with hvdtrain, and prints the largest difference of the weights between ranks.
"""

import numpy as np
from mpi4py import MPI

import keras
from sklearn.datasets import load_digits


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])


def spread(weights: list) -> float:
    """Largest difference of any weight between rank 0 and another rank."""
    everyone = MPI.COMM_WORLD.allgather(np.concatenate([w.ravel() for w in weights]))
    return max(float(np.abs(w - everyone[0]).max()) for w in everyone)


def with_horovod(x: np.ndarray, y: np.ndarray) -> float:
    import horovod.tensorflow.keras as hvd

    hvd.init()
    net = model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss)
    net.fit(x[hvd.rank()::hvd.size()], y[hvd.rank()::hvd.size()], batch_size=32, epochs=2, verbose=0)
    return spread(net.get_weights())


def with_hvdtrain(x: np.ndarray, y: np.ndarray) -> float:
    from hvdtrain import Config, Trainer
    from hvdtrain.config import Named

    net = model()
    config = Config(epochs=2, global_batch=64, lr=0.05, optimizer=Named("SGD"), progress="off")
    Trainer(config).fit(net, (x, y))
    return spread(net.get_weights())


if __name__ == "__main__":
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target
    ours, theirs = with_hvdtrain(x, y), with_horovod(x, y)
    if MPI.COMM_WORLD.rank == 0:
        print(f"largest difference of a weight between ranks after 2 epochs: Horovod's Keras wrapper {theirs:.3g}, hvdtrain {ours:.3g}")
