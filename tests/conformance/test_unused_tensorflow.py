"""Parameters without a gradient in TensorFlow stay as they are, as in plain Keras, and so does their state."""

import math

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
import unused_keras  # noqa: E402
from one_step import TwoRanksInOne, batch, cut  # noqa: E402
from small_runs import config, fitted, lockstep, solo  # noqa: E402
from tensorflow_tools import attached, close  # noqa: E402
from unused_keras import SOMETIMES, Heads, chain  # noqa: E402

from hvdtrain.config import Config, DataConfig, DataParallelConfig, Named, PipelineConfig  # noqa: E402

DECAY = {"weight_decay": 0.3}
STEPS = [[32], [SOMETIMES], [32], [SOMETIMES, 12], [12, SOMETIMES], [8, 8]]
"""The samples of each micro-batch, by step."""
OPTIMIZERS = {
    "adamw": {**DECAY, "learning_rate": 0.05},
    "sgd": {**DECAY, "learning_rate": 0.05, "momentum": 0.9},
    "rmsprop": {**DECAY, "learning_rate": 0.05, "use_ema": True, "ema_momentum": 0.8, "global_clipnorm": 0.1},
}


def data(t, n):
    x, _ = batch(t, n)
    return x, x[:, :4] * 2 + 1


def plain(name, steps, data, made=Heads):
    """Train in plain Keras for ``steps`` over batches ``data(t, n)``: (weights, the optimizer's variables)."""
    model = made()
    own = keras.optimizers.get({"class_name": name, "config": OPTIMIZERS[name]})
    own.build(model.trainable_variables)
    for t, sizes in enumerate(steps):
        x, y = data(t, sum(sizes))
        ends = np.cumsum([0, *sizes])
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(tf.reduce_mean(tf.square(model(x[i:j]) - y[i:j]), 1))
                       for i, j in zip(ends, ends[1:])) / sum(sizes)
        own.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return [v.numpy() for v in model.weights], [v.numpy() for v in own.variables]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name, way", [
    ("adamw", "fused"), ("adamw", "buckets"), ("sgd", "by itself"), ("rmsprop", "fused"), ("rmsprop", "buckets")])
def test_it_is_what_plain_keras_makes_of_it(name, way):
    want, state = plain(name, STEPS, data)
    config = Config(optimizer=Named(name, OPTIMIZERS[name]), loss=Named("mse"))
    step = attached(Heads(), config, wire=TwoRanksInOne() if way == "buckets" else None)
    first = [v.numpy() for v in step.model.weights]
    for t, sizes in enumerate(STEPS):
        micros, scale = cut(data(t, sum(sizes)), *sizes), 1 / sum(sizes)
        if way == "fused":
            step.run(micros, scale)
        else:
            step.zero()
            for i, micro in enumerate(micros):
                step.forward_backward(micro, scale, i + 1 == len(micros))
            step.exchange()
            step.apply(check=way == "buckets")
        assert step.stage.unused == frozenset((4, 5) if SOMETIMES in sizes else (2, 3, 4, 5))
    got = [v.numpy() for v in step.model.weights]
    close(got, want, 1e-5)
    close(got[4:], first[4:], 0)
    close([v.numpy() for v in step.optimizer.own.variables], state, 1e-5)


def test_a_rank_without_samples_uses_nothing():
    step = attached(Heads(), wire=TwoRanksInOne())
    step.zero()
    step.exchange()
    assert step.stage.unused == frozenset(range(6))
    step.zero()
    step.forward_backward(data(0, 32), 1 / 32, True)
    assert step.stage.unused == frozenset((2, 3, 4, 5))


SHARES = [[20, 4], [20, 4], [13, 3], [20, 4]]
"""The samples of two ranks that get 5 to 1 of 24 samples, in an epoch of 64; rank 0 alone has `SOMETIMES`."""


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("changes, rtol", [
    ({}, 1e-5), ({"data_parallel": DataParallelConfig("zero", 2)}, 1e-5),
    ({"precision": "fp16", "loss_scale": 1.0}, 1e-2)], ids=str)
def test_ranks_leave_alone_what_none_of_them_used(changes, rtol, tmp_path):
    x, y = data(0, 64)
    begins = [0, 24, 48, 0]
    want, state = plain("sgd", SHARES, lambda t, n: (x[begins[t]:begins[t] + n], y[begins[t]:begins[t] + n]))
    settings = config(max_steps=4, global_batch=24, shares=[5, 1], optimizer=Named("sgd", OPTIMIZERS["sgd"]),
                      loss=Named("mse"), metrics=[], data=DataConfig(shuffle=False, prefetch=0),
                      out=str(tmp_path), **changes)
    first = [v.numpy() for v in Heads().weights]
    for run in lockstep(2, settings, lambda rank: Heads(), (x, y), fitted):
        got = [v.numpy() for v in run.parts.model.weights]
        close(got, want, rtol)
        close(got[4:], first[4:], 0)
        assert any("2 trainable parameters (never/kernel, never/bias)" in note for note in run.notes)


def test_xla_tells_too_what_has_no_gradient(tmp_path):
    settings = config(global_batch=SOMETIMES, compile="auto", loss=Named("mse"), metrics=[], out=str(tmp_path))
    run = solo(settings, Heads(), data(0, 64))
    run.join()
    stage, one = run.parts.stage, data(0, SOMETIMES)
    run.parts.compile.use(("xla",))
    assert run.parts.compile.prepare(lambda: stage.trial(one), math.inf) == ""
    for _ in range(2):
        stage.begin()
        run.dp.begin(0)
        stage.run(one, 1.0, True, run.dp)
        assert stage.unused == frozenset((4, 5))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_stages_of_a_pipeline_leave_alone_what_the_whole_model_does(tmp_path, monkeypatch):
    """Also where Keras has numbered the layers otherwise on each rank."""
    monkeypatch.setattr(unused_keras, "dense", lambda n, name: keras.layers.Dense(n, bias_initializer="ones"))
    x, y = data(0, 48)
    want, _ = plain("adamw", [[24]] * 3, lambda t, n: (x[:n], y[:n]), chain)
    asked = config(max_steps=3, global_batch=24, optimizer=Named("adamw", OPTIMIZERS["adamw"]), loss=Named("mse"),
                   metrics=[], data=DataConfig(shuffle=False, prefetch=0), out=str(tmp_path),
                   pipeline=PipelineConfig(depths=[3, 1]))
    for run in lockstep(4, asked, lambda rank: chain(), (x[:24], y[:24]), fitted):
        for name, array in run.parts.state.state()[0]["model"].items():
            close([array], [want[int(name[:5])]], 1e-5)
