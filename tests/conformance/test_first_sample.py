"""A model that does not fit its data is told so before the first step, and the try leaves nothing behind."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from first_sample_tools import Chunks, X, Y, alone, calling, need, same
from small_runs import CLASSES, FEATURES, FRAMEWORKS, Record, config, fitted, lockstep, samples, weights

from hvdtrain.cluster.control import SoloControl
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.core.errors import UserError
from hvdtrain.engine import assemble as assembling
from hvdtrain.engine import first_sample
from hvdtrain.engine.assemble import assemble

IMAGES = np.random.default_rng(1).random((30, 8, 8), dtype=np.float32)
TOKENS = np.random.default_rng(2).integers(0, 20, (30, 6))


def dense(framework, n_in=FEATURES, n_out=CLASSES):
    if framework == "torch":
        return need("torch").nn.Linear(n_in, n_out)
    keras = need("tensorflow")
    return keras.Sequential([keras.Input((n_in,)), keras.layers.Dense(n_out)])


def embedding(framework, size=10):
    if framework == "torch":
        nn = need("torch").nn
        return nn.Sequential(nn.Embedding(size, 4), nn.Flatten(), nn.Linear(24, 20))
    keras = need("tensorflow")
    return keras.Sequential([keras.Input((6,), dtype="int32"), keras.layers.Embedding(size, 4), keras.layers.Flatten(),
                             keras.layers.Dense(20)])


# --- what does not fit -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("build, data, words", [
    (dense, (IMAGES, Y), [r"the model does not take the data, x float32\[B, 8, 8\], y int64\[B\]", "12", "reshape"]),
    (embedding, (TOKENS, Y), ["x int64", "of 0 to 19", "out of range|is not in", "number tokens"]),
    (dense, (X, np.where(np.arange(30) == 17, CLASSES, Y)), ["targets run from 0 to 5", r"expected 0\.\.4"]),
    (dense, (X, np.where(np.arange(30) == 17, -2, Y)), ["targets run from -2 to 4", r"expected 0\.\.4"]),
    (dense, (X, X[:, :3]), [r"\[?\(?(B|2), 5", "expected equal shapes"]),
    (dense, ((X, Y), (X[:, :7], Y)), [r"x float32\[B, 7\]"]),
], ids=["shape", "tokens", "class", "negative", "width", "test data"])
def test_what_does_not_fit_is_told_in_words(framework, build, data, words):
    with pytest.raises(UserError) as error:
        alone(build(framework), data)
    for word in words:
        assert re.search(f"(?i){word}", str(error.value)), word


def test_the_wrong_type_is_told_with_what_to_do():
    for x, word in ((X.astype(np.uint8), "float32 for images"), (X.astype(np.int32), "float32 for images")):
        with pytest.raises(UserError, match=word):
            alone(dense("torch"), (x, Y))
    with pytest.raises(UserError, match="as integers"):
        alone(embedding("torch"), (TOKENS.astype(np.float32), Y))


def broken(self, x):
    """Return a bug, no misfit."""
    return self.layer(x) + missing  # noqa: F821


def alarm(self, x):
    raise RuntimeError("my own alarm")


def shapes_told(self, x):
    if x.shape[-1] != 7:
        raise ValueError("I want 7 columns")
    return self.layer(x)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_bug_keeps_its_traceback_and_a_models_own_words_are_said(framework):
    with pytest.raises(NameError):
        alone(calling(framework, broken), (X, Y))
    with pytest.raises(RuntimeError, match="my own alarm"):
        alone(calling(framework, alarm), (X, Y))
    with pytest.raises(UserError, match=r"I want 7 columns \(in Model.*, .*test_first_sample.py:\d+\)") as error:
        alone(calling(framework, shapes_told), (X, Y))
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize("size, n, where, settings", [
    (2, 32, "rank 0 in each step", {"global_batch": 2}),
    (2, 32, "rank 0 in each step", {"global_batch": 4, "accumulate": 2}),
    (2, 32, "rank 0 in each step", {"global_batch": 6, "micro_batch": 2}),
    (2, 34, "rank 0 in the last step of an epoch", {"global_batch": 8}),
    (3, 32, "rank 1 in each step", {"global_batch": 8, "shares": [6, 1, 1]}),
    (2, 33, "rank 0 in the last step of an epoch", {"global_batch": 8}),
    (1, 32, "rank 0 in each step", {"global_batch": 1})])
def test_batchnorm_with_one_sample_is_refused_before_the_first_step(size, n, where, settings):
    nn = need("torch").nn
    data, settings = samples(n), {"epochs": 1, "eval_every": 0, **settings}

    def model(rank=0):
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))

    synchronized = size > 1 and n != 33
    with pytest.raises(UserError, match=f"a micro-batch of 1 sample on {where} with BatchNorm") as error:
        lockstep(size, config(**settings), model, data, lambda run: None)
    assert ("sync_batchnorm: true" in str(error.value)) == synchronized
    if synchronized:
        assert lockstep(size, config(sync_batchnorm=True, **settings), model, data, fitted)[0].state.cursor.epoch == 1
    else:
        with pytest.raises(UserError, match="a micro-batch of 1 sample") as error:
            lockstep(size, config(sync_batchnorm=True, **settings), model, data, lambda run: None)
        assert "set sync_batchnorm" not in str(error.value)
    if "last" in where:
        lockstep(size, config(**{**settings, "max_steps": 2}), model, data, fitted)


def test_a_gradient_taken_in_evaluation_is_named_as_the_cause():
    torch = need("torch")

    def call(self, x):
        x = x.requires_grad_() if torch.is_grad_enabled() else x
        return self.layer(x + torch.autograd.grad(self.layer(x).square().sum(), x)[0])

    def enabled(self, x):
        with torch.enable_grad():
            return call(self, x)

    with pytest.raises(UserError, match=r"computes a gradient in an evaluation.*does not require grad.*"
                                        r"test_first_sample.*torch.enable_grad\(\)") as error:
        alone(calling("torch", call), ((X, Y), (X, Y)))
    assert "reshape" not in str(error.value)
    fitted(alone(calling("torch", enabled), ((X, Y), (X, Y))))
    with pytest.raises(UserError, match=r"does not require grad.*requires_grad_\(\)"):
        alone(calling("torch", lambda self, x: torch.autograd.grad(self.layer(x).sum(), x)[0]), (X, Y))


def test_every_rank_is_told_also_one_without_samples():
    def rank(run):
        raise AssertionError("assembled")

    built = {0: dense("torch"), 1: dense("torch")}
    with pytest.raises(UserError, match="targets run from 0 to 5"):
        lockstep(2, config(global_batch=10, shares=[1, 0]), built.get, (X, np.where(Y == 4, 5, Y)), rank)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_model_for_one_number_of_samples_trains(framework):
    def forward(self, x):
        if x.shape[0] != 5:
            raise ValueError(f"{x.shape[0]} samples")
        return self.layer(x)

    if framework == "torch":
        fitted(alone(calling("torch", forward), (X, Y), accumulate=2))
    else:  # a graph leaves the number open
        keras = need("tensorflow")
        model = keras.Sequential([keras.Input(batch_shape=(5, FEATURES)), keras.layers.Dense(CLASSES)])
        alone(model, (X, Y), accumulate=2)


@pytest.mark.parametrize("refusal", [ValueError, ZeroDivisionError])
def test_a_rank_without_samples_tries_what_another_will_train_on(refusal):
    torch = need("torch")

    def forward(self, x):
        if x.shape[0] not in (0, 10):
            raise refusal(f"{x.shape[0]} samples")
        return self.layer(x)

    models = [calling("torch", forward) for _ in range(2)]
    lockstep(2, config(global_batch=10, max_steps=2, shares=[1, 0]), models.__getitem__, (X, Y), fitted)
    assert torch.equal(models[0].layer.weight, models[1].layer.weight)


# --- nothing is left behind ------------------------------------------------------------------------------------------

def drawing(framework):
    """BatchNorm and dropout, the same at each call."""
    if framework == "torch":
        torch = need("torch")
        torch.manual_seed(3)
        nn = torch.nn
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES))
    keras = need("tensorflow")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(16), keras.layers.BatchNormalization(),
                              keras.layers.Dropout(0.3), keras.layers.Dense(CLASSES)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Noisy:
    """A source that draws from numpy's generator when it is read, and counts how often that is."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return len(X)

    def fetch(self, indices_n):
        self.reads += 1
        return X[indices_n] + np.random.standard_normal((len(indices_n), FEATURES)).astype(np.float32), Y[indices_n]


def curve(framework, data, monkeypatch, tried):
    record = Record()
    with monkeypatch.context() as patch:
        if not tried:
            patch.setattr(first_sample, "check", lambda run, backend: None)
        assert assembling.first_sample is first_sample
        run = assemble(config(global_batch=10, epochs=2, max_steps=5), drawing(framework), data, SoloControl(),
                       NullCollectives(0, 1), more=lambda run: [record])
        at_start = (random.getstate(), weights(run), list(run.rank_state().values()))
        fitted(run)
    return record.losses, at_start, weights(run), dict(run.state.metrics), np.random.random(), random.random()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", [lambda: ((X, Y), (X[:8], Y[:8])), Noisy, Chunks], ids=["arrays", "source", "stream"])
def test_the_curve_has_the_same_bits_with_and_without(framework, kind, monkeypatch):
    data = [kind(), kind()]
    with_it, without = (curve(framework, d, monkeypatch, tried) for d, tried in zip(data, (True, False)))
    assert len(with_it[0]) == 5
    if kind is Chunks:  # what the stream draws for its first batch is drawn sooner
        with_it, without = (found[:1] + found[2:] for found in (with_it, without))
    for one, other in zip(with_it, without):
        assert same(one, other)
    assert getattr(data[0], "reads", 0) == getattr(data[1], "reads", 0)
    assert getattr(data[0], "opened", 0) == getattr(data[1], "opened", 0)


def remembering(framework):
    """Return a model that keeps something of its last forward: in a buffer that it replaces, in an RNN's state."""
    if framework == "torch":
        torch = need("torch")

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(FEATURES, CLASSES)
                self.register_buffer("mean", torch.zeros(1))

            def forward(self, x):
                self.mean = 0.9 * self.mean + x.detach().mean()
                return self.layer(x) + self.mean
        model = Model()
        return model, lambda: model.mean.numpy()
    keras = need("tensorflow")
    rnn = keras.layers.GRU(4, stateful=True)
    model = keras.Sequential([keras.Input((FEATURES, 1), batch_size=10), rnn, keras.layers.Dense(CLASSES)])
    return model, lambda: np.concatenate([keras.ops.convert_to_numpy(state) for state in rnn.states])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_model_keeps_of_its_last_forward_is_put_back(framework):
    model, kept = remembering(framework)
    run = alone(model, (X[..., None] if framework == "tensorflow" else X, Y))
    assert not kept().any()
    fitted(run)
    assert kept().any()


def test_no_graph_of_training_is_traced_once_more():
    need("tensorflow")
    traced = []

    def forward(self, x):
        import tensorflow as tf

        if not tf.executing_eagerly():
            traced.append(tf.compat.v1.get_default_graph().name)
        return self.layer(x)

    run = alone(calling("tensorflow", forward), ((X, Y), (X, Y)))
    assert not traced
    fitted(run)
    assert len(traced) == 2, "one for training, one for evaluation"


# --- which samples ---------------------------------------------------------------------------------------------------

def test_rows_at_the_ends_of_the_numbers():
    y = np.array([3, -100, 7, 255, 0, -100, 254])
    assert list(first_sample.extremes(y)) == [3, 1, 6, 4]
    assert list(first_sample.extremes(np.zeros((4, 2), np.int64))) == [0, 0]
    assert list(first_sample.extremes(np.array([[1, 2], [9, 4], [5, 0]]))) == [1, 2, 2, 0]


def test_a_file_is_not_searched(tmp_path):
    np.save(tmp_path / "y.npy", np.arange(9))
    assert not list(first_sample.extremes(np.asarray(np.load(tmp_path / "y.npy", mmap_mode="r"))[2:]))
