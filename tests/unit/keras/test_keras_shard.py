"""`hvdtrain.keras.shard` and `MetricAverageCallback`: P ranks with unequal parts against one Keras process."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from sharded_keras import BATCH, DRAW, WEIGHTS, N, X, Y, dense  # noqa: E402

from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.keras.data import shard  # noqa: E402
from hvdtrain.keras.metrics import MetricAverageCallback  # noqa: E402

SHARES = [[1], [1, 1], [3, 1], [0, 1], [1, 5, 2]]


def made(rate=0.0, seed=7):
    keras.utils.set_random_seed(seed)
    a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(keras.layers.Concatenate()([a, b]))
    outputs = {"kind": keras.layers.Dense(1, activation="sigmoid", name="kind")(hidden),
               "size": keras.layers.Dense(1, name="size")(hidden)}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(keras.optimizers.SGD(rate), {"kind": "binary_crossentropy", "size": "mse"}, loss_weights={
        "kind": 1.0, "size": 0.25}, metrics={"kind": ["accuracy", keras.metrics.AUC(name="auc")]},
        weighted_metrics={"kind": [keras.metrics.Precision(name="precision")], "size": ["mae"]}, run_eagerly=True)
    return model


def parts(shares, **kwargs):
    return [shard(X, Y, kwargs.get("sample_weight"), global_batch=BATCH, shares=shares, rank=rank, size=len(shares),
                  **{k: v for k, v in kwargs.items() if k != "sample_weight"}) for rank in range(len(shares))]


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_ranks_read_parts_of_the_same_global_batches(shares):
    whole = parts([1], seed=3)[0]
    ranks = parts(shares, seed=3)
    seen = set()
    for epoch in range(2):
        for one in [whole, *ranks]:
            one.on_epoch_begin()
        assert {len(one) for one in ranks} == {3}
        for step in range(3):
            want = whole[99]  # in an epoch the k-th item read is step k, whatever number Keras asks for
            got = [one[0] for one in ranks]
            kept = [np.concatenate([g[0]["a"][:one.count(step)] for g, one in zip(got, ranks)])]
            np.testing.assert_array_equal(kept[0], want[0]["a"])
            for item, one in zip(got, ranks):
                assert len(item[0]["a"]) == max(1, one.count(step)) and (one.count(step) or not item[2].any())
        seen.add(tuple(whole._order))
        for one in [whole, *ranks]:
            one.on_epoch_end()
    assert len(seen) == 2
    later = parts(shares, seed=3, epoch=1)[0]
    later.on_epoch_begin()
    np.testing.assert_array_equal(later._order, ranks[0]._order)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [None, WEIGHTS, {"kind": WEIGHTS, "size": WEIGHTS[::-1]}],
                         ids=["plain", "weighted", "per output"])
@pytest.mark.parametrize("shares", SHARES[1:], ids=str)
def test_the_mean_over_ranks_of_keras_gradients_is_the_whole_batchs(shares, weight):
    model = made()

    def gradient(item):
        x, y, w = (keras.tree.map_structure(tf.convert_to_tensor, part) for part in item)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x), sample_weight=w)
        return [loss.numpy(), *(g.numpy() for g in tape.gradient(loss, model.trainable_weights))]

    whole = parts([1], shuffle=False, sample_weight=weight)[0]
    ranks = parts(shares, shuffle=False, sample_weight=weight)
    for step in (0, 2):  # 8 samples, and the last 5
        want = gradient(whole[step])
        got = [np.mean(each, axis=0) for each in zip(*(gradient(one[step]) for one in ranks))]
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_class_weights_given_to_fit_are_refused_with_the_remedy():
    import hvdtrain.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(UserError, match=r"class_weight=.*Write hvd.shard\(x, y, class_weight=\.\.\.\)"):
        model.fit(shard(X["a"], Y["kind"], global_batch=7, rank=0, size=1), class_weight={0: 2.0}, verbose=0)


def test_class_weights_multiply_sample_weights():
    y = DRAW.integers(0, 3, N)
    one = shard(X["a"], y, WEIGHTS, global_batch=N, class_weight={1: 4.0}, shuffle=False, rank=0, size=1)
    np.testing.assert_allclose(one[0][2], WEIGHTS * np.where(y == 1, 4.0, 1.0), rtol=1e-6)


@pytest.mark.parametrize("make, words", [
    (lambda: shard(X["a"], global_batch=4, rank=0, size=1), "without y"),
    (lambda: shard(X["a"], Y["size"][:3], global_batch=4, rank=0, size=1), "arrays of 3, 21 samples"),
    (lambda: shard(X["a"], Y["size"], WEIGHTS[:5], global_batch=4, rank=0, size=1), "arrays of 5, 21 samples"),
    (lambda: shard(X["a"], Y["size"], global_batch=0, rank=0, size=1), "global_batch is 0"),
    (lambda: shard(X["a"], Y["size"], global_batch=64, drop_remainder=True, rank=0, size=1), "global batch of 64"),
    (lambda: shard(X["a"], Y["size"], global_batch=4, shares=[-1.0], rank=0, size=1), "shares are"),
])
def test_mistakes_are_told(make, words):
    with pytest.raises(UserError, match=words):
        make()


# --- logs ----------------------------------------------------------------------------------------------------------

class Seen(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.logs = dict(logs)


def averaged(shares, cut):
    """Return what a callback after MetricAverageCallback sees on each rank: fits of rate 0 to learn what every rank
    hands over, and again to hand it to each."""
    handed: list[list] = [[] for _ in shares]

    def run(rank, gather):
        average, seen = MetricAverageCallback(), Seen()
        average._gather = gather
        train, test = cut(rank)
        made().fit(train, validation_data=test, verbose=0, callbacks=[average, seen])
        return seen.logs

    for rank in range(len(shares)):
        run(rank, lambda mine, rank=rank: handed[rank].append(mine) or [mine])
    assert len({len(h) for h in handed}) == 1
    results = []
    for rank in range(len(shares)):
        calls = iter(zip(*handed))
        results.append(run(rank, lambda mine: list(next(calls))))
    return results


def whole_logs(weight):
    seen = Seen()
    model = made()
    model.fit(X, Y, sample_weight=weight, batch_size=BATCH, epochs=1, verbose=0, callbacks=[seen], shuffle=False,
              validation_data=(X, Y) if weight is None else (X, Y, weight), validation_batch_size=BATCH)
    return seen.logs


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[3, 1], [0, 1]], ids=str)
def test_logs_over_shards_are_those_of_one_process(shares):
    ranks = parts(shares, shuffle=False, sample_weight=WEIGHTS)
    tests = parts(shares, shuffle=False, sample_weight=WEIGHTS)
    want = whole_logs(WEIGHTS)
    assert {"loss", "kind_auc", "kind_precision", "size_mae", "kind_loss", "val_kind_auc"} < set(want)
    for got in averaged(shares, lambda r: (ranks[r], tests[r])):
        assert got == {name: pytest.approx(value, rel=1e-4) for name, value in want.items()}


@pytest.mark.slow
def test_logs_over_shards_of_the_users_own():
    """Plain arrays of unequal length on each rank, without hvdtrain's shard."""
    cut = [slice(0, 16), slice(16, 21)]
    want = whole_logs(None)

    def own(rank):
        x, y = ({k: v[cut[rank]] for k, v in part.items()} for part in (X, Y))
        return keras_data(x, y), (x, y)

    for got in averaged([1, 1], own):
        assert got == {name: pytest.approx(value, rel=1e-4) for name, value in want.items()}


def keras_data(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def test_a_metric_of_unknown_state_is_weighed_and_named_once():
    class Odd(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="odd")
            self.value = self.add_weight(initializer="zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(2.0)

        def result(self):
            return self.value + 0.0

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Odd()], run_eagerly=True)

    def other(mine):
        if isinstance(mine, dict):
            return mine
        when, numbers = mine
        return when, {k: np.array([0.0, v[1]]) for k, v in numbers.items()}

    average = MetricAverageCallback()
    average._gather = lambda mine: [mine, other(mine)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = model.fit(X["a"], Y["size"], epochs=2, verbose=0, callbacks=[average]).history
    assert history["odd"] == [1.0, 1.0]
    assert sum("odd (Odd) is averaged" in str(w.message) for w in told) == 1


def test_a_loss_that_shard_cannot_scale_is_refused():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"), run_eagerly=True)
    with pytest.raises(UserError, match="mean over samples"):
        model.fit(shard(X["a"], Y["size"], global_batch=8, rank=0, size=1), verbose=0,
                  callbacks=[MetricAverageCallback()])


# --- what differs between ranks ------------------------------------------------------------------------------------

def with_another(change, epochs=1, extra=(), **fit):
    """Return a fit of rank 0 whose MetricAverageCallback hears of a rank 1 what ``change`` makes of rank 0's."""
    import hvdtrain.keras as hvd

    hvd.init()
    model = dense()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    average = MetricAverageCallback()
    average._gather = lambda mine: [mine, change(mine)]
    return model.fit(X["a"], Y["size"], batch_size=7, epochs=epochs, verbose=0, callbacks=[*extra, average],
                     **fit).history


@pytest.mark.parametrize("key, words", [("steps", "rank 1 has 2 batches, rank 0 has 3"),
                                        ("epochs", "rank 1 has 2 epochs, rank 0 has 1")])
def test_unlike_numbers_of_batches_are_told_before_they_hang(key, words):
    with pytest.raises(UserError, match=words):
        with_another(lambda mine: {**mine, key: 2} if key in mine else mine)
    assert with_another(lambda mine: {**mine, key: None} if key in mine else mine)["loss"]


def test_a_validation_on_one_rank_only_is_told():
    def trains_on(mine):
        closing = isinstance(mine, tuple) and mine[0].endswith("after the epoch")
        return ("no validation after the epoch", mine[1]) if closing else mine

    with pytest.raises(UserError, match="rank 0 is at a validation after the epoch and rank 1 at no validation"):
        with_another(trains_on, validation_data=(X["a"], Y["size"]))
    assert with_another(trains_on)["loss"]


class Adds(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs.update(note=3.0, shared=2.0, words="none")


def test_a_number_in_the_logs_of_one_rank_stays_and_is_named():
    def lacks(mine):
        if isinstance(mine, dict):
            return mine
        return mine[0], {k: v * [2, 1] for k, v in mine[1].items() if k != "note"}

    with pytest.warns(UserWarning, match="note is in the logs of rank 0 only"):
        logs = with_another(lacks, extra=[Adds()])
    assert logs["note"] == [3.0] and logs["shared"] == [3.0] and logs["words"] == ["none"]

    def has(mine):
        at_end = isinstance(mine, tuple) and mine[0] == "the end of the epoch"
        return (mine[0], {**mine[1], "theirs": np.ones(2)}) if at_end else mine

    with pytest.warns(UserWarning, match="theirs is in the logs of rank 1 only"):
        assert set(with_another(has)) == {"loss"}
