"""Law 1: gradients are summed, never averaged; the loss is divided once by the global weight.

Every case compares the gradient that a step applied on ranks with the gradient of the same samples in one process,
which is written out here without hvdtrain's loop.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from small_runs import (
    CLASSES,
    CUTS,
    FEATURES,
    FRAMEWORKS,
    HIDDEN,
    SLOW_TENSORFLOW,
    apart,
    config,
    gradient,
    lockstep,
    make_model,
    samples,
    weights,
)

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.weighting import check_weight, loss_scale
from hvdtrain.engine import loop
from hvdtrain.planning.batch.sampler import epoch_order

BATCH, N = 7, 16
"""Steps of 7, 7 and 2 samples: the last is shorter than a world of 3 or 4."""
FIRST, LAST = Cursor(), Cursor(0, 2, 2, 14)
EXACT = 2.0 ** 10
"""A rate that loses no bit of an fp32 gradient to the weight it is taken from; see `small_runs.gradient`."""
ALL_CUTS = [(size, shares) for size, cuts in CUTS.items() for shares in cuts]


def batch_at(cursor):
    """Return the global batch, from (seed, t) alone."""
    x, y = samples(N)
    indices = epoch_order(N, 0, 0, True)[cursor.samples:cursor.samples + BATCH]
    return x[indices], y[indices]


def numpy_gradient(cursor):
    """Mean gradient over the batch, in float64."""
    model = make_model("numpy")
    x, y = batch_at(cursor)
    grads = model.gradient(x, y)[1]
    return [grads[name] / len(y) for name in sorted(model.params)]


@pytest.mark.parametrize("cursor", [FIRST, LAST], ids=["whole", "short"])
@pytest.mark.parametrize("micro", [(1, 0), (3, 0), (1, 2)], ids=["whole", "accumulate3", "at-most-2"])
@pytest.mark.parametrize("size, shares", ALL_CUTS, ids=str)
def test_the_sum_over_ranks_is_the_gradient_of_the_batch(size, shares, micro, cursor):
    """With shares, each rank has its own number of micro-batches, and a rank without samples has none."""
    settings = config(global_batch=BATCH, shares=shares, accumulate=micro[0], micro_batch=micro[1], lr=1.0)
    results = lockstep(size, settings, lambda rank: make_model("numpy"), samples(N), lambda run: gradient(run, cursor))
    for got in results:
        assert apart(got, numpy_gradient(cursor)) < 1e-12


def framework_gradient(framework, cursor):
    """Mean gradient over the batch by the framework's own mean loss, in the order of `small_runs.weights`."""
    model = make_model(framework)
    x, y = batch_at(cursor)
    if framework == "torch":
        import torch

        torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        return [p.grad.numpy() for _, p in sorted(model.named_parameters())]
    import keras
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
    return [g.numpy() for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]


@pytest.mark.slow
@pytest.mark.parametrize("size, shares, accumulate", [(2, [3, 1], 1), (3, [5, 0, 2], 2), (4, [1, 2, 4, 0], 2)], ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_frameworks_sum_too(framework, size, shares, accumulate):
    make_model(framework)
    settings = config(global_batch=BATCH, shares=shares, accumulate=accumulate, lr=EXACT)

    def work(run):
        return gradient(run, FIRST) if size < 4 else gradient(run, LAST)

    want = framework_gradient(framework, FIRST if size < 4 else LAST)
    for got in lockstep(size, settings, lambda rank: make_model(framework), samples(N), work):
        for one, other in zip(got, want):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def gpt(framework):
    """Return a decoder of one block over 11 tokens: its file counts valid tokens."""
    shape = {"vocab": 11, "context": 6, "width": 8, "depth": 1, "heads": 2}
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        import torch_models.gpt

        torch.manual_seed(0)
        return torch_models.gpt.build(**shape)
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    import tf_models.gpt

    keras.utils.set_random_seed(0)
    return tf_models.gpt.build(**shape)


def tokens(n):
    """x and y (n, 6); sample i has i % 7 valid targets: a rank's share of tokens is not its share of samples."""
    draw = np.random.default_rng(3)
    x, y = draw.integers(0, 11, (n, 6)), draw.integers(0, 11, (n, 6))
    for i in range(n):
        y[i, i % 7:] = -1
    return x, y


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_the_weight_is_valid_tokens_where_the_model_says_so(framework):
    """Compare one rank's gradient over all tokens with three ranks of different shares."""
    settings = config(global_batch=13, lr=EXACT, metrics=[])
    (want,) = lockstep(1, settings, lambda rank: gpt(framework), tokens(13), gradient)
    rows = tokens(13)[1]
    assert (rows >= 0).sum() not in (rows.size, len(rows))
    cut = replace(settings, shares=[4, 0, 1])
    for got in lockstep(3, cut, lambda rank: gpt(framework), tokens(13), gradient):
        for one, other in zip(got, want):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    if framework == "torch":
        import torch

        model = gpt(framework)
        x, y = (torch.from_numpy(part) for part in tokens(13))
        torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1).backward()
        for one, (_, param) in zip(want, sorted(model.named_parameters())):
            np.testing.assert_allclose(one, param.grad.numpy(), rtol=1e-5, atol=1e-6)


@contextmanager
def averaging(run):
    """Return the mutation: each rank divides by its own samples, and the ranks' means are averaged."""
    epoch = run.feed.epoch
    run.feed.epoch = lambda cursor: (replace(b, weight=float(b.n_local * run.control.size)) for b in epoch(cursor))
    yield
    run.feed.epoch = epoch


@pytest.mark.parametrize("size, shares, equal", [(2, [4, 3], False), (3, [5, 1, 1], False), (2, [1, 1], False),
                                                 (7, [], True)], ids=str)
def test_averaging_would_be_seen(size, shares, equal, monkeypatch):
    """The check fails for plain averaging wherever ranks differ, and only there: 7 samples on 7 ranks are equal."""
    monkeypatch.setattr(loop, "check_weight", lambda counted, weight: None)  # which would refuse the mutation

    def work(run):
        with averaging(run):
            return gradient(run, FIRST)

    settings = config(global_batch=BATCH, shares=shares, lr=1.0)
    for got in lockstep(size, settings, lambda rank: make_model("numpy"), samples(N), work):
        assert (apart(got, numpy_gradient(FIRST)) < 1e-12) is equal


def test_a_task_that_counts_otherwise_is_refused():
    check_weight(128.0, 128.0)
    check_weight(0.0, 0.0)
    check_weight(1e6 + 1, 1e6)  # rounding of a float32 count
    for counted, weight in ((640.0, 64.0), (0.0, 8.0), (8.0, 0.0)):
        with pytest.raises(UserError, match=r"task counted a weight of"):
            check_weight(counted, weight)


def test_the_scale_is_one_over_the_weight():
    assert loss_scale(8.0) == 0.125
    assert loss_scale(0.0) == 0.0
    for weight in (float("nan"), float("inf"), -1.0):
        with pytest.raises(UserError, match="global weight"):
            loss_scale(weight)


def test_a_batch_of_no_weight_changes_nothing():
    """Every token of the batch is masked: the gradient is zero, not NaN."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    x, y = tokens(4)

    def work(run):
        before = weights(run)
        gradient(run)
        return apart(weights(run), before)

    masked = x, np.full_like(y, -1)
    assert lockstep(2, config(global_batch=4, metrics=[]), lambda rank: gpt("torch"), masked, work) == [0, 0]


def test_the_tiny_model_is_what_the_reference_says():
    model = make_model("numpy")
    assert {n: p.shape for n, p in model.params.items()} == {
        "w0": (FEATURES, HIDDEN), "b0": (HIDDEN,), "w1": (HIDDEN, CLASSES), "b1": (CLASSES,)}
    x, y = samples(3)
    loss, grads = model.gradient(x, y)
    step = 1e-6
    for name, index in (("w0", (2, 3)), ("b1", (4,))):
        model.params[name][index] += step
        assert (model.gradient(x, y)[0] - loss) / step == pytest.approx(grads[name][index], rel=1e-3, abs=1e-5)
        model.params[name][index] -= step
