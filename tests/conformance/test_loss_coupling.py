"""A loss that is no weighted mean over samples is refused where the batch is divided, and named where it is not."""

from __future__ import annotations

import contextlib
import sys
import types
from unittest.mock import Mock

import numpy as np
import pytest
from small_runs import FEATURES, config, fitted, lockstep, solo, weights

from hvdtrain.backends.loss_coupling import LossValue, choose_rows, judge
from hvdtrain.config import DataConfig, Named, PipelineConfig
from hvdtrain.core.errors import UserError
from hvdtrain.planning.batch.sampler import BatchShares

N = 24
DRAW = np.random.default_rng(5)
X = DRAW.standard_normal((N, FEATURES)).astype(np.float32)
MASK = (DRAW.random((N, FEATURES)) < np.linspace(0.05, 0.9, N)[:, None]).astype(np.float32)
MASK[:8] = MASK[0]  # the first samples look alike
MASK[:, 0] = 1.0
CLASSES = DRAW.integers(0, 4, N)


def kind(framework, name="Kind"):
    """Return a module of a made-up model file, for its functions beside the model."""
    module = types.ModuleType(f"made_up_{framework}_{name}")
    sys.modules[module.__name__] = module
    return module


# --- the decision ----------------------------------------------------------------------------------------------------

def value_of(loss):
    return lambda numbers, training: LossValue(float(loss(np.array(numbers))), float(len(numbers)))


@pytest.mark.parametrize("loss, coupled", [
    (lambda i: np.sum(X[i] ** 2), False),
    (lambda i: np.float32(1e6) * len(i) + np.sum(X[i].astype(np.float32)), False),
    (lambda i: np.sum((1e6 + X[i, 0]).astype(np.float32), dtype=np.float32) - np.float32(1e6 * len(i)), False),
    (lambda i: np.sum(X[i]) * len(i), True),
    (lambda i: np.sum(X[i] * MASK[i]) / np.sum(MASK[i]) * len(i), True),
    (lambda i: np.sum(X[i, 0] * np.roll(X[i, 0], 1)), True),
    (lambda i: np.sum(X[i]) + 1e-3 * np.sum(X[i]) ** 2, True),
    (lambda i: np.inf, False),
], ids=["sum", "large", "cancelling", "sum for each", "mean of masked", "neighbours", "weakly", "infinite"])
def test_numerators_that_do_not_add_up(loss, coupled):
    rows = choose_rows([X, MASK])
    finding = judge(lambda numbers, training: value_of(loss)([rows[i] for i in numbers], training), len(rows))
    assert (finding is not None and not finding.unjudged) is coupled, finding
    assert (finding is not None and "not finite: hvdtrain did not check" in finding.got) is bool(np.isinf(loss([0])))


@pytest.mark.parametrize("size, words", [(1.0, "random numbers: hvdtrain"), (1e-3, "weighted mean over samples:")])
def test_a_loss_that_draws_is_judged_where_the_difference_is_large_against_its_spread(size, words):
    draw = np.random.default_rng(0)
    assert words in judge(value_of(lambda i: len(i) ** 2 * (1 + size * draw.normal()))).got
    assert judge(value_of(lambda i: np.sum(1 + size * draw.normal(size=len(i))))).unjudged


def of_rows(arrays, loss, micro_batch=8):
    rows = np.array(choose_rows(arrays, micro_batch))
    with np.errstate(all="ignore"):
        return judge(lambda numbers, training: value_of(loss)(rows[list(numbers)], training), len(rows))


SPARSE = np.zeros((N, FEATURES), np.float32)
SPARSE[::8] = 1
PAIRS_X, PAIR_CLASSES = np.random.default_rng(1).standard_normal((96, 1)), np.arange(96) // 2


def triplet(i):
    """Batch-hard triplets: 0 without two samples of one class."""
    away = np.abs(PAIRS_X[i] - PAIRS_X[i].T)
    same = PAIR_CLASSES[i][:, None] == PAIR_CLASSES[i]
    has = same.sum(1) > (away == 0).sum(1)
    return np.sum(np.where(has, np.maximum((away * same).max(1) - (away + 1e6 * same).min(1) + 1, 0), 0))


def masked_mean(i):
    return np.sum(X[i] * SPARSE[i]) / np.sum(SPARSE[i]) * len(i)


@pytest.mark.parametrize("arrays, loss", [
    ((X, SPARSE), masked_mean),
    ((X, MASK), lambda i: np.sort(X[i, 0] ** 2)[-(len(i) // 4):].mean() * len(i) if len(i) > 3 else np.nan),
    ((X, MASK), lambda i: np.sum(X[i, 0]) if len(i) > 20 else np.nan),
    ((PAIRS_X, PAIR_CLASSES), triplet),
    ((X, MASK), lambda i: np.sum(X[i[:8]] ** 2)),
    ((X, MASK), lambda i: np.sum((X[i[0::2][:len(i) // 2]] - X[i[1::2]]) ** 2))],
    ids=["rare masks", "quarter", "finite together only", "triplets", "capacity", "pairs"])
def test_couplings_that_few_samples_do_not_show(arrays, loss):
    finding = of_rows(arrays, loss)
    assert finding is not None and "not a weighted mean" in finding.got, finding


def test_sums_that_few_samples_do_not_show():
    assert of_rows((X, SPARSE), lambda i: masked_mean(i) / len(i) * SPARSE[i].sum()) is None  # NaN in some small shares
    assert of_rows((X, MASK), lambda i: np.sum(np.diff(X[i].reshape(-1, 2, FEATURES), axis=1) ** 2)) is None  # pairs
    assert "is 0: hvdtrain did not check" in of_rows((X, MASK), lambda i: 0.0).got
    assert "cannot be evaluated" in of_rows((X, MASK), lambda i: X[i].reshape(5, -1).sum()).got
    assert "out of memory" in of_rows((X, MASK), Mock(side_effect=MemoryError("of a test"))).got


def test_slow_losses_are_judged_on_seven_samples():
    counts = []
    judge(lambda numbers, training: (counts.append(len(numbers)), LossValue(1.0 * len(numbers), len(numbers)))[1], 29,
          lambda seconds: 1.0)
    assert max(counts) == 7


def test_what_layers_add_is_judged_though_the_total_draws():
    draw = np.random.default_rng(0)
    for power, coupled in ((2, True), (1, False)):
        def evaluate(numbers, training):
            added, n = 1e-3 * len(numbers) ** power, len(numbers)  # noqa: B023
            rows = (((2,), draw.normal(size=(n, 2))),)
            return LossValue(added + draw.normal() * n, float(n), added, rows=rows)
        assert ("add_loss" in judge(evaluate).got) is coupled


def test_shares_differ_whichever_samples_come_first():
    for arrays in ((X, MASK), (MASK, CLASSES), (X[:2], MASK[:2]), (X[:1],), (np.ones((9, 3)), np.zeros(9, np.int64))):
        rows = choose_rows(arrays)
        assert len(rows) == 29 and max(rows) < len(arrays[0])
    rows = choose_rows((X, MASK))
    assert MASK[rows[:2]].mean() > 1.5 * MASK[rows[4:]].mean()


# --- PyTorch ---------------------------------------------------------------------------------------------------------

def torch_model(task, model=None):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module = kind("torch")
    module.task = task

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.net = model() if model else torch.nn.Linear(FEATURES, FEATURES)

        def forward(self, x):
            return self.net(x)
    Net.__module__ = module.__name__
    return Net()


def torch_tasks():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    F = torch.nn.functional

    def of(loss):
        return lambda model, batch: (loss(model, *batch), len(batch[0]))

    def dice(model, x, y):
        p = model(x).sigmoid()
        return (1 - (2 * (y * p).sum() + 1) / (y.sum() + p.sum() + 1)) * len(x)

    def tversky(model, x, y):
        p = model(x).sigmoid()
        hit = (y * p).sum()
        return (1 - (hit + 1) / (hit + 0.3 * (p * (1 - y)).sum() + 0.7 * ((1 - p) * y).sum() + 1)) * len(x)

    def contrastive(model, x, y):
        z, w = F.normalize(model(x), dim=1), F.normalize(y, dim=1)
        return F.cross_entropy(z @ w.T, torch.arange(len(x)), reduction="sum")

    def training_only(model, x, y):
        return dice(model, x, y) if model.training else F.mse_loss(model(x), y, reduction="sum")

    def noisy(model, x, y):
        outputs = model(x)
        return F.mse_loss(outputs + torch.randn_like(outputs), y, reduction="sum")

    def penalty(model, x, y):
        x = x.clone().requires_grad_()
        slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ((slope.norm(dim=1) - 1) ** 2).sum() + (model(x) - y).square().sum()

    coupled = {
        "dice": of(dice), "tversky": of(tversky), "contrastive": of(contrastive), "only in training": of(training_only),
        "masked mean": of(lambda m, x, y: ((m(x) - 1).square() * y).sum() / y.sum() * len(x)),
        "sum": of(lambda m, x, y: F.mse_loss(m(x), y, reduction="sum") * len(x)),
        "variance": of(lambda m, x, y: F.mse_loss(m(x), y, reduction="sum") + m(x).std(0).sum() * len(x))}
    fine = {
        "mean times samples": of(lambda m, x, y: F.mse_loss(m(x), y) * len(x)),
        "masked sums": lambda m, b: (((m(b[0]) - 1).square() * b[1]).sum(), b[1].sum()),
        "dice of each": of(lambda m, x, y: (1 - (2 * (y * m(x).sigmoid()).sum(1) + 1) / (
            y.sum(1) + m(x).sigmoid().sum(1) + 1)).sum()),
        "noise": of(noisy), "functional dropout": of(lambda m, x, y: (F.dropout(m(x), 0.5, m.training) - y).square(
            ).sum()), "slope": of(penalty),
        "regularised": of(lambda m, x, y: (m(x) - y).square().sum() + len(x) * sum(p.norm() for p in m.parameters()))}
    return coupled, fine


COUPLED = ["dice", "tversky", "contrastive", "only in training", "masked mean", "sum", "variance"]
FINE = ["mean times samples", "masked sums", "dice of each", "noise", "functional dropout", "slope", "regularised"]
REFUSED = r"the loss is not a weighted mean over samples: .*\(loss_sum, weight\)"


@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_task_is_refused_where_the_batch_is_divided_and_named_elsewhere(name):
    task = torch_tasks()[0][name]
    with pytest.raises(UserError, match=REFUSED):
        solo(config(global_batch=8, accumulate=2), torch_model(task), (X, MASK))
    run = solo(config(global_batch=8, max_steps=2), torch_model(task), (X, MASK))
    assert sum("not a weighted mean over samples" in note for note in run.notes) == 1
    assert not run.recovery.shrinks and "weighted mean" in run.recovery.because
    before = weights(run)
    fitted(run)
    assert any((a != b).any() for a, b in zip(before, weights(run)))


@pytest.mark.parametrize("name", FINE)
def test_other_tasks_are_not_refused(name):
    task = torch_tasks()[1][name]
    run = solo(config(global_batch=8, max_steps=1, accumulate=2), torch_model(task), (X, MASK))
    assert sum("weighted mean" in note for note in run.notes) == (name == "noise"), run.notes
    assert not any("weighted mean" in note for note in solo(config(global_batch=8), torch_model(task), (X, MASK)).notes)


def test_every_rank_is_refused():
    task = torch_tasks()[0]["dice"]
    with pytest.raises(UserError, match=REFUSED):
        lockstep(2, config(global_batch=8), lambda rank: torch_model(task), (X, MASK), fitted)


def test_layers_that_couple_samples_are_not_blamed_on_the_loss():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    nn = torch.nn

    class Own(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if self.training else x

    class Always(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    task = torch_tasks()[1]["mean times samples"]
    for layers in ([nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)], [nn.BatchNorm1d(FEATURES, track_running_stats=False)],
                   [Own()], [Always()]):
        model = torch_model(task, lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), *layers))  # noqa: B023
        run = solo(config(global_batch=8, accumulate=2), model, (X, MASK))
        assert any("depend on the other samples" in note for note in run.notes) is isinstance(layers[0], Always)


@pytest.mark.parametrize("name", ["dice", "noise"])
def test_a_model_that_is_cut_over_ranks_is_judged_too(name):
    coupled, fine = torch_tasks()
    task = {**coupled, **fine}[name]
    nn = pytest.importorskip("torch", reason="PyTorch is not installed").nn

    def chain(rank):
        module = kind("torch", name.replace(" ", "_"))
        module.task, module.blocks = task, lambda model: list(model.named_children())
        net = type("Chain", (nn.Sequential,), {"__module__": module.__name__})
        return net(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))

    settings = config(global_batch=8, max_steps=2, pipeline=PipelineConfig(2, cut=["1"]), metrics=[])
    with contextlib.nullcontext() if name in fine else pytest.raises(UserError, match=REFUSED):
        lockstep(2, settings, chain, (X, MASK), fitted)


def test_a_batch_that_is_divided_later_is_refused_then():
    run = solo(config(global_batch=8), torch_model(torch_tasks()[0]["dice"]), (X, MASK))
    run.feed.recut(BatchShares.of([1]), 0)
    with pytest.raises(UserError, match=REFUSED):
        run.feed.recut(BatchShares.of([1], micro_batch=4), 0)


def test_out_of_memory_ends_the_run_where_smaller_micro_batches_would_change_the_loss():
    def short(model, batch):
        if len(batch[0]) >= 8:
            raise MemoryError("no room for 8")
        return torch_tasks()[0]["dice"](model, batch)

    with pytest.raises(UserError, match="out of memory in training .* would change a loss that is not a weighted mean"):
        fitted(solo(config(global_batch=8, max_steps=1), torch_model(short), (X, MASK)))


# --- Keras -----------------------------------------------------------------------------------------------------------

def keras_model(loss="mse", add=None, extra=(), regularised=None):
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

    class Adds(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x, training=False):
            if add is not None:
                self.add_loss(add(keras.ops, x, training))
            return x + keras.random.normal(keras.ops.shape(x), seed=self.seed) if add is beside_noise else x

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(
        FEATURES, "sigmoid", activity_regularizer=regularised, kernel_regularizer=regularised), *extra, Adds()])
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def ratio(y, p):
    """Return a ratio of sums over the batch, given for each sample."""
    from keras import ops

    return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1) + 0 * ops.mean(p, axis=-1)


def dice_of_each(y, p):
    from keras import ops

    return 1 - (2 * ops.sum(y * p, -1) + 1) / (ops.sum(y, -1) + ops.sum(p, -1) + 1)


def beside_noise(ops, x, training):
    """Return a sum over the batch, in a layer that returns its input with noise."""
    return ops.sum(x)


ADDED = {"sum": lambda ops, x, training: ops.sum(x), "small sum": lambda ops, x, training: 1e-7 * ops.sum(x * x),
         "sum beside noise": beside_noise,
         "only in training": lambda ops, x, training: ops.sum(x) * float(bool(training)),
         "deviation": lambda ops, x, training: ops.mean(ops.std(x, axis=0))}


@pytest.mark.parametrize("name", ADDED)
def test_what_layers_add_over_the_batch_is_refused(name):
    import keras

    extra = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)] if name == "only in training" else []
    with pytest.raises(UserError, match=r"add_loss\) are not means over.*keras.ops.mean.*product of means.*task"):
        solo(config(global_batch=8, accumulate=2, metrics=[]), keras_model(add=ADDED[name], extra=extra), (X, MASK))
    if name == "sum":
        run = solo(config(global_batch=8, max_steps=1, metrics=[]), keras_model(add=ADDED[name]), (X, MASK))
        assert sum("add_loss" in note for note in run.notes) == 1
        fitted(run)


def test_a_compiled_loss_over_the_batch_is_refused_whatever_it_returns():
    with pytest.raises(UserError, match=REFUSED):
        solo(config(global_batch=8, accumulate=2, metrics=[]), keras_model(ratio), (X, MASK))


def one_number(y, p):
    from keras import ops

    return ops.mean(ops.square(y - p))


@pytest.mark.parametrize("way", ["Dice", "Tversky", "by name"])
def test_one_number_for_the_batch_is_refused_where_the_batch_is_divided_and_trains_elsewhere(way):
    import keras

    def made():
        return keras_model("mse" if way == "by name" else getattr(keras.losses, way)())

    settings = {"global_batch": 8, "metrics": [], "max_steps": 2, "data": DataConfig(shuffle=False, prefetch=0),
                **({"loss": Named("Dice")} if way == "by name" else {})}
    with pytest.raises(UserError, match=REFUSED):
        solo(config(**settings, accumulate=2), made(), (X, MASK))
    if way == "Dice":  # of one way with the next
        return
    run, plain = solo(config(**settings), made(), (X, MASK)), made()
    plain.compile("sgd", keras.losses.Dice() if way == "by name" else plain.loss)
    plain.optimizer.learning_rate = 0.1
    assert sum("not a weighted mean over samples" in note for note in run.notes) == 1
    plain.fit(X[:16], MASK[:16], batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(fitted(run).spec.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_one_number_that_is_a_mean_is_exact_on_several_ranks_and_refused_with_weights():
    settings = config(global_batch=8, metrics=[], max_steps=2, shares=[3, 1])
    runs = (lockstep(2, settings, lambda rank: keras_model(one_number), (X, MASK), fitted)[0],
            fitted(solo(settings, keras_model("mse"), (X, MASK))))
    for a, b in zip(*map(weights, runs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="one number for the whole batch"):
        solo(config(global_batch=8, metrics=[]), keras_model(one_number), (X, MASK, np.ones(N, np.float32)))


def test_other_losses_of_keras_are_not_refused():
    import keras

    extra = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)]
    model = keras_model(dice_of_each, lambda ops, x, training: ops.mean(x), extra, "l2")
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]
    run = solo(config(global_batch=8, accumulate=2, metrics=[], max_steps=1), model, (X, MASK))
    assert not any("mean over" in note for note in run.notes)
    assert all((a == b).all() for a, b in zip(before, map(keras.ops.convert_to_numpy, model.variables)))
    assert not any("call" in vars(layer) for layer in model._flatten_layers())
    fitted(run)
