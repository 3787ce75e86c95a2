"""A rate that follows evaluations: by the framework's own rule, the same on all ranks, and over a resume."""

from dataclasses import replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, config, fitted, lockstep, make_model, samples, solo

from hvdtrain.config import CheckpointConfig, ScheduleConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks.plateau import Plateau

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
DATA = samples(16), samples(9, 1)
VALUES = [2.0, 1.0, 1.0, 1.5, 1.2, 0.9, float("nan"), 1.0, 1.1, 1.0, 1.0, 1.0]
ARGS = {"patience": 2, "factor": 0.5, "cooldown": 1, "min_lr": 0.02}
BASE = config(global_batch=8, eval_every=1, epochs=12, lr=0.1, metrics=[])


def rates(monkeypatch, settings, framework, values=VALUES, size=1, **more):
    """Return each epoch's rate, on every rank, of runs whose evaluations give ``values``."""
    monkeypatch.setattr("hvdtrain.engine.callbacks.plateau.value_of",
                        lambda run, metric, key: values[run.state.cursor.epoch - 1])

    def work(run):
        found = []
        run.parts.optimizer.evaluated, move = lambda value: (move(value), found.append(rate(run))), \
            run.parts.optimizer.evaluated
        fitted(run)
        return found

    def rate(run):
        return run.parts.optimizer.learning_rate()

    found = lockstep(size, replace(settings, **more), lambda rank: make_model(framework), DATA, work)
    assert all(one == found[0] for one in found)
    return found[0]


def of_torch(mode="min"):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    rule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, **ARGS)
    return [(rule.step(value), optimizer.param_groups[0]["lr"])[1] for value in VALUES]


def of_keras(mode="min"):
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    rule = keras.callbacks.ReduceLROnPlateau("loss", mode=mode, verbose=0, **ARGS)
    rule.set_model(model)
    rule.on_train_begin()
    return [(rule.on_epoch_end(i, {"loss": value}), float(model.optimizer.learning_rate))[1]
            for i, value in enumerate(VALUES)]


@pytest.mark.parametrize("size, more", [(1, {}), (3, {"shares": [2, 0, 1]}), (2, {"data_parallel": "zero"})])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rates_are_those_of_the_framework_on_all_ranks(framework, size, more, monkeypatch):
    settings = replace(BASE, schedule=ScheduleConfig("ReduceLROnPlateau", ARGS))
    want = of_torch() if framework == "torch" else of_keras()
    assert len(set(want)) in (3, 4)
    np.testing.assert_allclose(rates(monkeypatch, settings, framework, size=size, **more), want, rtol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_resumed_run_follows_the_same_rates(framework, monkeypatch, tmp_path):
    schedule = ScheduleConfig("ReduceLROnPlateau", ARGS, warmup_steps=3)
    settings = replace(BASE, schedule=schedule, checkpoint=CheckpointConfig(at_end=True))
    whole = rates(monkeypatch, settings, framework, out=str(tmp_path / "a"))
    first = rates(monkeypatch, settings, framework, out=str(tmp_path / "b"), epochs=4)
    then = rates(monkeypatch, settings, framework, size=2, out=str(tmp_path / "b"), resume="auto")
    assert first + then == whole and len(then) == 8
    if framework == "tensorflow":
        return
    settings = replace(settings, eval_every=3)  # a stop evaluates between
    whole = rates(monkeypatch, settings, framework, out=str(tmp_path / "c"))
    first = rates(monkeypatch, settings, framework, out=str(tmp_path / "d"), max_steps=8)
    assert first + rates(monkeypatch, settings, framework, out=str(tmp_path / "d"), resume="auto") == whole


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_metric_begins_again(framework, tmp_path):
    plateau = ScheduleConfig("ReduceLROnPlateau", {"patience": 0, "min_delta" if framework == "tensorflow" else
                                                   "threshold": 9.0, "factor": 0.5})
    settings = replace(BASE, epochs=3, out=str(tmp_path), metrics=["accuracy"], schedule=plateau,
                       checkpoint=CheckpointConfig(at_end=True))
    assert fitted(solo(settings, make_model(framework), DATA)).parts.optimizer.learning_rate() < 0.06
    run = solo(replace(settings, resume="auto", epochs=4, schedule=replace(plateau, metric="accuracy")),
               make_model(framework), DATA)
    assert run.parts.optimizer.learning_rate() == pytest.approx(0.1)
    if framework == "torch":
        follows = run.parts.optimizer.schedule
        assert follows.mode == "max" and follows.best == -np.inf
        before = run.parts.optimizer.scalars()
        follows.step(0.5)
        run.parts.optimizer.load_scalars(before)
        assert follows.best == -np.inf, "of a checkpoint before the first evaluation"


def test_what_cannot_follow_is_refused():
    plateau = ScheduleConfig("ReduceLROnPlateau")
    for settings, data, said in (
            (replace(BASE, eval_every=0), DATA, "eval_every is 0"), (BASE, DATA[0], "no evaluation data"),
            (replace(BASE, schedule=replace(plateau, metric="f1")), DATA, "schedule.metric 'f1' is not evaluated")):
        settings = settings if settings.schedule.plateau else replace(settings, schedule=plateau)
        with pytest.raises(UserError, match=said):
            fitted(solo(settings, make_model("torch"), data))
    path = "torch.optim.lr_scheduler:ReduceLROnPlateau"
    for schedule in (ScheduleConfig(path), ScheduleConfig("ChainedScheduler", {"schedulers": [path]})):
        with pytest.raises(UserError, match="ReduceLROnPlateau.* follows evaluations"):
            solo(replace(BASE, schedule=schedule), make_model("torch"), DATA)
    assert Plateau.steers


def test_keras_sequences_follow_one_another():
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    args = {"schedulers": [{"name": "ExponentialDecay", "args": {"decay_steps": 1, "decay_rate": 0.5}},
                           {"name": "PolynomialDecay", "args": {"decay_steps": 4}}], "milestones": [2]}
    run = solo(replace(BASE, epochs=1, schedule=ScheduleConfig("SequentialLR", args, warmup_steps=2)),
               make_model("tensorflow"), DATA)
    held = run.parts.optimizer.own._learning_rate
    own = type(held).from_config(held.get_config())
    import keras

    last = keras.optimizers.schedules.PolynomialDecay(0.1, 4)
    want = [0.05, 0.05, *(float(last(step)) for step in range(3))]
    for schedule in (held, own):
        np.testing.assert_allclose([float(schedule(step)) for step in range(5)], want, rtol=1e-6)
    with pytest.raises(UserError, match="one milestone fewer"):
        solo(replace(BASE, schedule=ScheduleConfig("SequentialLR", {**args, "milestones": []})),
             make_model("tensorflow"), DATA)
