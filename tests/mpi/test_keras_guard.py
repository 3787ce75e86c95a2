"""The guard of hvdtrain.keras over ranks: different weights, rates and ends of training stop every rank."""

import re

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)
from keras_ranks import X, Y, compiled, equal_to, mlp, only, ranks_fit, reference  # noqa: E402

from hvdtrain.engine.weight_checks import Diverged  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def hvd(control):
    import hvdtrain.keras as hvd

    hvd.init()
    return hvd


# --- the guard -------------------------------------------------------------------------------------------------------


class Spoil(keras.callbacks.Callback):
    """Changes one weight on one rank after a batch."""

    def __init__(self, rank, batch):
        super().__init__()
        self.rank, self.batch = rank, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self.rank:
            kernel = self.model.layers[-1].kernel
            kernel.assign(kernel + 1e-3 * np.eye(*kernel.shape))


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_the_guard_stops_every_rank(hvd, control, eagerly):
    only(hvd, 3 if eagerly else 4)
    last = hvd.rank() == hvd.size() - 1
    model = compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), check_every=5), run_eagerly=eagerly)
    with pytest.raises(Diverged) as caught:
        ranks_fit(hvd, model, epochs=4, callbacks=[Spoil(last, 2)])
    error = caught.value
    assert error.variable == model.layers[-1].kernel.path and error.ranks == (hvd.size() - 1,)
    found = re.search(r"after update (\d) ", str(error))  # at an epoch's end, before five updates are made
    assert found and 3 <= int(found[1]) <= 5 and "something other than this optimizer" in str(error)
    assert len(set(control.gather(str(error)))) == 1


def test_the_guard_stops_a_loop_of_ones_own(hvd):
    only(hvd, 2)
    model, optimizer = mlp(hvd.rank()), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X[:4]) - Y[:4]))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    step()
    with pytest.raises(tf.errors.OpError, match="after update 2 the ranks no longer hold the same weights"):
        step()


def test_the_guard_names_a_missing_broadcast_and_the_callback_cures_it(hvd, control):
    only(hvd, 2)
    seed = 1 + hvd.rank()
    model = compiled(mlp(seed), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(Diverged, match=r"after update 2 .*BroadcastGlobalVariablesCallback\(0\)"):
        ranks_fit(hvd, model)
    model = compiled(mlp(seed), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    ranks_fit(hvd, model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    equal_to(model, reference("sgd", seed=1), control)


def test_the_guard_as_a_callback_names_a_plain_optimizer(hvd):
    only(hvd, 2)
    model = compiled(mlp(), keras.optimizers.SGD(0.1))
    with pytest.raises(Diverged, match=r"is not hvd.DistributedOptimizer"):
        ranks_fit(hvd, model, callbacks=[hvd.callbacks.DivergenceGuardCallback(every=50)])


class Spoils(keras.callbacks.Callback):
    """On rank 1, changes the rate or frozen weights after epoch 0, all weights after fit, or stops after epoch 0."""

    def __init__(self, what, rank):
        super().__init__()
        self.what = what if rank == 1 else "nothing"

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= self.what == "stop"
        if self.what == "rate":
            self.model.optimizer.learning_rate = 0.05
        if self.what == "frozen":
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 1.5)

    def on_train_end(self, logs=None):
        if self.what == "weights":
            self.model.set_weights([w + 0.1 for w in self.model.get_weights()])


RATES = "after update 4 the ranks have different learning rates: 0.1 on rank 0 and 0.05 on rank 1"
FROZEN = "after update 4 the ranks no longer hold the same weights: '[^']*kernel' differs on rank 1"


@pytest.mark.parametrize("what, words, wrapped", [
    ("rate", RATES, False), ("rate", RATES, True), ("weights", "after update 12 the ranks no longer hold", False),
    ("frozen", FROZEN, False), ("frozen", FROZEN, True),
    ("stop", "after update 4 the ranks do not stop training together: model.stop_training is 0 on rank 0 and", False)])
def test_the_guard_compares_at_the_end_of_epochs_and_of_fit(hvd, control, what, words, wrapped):
    """A plain optimizer of ranks with the same data trains one model, until a callback of rank 1 spoils it."""
    only(hvd, 2)
    optimizer = keras.optimizers.SGD(0.1)
    model = mlp()
    model.layers[0].trainable = what != "frozen"
    compiled(model, optimizer if wrapped else hvd.DistributedOptimizer(optimizer))
    guard = [hvd.callbacks.DivergenceGuardCallback(every=100)] if wrapped else []
    with pytest.raises(Diverged, match=words) as caught:
        model.fit(X, Y, batch_size=12, epochs=3, shuffle=False, verbose=0,
                  callbacks=[Spoils(what, hvd.rank()), *guard])
    assert caught.value.ranks == (1,) and len(set(control.gather(str(caught.value)))) == 1


def test_the_guard_at_the_end_of_epochs_takes_any_form_of_callbacks(hvd, control):
    only(hvd, 2)
    model = compiled(mlp(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    whole = keras.callbacks.CallbackList([], add_history=True, model=model, epochs=2)
    for callbacks in (None, keras.callbacks.History(), (keras.callbacks.History(),), whole):
        model.fit(X, Y, 12, 2, 0, callbacks)
    assert [type(c).__name__ for c in whole.callbacks] == ["History"]
