"""The TensorFlow step's parts: statistics of several types, optimizers with an owner, losses, metrics."""

from dataclasses import replace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from tensorflow_tools import SGD, X, Y, attached, batch, close, cut, mlp, run, spec, weights  # noqa: E402

from hvdtrain.backends.keras.metrics import SHAPES  # noqa: E402
from hvdtrain.backends.tensorflow import make_parts  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.config import Config, Named, ScheduleConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.mesh import world  # noqa: E402
from hvdtrain.engine.compare_ranks import check_alike  # noqa: E402

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(optimizer="sgd", loss=LOGITS, seed=3, **parts):
    model = mlp(seed)
    model.compile(optimizer, loss, **parts)
    return model


# --- buffers -------------------------------------------------------------------------------------------------------

class Counted(keras.layers.Layer):
    """Holds what ranks change on their own: a count of calls, a narrow float, and a double one; and a constant mask."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.narrow = self.add_weight(shape=(), dtype="bfloat16", initializer="zeros", trainable=False)
        self.double = self.add_weight(shape=(), dtype="float64", initializer="zeros", trainable=False)
        self.mask = self.add_weight(shape=(2,), initializer=lambda *a, **k: tf.constant([0, -np.inf]), trainable=False)

    def call(self, x):
        return x


@pytest.mark.parametrize("sizes", [(0, 8, 24), (5, 0, 11)], ids=str)
def test_statistics_are_averaged_by_the_samples_seen(sizes):
    """A rank without a sample counts for nothing; what is no statistic comes from the lowest rank that ran."""
    models = [mlp(extra=[keras.layers.BatchNormalization(), Counted()]) for _ in sizes]

    def one_rank(control, wire):
        rank, model = control.rank, models[control.rank]
        step = attached(model, wire=wire, rank=rank)
        for part in cut(batch(0), sizes[rank] // 2, sizes[rank] - sizes[rank] // 2):
            step.forward_backward(part, 1 / 32, False)
        model.layers[1].moving_mean.assign(np.full(16, rank + 1.0 if sizes[rank] else np.nan))
        model.layers[2].calls.assign(rank + 5)
        model.layers[2].narrow.assign(rank * 8.0)
        model.layers[2].double.assign(rank + 1e-9)
        step.sync_buffers()
        first = [v.numpy() for v in (*model.layers[1].weights, *model.layers[2].weights)]
        model.layers[1].moving_mean.assign(np.full(16, float(rank)))
        step.sync_buffers()  # nobody saw a sample since
        np.testing.assert_array_equal(model.layers[1].moving_mean.numpy(), np.full(16, float(rank)))
        return first

    results = LockstepWorld(len(sizes)).run(one_rank)
    share = np.array(sizes) / sum(sizes)
    ranks = np.arange(len(sizes))
    for got in results:
        np.testing.assert_allclose(got[2], np.full(16, float(share @ (ranks + 1))), rtol=1e-6)
        first = next(r for r in ranks if sizes[r])
        assert int(got[4]) == first + 5 and float(got[5]) == first * 8 and float(got[6]) == first + 1e-9
        np.testing.assert_array_equal(got[7], [0, -np.inf])
        for a, b in zip(got, results[0]):
            np.testing.assert_array_equal(a, b)


# --- optimizer -----------------------------------------------------------------------------------------------------

def test_an_optimizer_with_history_on_rank_0_only_is_shared():
    models = [compiled(keras.optimizers.Adam(0.05 / (1 + rank)), seed=3 + rank) for rank in range(2)]
    models[0].fit(X, Y, epochs=2, verbose=0)

    def one_rank(control, wire):
        step = attached(models[control.rank], Config(), wire=wire, rank=control.rank)
        moved = [v.numpy() for v in step.optimizer.own.variables]
        for t in range(3):
            run(step, cut(tuple(a[16 * control.rank:] for a in batch(t)), 16), 1 / 32)
        return moved, weights(step), step.learning_rate(), step.state()[1]

    (first, w0, rate0, rest0), (second, w1, rate1, rest1) = LockstepWorld(2).run(one_rank)
    assert int(first[0]) == int(second[0]) == 4 and rate0 == rate1 == pytest.approx(0.05)
    assert any(np.abs(v).max() > 0 for v in first[2:])  # the history was not lost
    close(second, first, 0)
    close(w1, w0, 0)
    assert rest0 == rest1


def test_ranks_with_other_schedules_are_refused():
    rates = [0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)]
    models = [compiled(keras.optimizers.SGD(rate)) for rate in rates]

    def one_rank(control, wire):
        made_of = make_parts(spec(models[control.rank]), Config(), control, wire, 10).params.made_of()
        with pytest.raises(UserError, match="rank 1 has optimizer SGD ExponentialDecay .* where rank 0 has optimizer"):
            check_alike(control, world(2, control.rank), made_of)

    LockstepWorld(2).run(one_rank)


def test_linear_scaling_starts_from_the_owners_rate_every_time():
    model = compiled(keras.optimizers.SGD(0.1))
    scaled = Config(global_batch=32, schedule=ScheduleConfig(linear_scaling_base=8))
    for _ in range(3):
        assert attached(model, scaled).learning_rate() == pytest.approx(0.4)
    model.optimizer.learning_rate = 0.2
    assert attached(model, scaled).learning_rate() == pytest.approx(0.8)
    assert attached(model, Config()).learning_rate() == pytest.approx(0.2)


@pytest.mark.parametrize("rate", [0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 1, 1.0)], ids=["plain", "own"])
def test_warm_up_does_not_nest(rate):
    model = compiled(keras.optimizers.SGD(rate))
    warm = Config(global_batch=32, schedule=ScheduleConfig(warmup_steps=4, linear_scaling_base=16))
    for _ in range(3):
        step = attached(model, warm)
        assert step.learning_rate() == pytest.approx(0.2 / 4)
    run(step, [batch(0)], 1 / 32)
    assert attached(model, warm).learning_rate() == pytest.approx(0.2 / 2)
    assert attached(model, Config()).learning_rate() == pytest.approx(0.1)
    run(attached(model, Config()), [batch(1)], 1 / 32)


def test_a_configured_schedule_twice_on_one_optimizer():
    model = compiled(keras.optimizers.SGD(0.1))
    config = Config(schedule=ScheduleConfig("exponentialdecay", {"decay_steps": 1, "decay_rate": 0.5}))
    for _ in range(2):
        assert attached(model, config).learning_rate() == pytest.approx(0.1)


def test_schedules_by_epoch_are_refused():
    schedule = ScheduleConfig("ExponentialDecay", {"decay_steps": 1, "decay_rate": 0.5}, "epoch")
    with pytest.raises(UserError, match="counts steps; expected step. Set .*steps per epoch"):
        attached(mlp(), Config(schedule=schedule))
    attached(mlp(), Config(schedule=ScheduleConfig(interval="epoch")))  # no schedule: no matter


@pytest.mark.parametrize("schedule",
                         [ScheduleConfig(), ScheduleConfig(warmup_steps=1), ScheduleConfig(linear_scaling_base=32),
                                      ScheduleConfig("ExponentialDecay", {"decay_steps": 1, "decay_rate": 1.0})],
                         ids=["plain", "warm-up", "scaled", "schedule"])
def test_a_new_rate_takes_effect_on_resume(schedule):
    def made(lr):
        return attached(mlp(), Config(optimizer=Named("SGD"), lr=lr, global_batch=64, schedule=schedule))

    old, again, new = made(0.05), made(0.05), made(0.5)
    factor = 2 if schedule.linear_scaling_base else 1
    run(old, [batch(0)], 1 / 32)
    groups, rest = old.state()
    again.load(groups, rest)
    assert again.learning_rate() == old.learning_rate()
    new.load(groups, rest)
    assert new.learning_rate() == pytest.approx(0.5 * factor)
    legacy = made(0.5)
    legacy.load(groups, {"optimizer": rest["optimizer"]})
    assert legacy.learning_rate() == pytest.approx(0.05 if schedule == ScheduleConfig() else
                                                   0.1 if factor == 2 else 0.5)


# --- loss ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("loss", [LOGITS, [LOGITS]], ids=["loss", "list"])
def test_loss_weights_of_compile_count(loss):
    given = [0.1] if isinstance(loss, list) else 0.1
    plain, model = (compiled(keras.optimizers.SGD(0.5), loss, loss_weights=given) for _ in range(2))
    plain.train_on_batch(*batch(0))
    step = attached(model, Config())
    run(step, [batch(0)], 1 / 32)
    close(weights(step), weights(plain), 1e-5)


def test_a_model_with_a_loss_of_its_own_is_refused_without_a_task():
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(y_pred)

    class Steps(keras.Sequential):
        def train_step(self, data):
            return {}

    def task(model, b):
        return tf.reduce_sum(model(b[0])), tf.shape(b[0])[0]

    for kind, said in ((Own, "compute_loss"), (Steps, "train_step")):
        model = kind([keras.Input((12,)), keras.layers.Dense(5)])
        with pytest.raises(UserError, match=rf"overrides {said}\(\).*task"):
            attached(model)
        attached(model, task=task)


def test_doubles_stay_doubles():
    layers = [keras.Input((12,), dtype="float64"), keras.layers.Dense(5, dtype="float64")]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(layers)
    step = attached(model, replace(SGD, loss=Named("mse")))
    x, y = X.astype(np.float64), RNG_TARGETS
    want = float(np.mean((model(x).numpy() - y) ** 2, axis=1).sum())
    step.zero()
    loss, weight = step.forward_backward((x, y), 1 / 3, True)
    assert (float(loss), float(weight)) == (pytest.approx(want, rel=1e-13), 64)
    step.exchange()
    gradient = step.grads[0].numpy()
    exact = x.T @ (2 / 5 * (model(x).numpy() - y)) / 3
    np.testing.assert_allclose(gradient, exact, rtol=1e-12, atol=1e-13)


RNG_TARGETS = np.random.default_rng(4).standard_normal((64, 5))


def test_float16_without_loss_scaling_is_said():
    layers = [keras.layers.Dense(4, dtype="mixed_float16")]
    assert any("float16" in line for line in attached(mlp(extra=layers)).caveats())


# --- metrics -------------------------------------------------------------------------------------------------------

def test_a_rank_without_a_sample_computes_the_same_metrics():
    names = ["F1Score", "R2Score", "OneHotIoU2", "accuracy", "AUC", "Precision", "mse"]

    def build():
        own = {"OneHotIoU2": keras.metrics.OneHotMeanIoU(5, name="OneHotIoU2"), "F1Score": keras.metrics.F1Score(),
               "R2Score": keras.metrics.R2Score(), "AUC": keras.metrics.AUC(multi_label=True, num_labels=5)}
        model = mlp(activation="softmax")
        model.compile("sgd", "categorical_crossentropy", metrics=[own.get(n, n) for n in names])
        return attached(model, replace(SGD, metrics=["TopKCategoricalAccuracy"]))

    y = np.eye(5, dtype=np.float32)[Y]
    saw, none = build(), build()
    saw.evaluate((X[:7], y[:7]))
    everyone = [saw.eval_totals(), none.eval_totals()]
    assert everyone[1] == {} and SHAPES in everyone[0]
    summed = everyone[0]
    got = none.eval_results(summed)
    assert str(got) == str(saw.eval_results(summed)) and SHAPES not in got
    assert len(got) == len(names) + 2
    twice = {name: 2 * total_k for name, total_k in summed.items()}  # as from two ranks with the same samples
    assert build().eval_results(twice)["accuracy"] == got["accuracy"]
    none.evaluate((X, y))
    assert str(none.eval_results(none.eval_totals())) == str(_whole(saw, y))


def _whole(step, y):
    step.evaluate((X, y))
    return step.eval_results(step.eval_totals())
