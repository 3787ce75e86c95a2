"""Ranks that do unlike things under plain `keras.Model.fit`: told in words on every rank, or made harmless."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from hvdtrain.core.errors import UserError  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("few_ranks")]

DRAW = np.random.default_rng(8)
X, Y = DRAW.standard_normal((24, 5)).astype(np.float32), DRAW.standard_normal((24, 1)).astype(np.float32)


def fit(hvd, n=6, **more):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    return model, model.fit(X[:n], Y[:n], batch_size=3, verbose=0, **more).history


@pytest.fixture
def hvd(control):
    import hvdtrain.keras as hvd

    hvd.init()
    return hvd


@pytest.mark.parametrize("callback", ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"])
def test_unlike_numbers_of_batches(hvd, control, callback):
    made = getattr(hvd.callbacks, callback)(*([0] if "Broadcast" in callback else []))
    with pytest.raises(UserError, match=f"rank {control.size - 1} has 4 batches, rank 0 has 2"):
        fit(hvd, 12 if control.rank == control.size - 1 else 6, callbacks=[made])


def test_a_validation_on_rank_0_alone(hvd, control):
    more = {"validation_data": (X, Y)} if control.rank == 0 else {}
    with pytest.raises(UserError, match="rank 0 is at a validation after the epoch and rank 1 at no validation"):
        fit(hvd, callbacks=[hvd.callbacks.MetricAverageCallback()], **more)


def test_a_number_in_the_logs_of_rank_0_alone(hvd, control):
    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["note"] = 1.0

    with pytest.warns(UserWarning, match="note is in the logs of rank 0 only"):
        logs = fit(hvd, callbacks=[*([Adds()] if control.rank == 0 else []), hvd.callbacks.MetricAverageCallback()])[1]
    assert set(logs) == ({"loss", "note"} if control.rank == 0 else {"loss"})


def test_an_optimizer_that_rank_0_alone_makes_shifts_no_name(hvd, control):
    if control.rank == 0:
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = fit(hvd)[0]
    everyone = control.gather((model.optimizer._hvd_exchange._name, model.get_weights()))
    assert len({name for name, _ in everyone}) == 1
    for one in everyone:
        np.testing.assert_array_equal(one[1][0], everyone[0][1][0])


@pytest.mark.world_size(2)
def test_what_shard_cannot_put_right_is_refused_on_every_rank(hvd, control):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, activity_regularizer="l2")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(UserError, match="activity_regularizer"):
        model.fit(hvd.shard(X, Y, global_batch=8, shares=[2.0, *[1.0] * (control.size - 1)]), verbose=0)
    assert control.gather(model.fit(hvd.shard(X, Y, global_batch=12), verbose=0).history["loss"][0])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.losses.Dice())
    with pytest.raises(UserError, match="not a weighted mean over samples.*the ranks of hvdtrain.keras.shard divide"):
        model.fit(hvd.shard(X, abs(Y), global_batch=12), verbose=0)
