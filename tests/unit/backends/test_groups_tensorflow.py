"""Parameter groups and optimizers that a Keras model's file gives on TensorFlow: a plain loop's results, any ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import apart, bits, config, fitted, lockstep, samples, solo, weights

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import grouped_keras  # noqa: E402
import keras  # noqa: E402

from hvdtrain.backends.interchange import rule  # noqa: E402
from hvdtrain.backends.model_spec import Spec  # noqa: E402
from hvdtrain.backends.tensorflow import groups as reading  # noqa: E402
from hvdtrain.config import (  # noqa: E402
    CheckpointConfig,
    Config,
    DataParallelConfig,
    ExchangeConfig,
    Named,
    PipelineConfig,
    ScheduleConfig,
)
from hvdtrain.core.errors import UserError  # noqa: E402

DATA = samples(24)
"""One global batch, so that a plain loop sees what every step sees."""
RUN = config(global_batch=24, max_steps=8, lr=0.05, optimizer=Named("AdamW", {"weight_decay": 0.1, "epsilon": 1e-3}),
             exchange=ExchangeConfig(bucket_mb=0.0005))
ZERO = DataParallelConfig("zero", 2)


def made(rate=0.05):
    return keras.optimizers.AdamW(rate, weight_decay=0.1, epsilon=1e-3)


def by_hand(opt, rate=lambda step: 1.0):
    """Return the results of a plain loop, with ``rate(step)`` times the rate."""
    model = grouped_keras.build()
    opt.exclude_from_weight_decay([v for v in model.trainable_variables if len(v.shape) < 2])
    x, y = (tf.constant(a) for a in DATA)
    for step in range(8):
        opt.learning_rate = 0.05 * rate(step)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return [v.numpy() for v in model.weights]


@pytest.mark.slow
def test_training_is_that_of_a_plain_loop(monkeypatch):
    run = fitted(solo(RUN, grouped_keras.build(), DATA))
    assert apart(weights(run), by_hand(made())) < 1e-6
    assert run.parts.optimizer.describe()["parameter groups"] == "weight_decay 0: 3 tensors; as configured: 4 tensors"
    monkeypatch.setattr(grouped_keras, "parameter_groups", None)
    decayed = fitted(solo(RUN, grouped_keras.build(), DATA))
    assert apart(weights(decayed), weights(run)) > 1e-3  # decay on all is another curve


@pytest.mark.slow
def test_an_optimizer_of_the_file_gets_warm_up_and_scaling(monkeypatch):
    monkeypatch.setattr(grouped_keras, "optimizer", lambda model, config: made(config.lr), raising=False)
    settings = replace(RUN, optimizer=Named("SGD"), schedule=ScheduleConfig(warmup_steps=3, linear_scaling_base=48))
    run = fitted(solo(settings, grouped_keras.build(), DATA))
    assert apart(weights(run), by_hand(made(), lambda step: 0.5 * min(1.0, (step + 1) / 3))) < 1e-6
    assert run.parts.optimizer.describe()["optimizer"] == "AdamW, lr 0.025 (the model file's)"
    assert "optimizer.name has no effect: the model file defines optimizer(model, config)" in run.notes


def held(runs):
    found = {}
    for run in runs:
        found |= run.parts.state.state()[0]["model"]
    return [found[name] for name in sorted(found)]


def grouped(size, settings, out, **changes):
    return lockstep(size, replace(settings, out=str(out), **changes), lambda rank: grouped_keras.build(), DATA, fitted)


@pytest.mark.slow
def test_any_ranks_and_ways_to_divide_follow_one_process_and_go_on_from_its_checkpoint(tmp_path):
    saves = {"checkpoint": CheckpointConfig(every_steps=4, at_end=False)}
    (alone,) = grouped(1, RUN, tmp_path / "one")
    zero = grouped(2, RUN, tmp_path / "run", max_steps=4, data_parallel=ZERO, **saves)
    both = grouped(2, RUN, tmp_path / "run", resume="auto", **saves)
    cut = grouped(2, RUN, tmp_path / "cut", pipeline=PipelineConfig(2))
    assert len({run.parts.optimizer.opt.made_of() for run in (alone, *zero, *both, *cut)}) == 1
    assert " group " in alone.parts.optimizer.opt.made_of() and len({bits(run) for run in both}) == 1
    for runs in (both, cut):
        assert {run.state.cursor.step for run in runs} == {8}
        assert apart(held(runs), held([alone])) < 1e-5
    with pytest.raises(UserError, match="exclude_from_weight_decay"):
        rule.require_one_rule(alone.parts.optimizer.own)


@pytest.mark.parametrize("changes", [{}, {"pipeline": PipelineConfig(2)}], ids=["copies", "cut"])
def test_ranks_whose_files_say_different_things_are_refused(changes, tmp_path, monkeypatch):
    rates = iter((0.05, 0.1))
    monkeypatch.setattr(grouped_keras, "optimizer", lambda model, config: made(next(rates)), raising=False)
    with pytest.raises(UserError, match="rank . has optimizer AdamW .*learning_rate 0.*where rank . has optimizer "):
        grouped(2, RUN, tmp_path, **changes)


def test_stages_that_were_compiled_with_other_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped_keras, "parameter_groups", None)

    def compiled(rank):
        model = grouped_keras.build()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9 - 0.4 * rank)
        model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
        return model

    settings = replace(RUN, out=str(tmp_path), optimizer=Named("auto"), pipeline=PipelineConfig(2))
    with pytest.raises(UserError, match="has optimizer SGD .*momentum 0.*where rank . has optimizer "):
        lockstep(2, settings, compiled, DATA, fitted)


def spec(groups=None, optimizer=None, model=None):
    return Spec("file.py:build", model or grouped_keras.build(), "tensorflow", parameter_groups=groups,
                optimizer=optimizer)


def test_forms_that_keras_can_follow_are_taken():
    def small(model):
        return (v for v in model.trainable_variables if len(v.shape) < 2)

    def large(model):
        return [v for v in model.trainable_variables if len(v.shape) > 1]

    for groups in (lambda m: [{"params": small(m), "weight_decay": 0}],
                   lambda m: ({"variables": list(small(m)), "weight_decay": None} for _ in range(1)),
                   lambda m: [{"variables": small(m), "weight_decay": 0},
                              {"variables": large(m), "weight_decay": 0.1}]):
        assert [v.name for v in reading.without_decay(spec(groups), 0.1)] == ["bias", "gamma", "beta"]
    for groups in (lambda m: [], lambda m: [{"params": []}], lambda m: [{"params": small(m)}]):
        assert reading.without_decay(spec(groups), None) == []
    one = reading.without_decay(spec(lambda m: [{"params": m.weights[0], "weight_decay": 0}]), 0.1)
    assert [v.path for v in one] == ["normed/first/kernel"]
    own = made()
    own.exclude_from_weight_decay(var_names=["kernel"])
    reading.exclude(own, one)
    assert own._exclude_from_weight_decay == set()  # the optimizer's own come first


def compiled(model):
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def frozen():
    model = grouped_keras.build()
    model.layers[0].trainable = False
    return model


@pytest.mark.parametrize("groups, words", [
    (lambda m: None, "parameter_groups gives None"),
    (lambda m: [m.weights], "group 0 of parameter_groups is a list"),
    (lambda m: [{"params": "kernel"}], "the variables of group 0 of parameter_groups are 'kernel'"),
    (lambda m: [{"params": [3]}], "hold a int"),
    (lambda m: [{"params": m.weights[:1]}, {"params": m.weights}], "normed/first/kernel is in groups 0 and 1"),
    (lambda m: [{"params": frozen().weights[:1]}], "is not a variable of the model"),
    (lambda m: [{"params": m.weights, "lr": 0.1, "weight_decay": 0}], "group 0 of parameter_groups has lr"),
    (lambda m: [{"params": [], "weight_decay": 0.2}], "has weight_decay 0.2; expected 0, or 0.1")])
def test_what_keras_cannot_follow_is_refused(groups, words):
    with pytest.raises(UserError, match=words):
        reading.without_decay(spec(groups), 0.1)


def test_an_optimizer_that_is_none_or_one_too_many_is_refused(monkeypatch):
    with pytest.raises(UserError, match="kernel, which is not trained"):
        reading.without_decay(spec(lambda m: [{"params": m.weights}], model=frozen()), 0.1)
    with pytest.raises(UserError, match="optimizer gives a int"):
        reading.own_optimizer(spec(optimizer=lambda m, c: 3), Config())
    used = made()
    used.build(grouped_keras.build().trainable_variables)
    with pytest.raises(UserError, match="the AdamW of optimizer is built"):
        reading.own_optimizer(spec(optimizer=lambda m, c: used), Config())
    with pytest.raises(UserError, match="compiled with SGD, which it keeps, and its file defines parameter_groups"):
        solo(replace(RUN, optimizer=Named("auto")), compiled(grouped_keras.build()), DATA)
    monkeypatch.setattr(grouped_keras, "optimizer", lambda model, config: made(), raising=False)
    with pytest.raises(UserError, match="its file defines optimizer"):
        solo(replace(RUN, optimizer=Named("auto")), compiled(grouped_keras.build()), DATA)
    monkeypatch.delattr(grouped_keras, "optimizer")
    run = solo(RUN, compiled(grouped_keras.build()), DATA)
    assert len(run.parts.optimizer.own._exclude_from_weight_decay) == 3
