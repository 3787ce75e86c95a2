"""A resume with other settings: what the user changed is in force, what moved by itself is kept, and a note says so."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, SLOW_TENSORFLOW, apart, config, fitted, lockstep, make_model, samples, solo, weights

from hvdtrain.config import CheckpointConfig, Config, DataParallelConfig, EarlyStopConfig, Named, ScheduleConfig
from hvdtrain.config.run_length import changed, check_resumed, filled, kept, length, own_of, updates
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.trainer import Trainer

N, BATCH, LR = 48, 16, 0.1  # three steps an epoch
DATA = samples(N)
BASE = config(global_batch=BATCH, lr=LR, epochs=2, optimizer=Named("SGD", {"momentum": 0.9}),
              checkpoint=CheckpointConfig(every="off"))
BASE = replace(BASE, data=replace(BASE.data, shuffle=False))
NAMES = {"torch": {"cosine": "CosineAnnealingLR", "one cycle": "OneCycleLR", "none": "none"},
         "tensorflow": {"cosine": "CosineDecay", "one cycle": "OneCycle", "none": "none"}}


class Rates(Callback):
    """Keeps the rate of every update."""

    where = "all"

    def __init__(self):
        self.rates = []

    def step_start(self, run):
        self.rates.append(run.parts.optimizer.learning_rate())


def cosine(lr, t, total):
    return lr * (1 + math.cos(math.pi * t / total)) / 2


def one_cycle(lr, t, total):
    """Return the formula of L. Smith's schedule in two phases of half cosines, with PyTorch's defaults."""
    low, peak = lr / 25, 0.3 * total - 1
    if t <= peak:
        return lr + (low - lr) * (1 + math.cos(math.pi * t / peak)) / 2
    return low / 1e4 + (lr - low / 1e4) * (1 + math.cos(math.pi * (t - peak) / (total - 1 - peak))) / 2


RATE = {"cosine": cosine, "one cycle": one_cycle, "none": lambda lr, t, total: lr}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """``first(framework, base, to)``: a copy in ``to`` of the directory of a finished run, trained once."""
    made = {}

    def get(framework, base, to):
        key = framework, str(base)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("first") / "run"
            fitted(solo(replace(base, out=str(made[key])), make_model(framework), DATA))
        shutil.copytree(made[key], to)

    return get


def scheduled(framework, name, base=BASE, **changes):
    return replace(base, schedule=ScheduleConfig(NAMES[framework][name]), **changes)


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
@pytest.mark.parametrize("before, after, changes, total", [
    ("cosine", "none", {"lr": 0.2}, 12), ("cosine", "cosine", {}, 12), ("cosine", "one cycle", {}, 12),
    ("one cycle", "one cycle", {}, 12), ("none", "cosine", {"lr": 0.2}, 12),
    ("one cycle", "one cycle", {"max_steps": 9}, 9), ("one cycle", "one cycle", {"lr": 0.3}, 12),
    ("one cycle", "one cycle", {"global_batch": 10}, 16), ("none", "none", {"lr": 0.2}, 12),
])
def test_the_rate_is_that_of_the_new_schedule_from_the_start(framework, before, after, changes, total, first, tmp_path):
    first(framework, scheduled(framework, before), tmp_path / "run")
    settings = scheduled(framework, after, epochs=4, out=str(tmp_path / "run"), resume="auto", **changes)
    run = solo(settings, make_model(framework), DATA)
    run.callbacks[:0] = [seen := Rates()]
    fitted(run)
    wanted = [RATE[after](settings.lr, t, total) for t in range(6, total)]
    np.testing.assert_allclose(seen.rates, wanted, rtol=1e-4, atol=1e-8)
    told = [note for note in run.notes if note.startswith("resumed with ") and "the next update's rate" in note]
    assert told == [] if before == after == "none" else f"rate is {wanted[0]:.4g}" in told[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_the_user_did_not_change_is_the_checkpoints(framework, first, tmp_path):
    """No note, and the same rate."""
    first(framework, scheduled(framework, "none"), tmp_path / "run")
    run = solo(replace(scheduled(framework, "none"), out=str(tmp_path / "run"), resume="auto"), make_model(framework),
               DATA)
    assert not [note for note in run.notes if "changed settings" in note]
    assert run.parts.optimizer.learning_rate() == pytest.approx(LR)


def test_pytorchs_groups_hold_the_change_and_what_the_schedule_moved(first, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    cycle = scheduled("torch", "one cycle", epochs=2, max_steps=4)
    first("torch", cycle, tmp_path / "a")
    moved = solo(replace(cycle, out=str(tmp_path / "a"), resume="auto"), make_model("torch"), DATA)
    momentum = moved.parts.optimizer.optimizer.param_groups[0]["momentum"]
    again = replace(cycle, out=str(tmp_path / "a"), resume="auto",
                    optimizer=Named("SGD", {"momentum": 0.5, "weight_decay": 0.3}))
    run = solo(again, make_model("torch"), DATA)
    group = run.parts.optimizer.optimizer.param_groups[0]
    assert group["momentum"] == momentum != 0.9 and group["weight_decay"] == 0.3
    note, = [note for note in run.notes if "changed settings" in note]
    assert note.endswith("settings: optimizer.args.weight_decay not set -> 0.3"), "OneCycleLR rules the momentum"


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
@pytest.mark.parametrize("optimizer, before, after", [("SGD", {}, {"momentum": 0.9}),
                                                      ("SGD", {"momentum": 0.9}, {}),
                                                      ("RMSprop", {}, {"momentum": 0.5, "centered": True}),
                                                      ("Adam", {}, {"amsgrad": True})])
def test_state_that_a_setting_asks_for_begins_and_ends_with_it(framework, optimizer, before, after, first, tmp_path):
    base = replace(BASE, optimizer=Named(optimizer, before), lr=0.01)
    first(framework, base, tmp_path / "run")
    settings = replace(base, optimizer=Named(optimizer, after), epochs=3, out=str(tmp_path / "run"), resume="auto")
    run = fitted(solo(settings, make_model(framework), DATA))
    assert all(np.isfinite(array).all() for array in weights(run)) and run.state.cursor.step == 9
    slots = {slot for slot, _, _ in run.parts.optimizer.slots()}
    assert len(slots) == (3 if optimizer != "SGD" else 1 if after else 0), slots
    if optimizer != "SGD":
        return
    model = make_model(framework)  # without other state the rest is a run of its own
    second = solo(replace(settings, epochs=1, out="", resume=""), model, DATA)
    start = solo(replace(base, out=str(tmp_path / "run"), resume=str(tmp_path / "run/checkpoints/step-00000006")),
                 make_model(framework), DATA)
    groups, rest = second.parts.state.state()
    second.parts.state.load({**groups, "model": start.parts.state.state()[0]["model"]}, rest)
    assert apart(weights(fitted(second)), weights(run)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow"])
def test_a_compiled_model_s_changes_are_told(backend, tmp_path):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    import keras

    def fit(optimizer, **changes):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        trainer = Trainer(replace(BASE, optimizer=Named(), metrics=[], out=str(tmp_path), **changes))
        trainer.fit(model, DATA)
        return trainer.run

    fit(keras.optimizers.SGD(0.1), epochs=1)
    run = fit(keras.optimizers.SGD(0.05, momentum=0.9), epochs=2, resume="auto", lr=7.0, eval_every=0, log_every=3)
    note, = [note for note in run.notes if "changed settings" in note]
    assert note.endswith("settings: momentum 0.0 -> 0.9, learning rate 0.1 -> 0.05"), "the key lr has no effect"
    decay = keras.optimizers.schedules.CosineDecay
    run = fit(keras.optimizers.SGD(decay(0.5, 9)), epochs=3, resume="auto")
    assert run.parts.optimizer.learning_rate() == pytest.approx(0.0, abs=1e-7) and run.state.cursor.step == 9
    with pytest.raises(UserError, match="has 12 steps, and the optimizer's own schedule CosineDecay ends after 9"):
        fit(keras.optimizers.SGD(decay(0.5, 9)), epochs=4, resume="auto")
    run = fit(keras.optimizers.SGD(decay(0.5, 12)), epochs=4, max_steps=10, resume="auto")
    assert run.parts.optimizer.learning_rate() == pytest.approx(cosine(0.5, 10, 12))
    note, = [note for note in run.notes if "changed settings" in note]
    assert "'decay_steps': 9" in note and "'decay_steps': 12" in note


@pytest.mark.parametrize("framework, name, key", [("torch", "CosineAnnealingLR", "T_max"),
                                                  ("torch", "OneCycleLR", "total_steps"),
                                                  ("tensorflow", "CosineDecay", "decay_steps")])
def test_a_given_length_that_ended_the_run_before_is_refused(framework, name, key, first, tmp_path):
    base = replace(BASE, schedule=ScheduleConfig(name, {key: 6}))
    first(framework, base, tmp_path / "run")
    with pytest.raises(UserError, match=f"6.*{key}"):
        solo(replace(base, epochs=4, out=str(tmp_path / "run"), resume="auto"), make_model(framework), DATA)
    longer = replace(base, schedule=ScheduleConfig(name, {key: 12}), epochs=4, out=str(tmp_path / "run"), resume="auto")
    assert solo(longer, make_model(framework), DATA).parts.optimizer.learning_rate() > 0.01


def test_the_length_of_a_resumed_run():
    base = Config(epochs=4, schedule=ScheduleConfig("CosineAnnealingLR"))
    at = Cursor(1, 10, 4, 4)
    assert updates(base, 6, at, 2) == 24 and updates(base, 6, at, 4) == 26 and updates(base, None, at) == 0
    assert updates(replace(base, epochs=1), 6, Cursor(2, 12, 0, 0)) == 12
    assert updates(replace(base, max_steps=15), 6, at, 2) == 15
    assert filled(base, 6, None, at, 4).schedule.args == {"T_max": 26}
    by_epoch = replace(base, schedule=ScheduleConfig("CosineAnnealingLR", interval="epoch"))
    assert [length(by_epoch, 6), length(by_epoch, 6, at, 2), length(replace(by_epoch, max_steps=8), 6)] == [4, 4, 2]
    periodic = ScheduleConfig("CosineAnnealingLR", {"T_max": 3})
    check_resumed(kept(periodic, 12), periodic, kept(periodic, 24))  # it was over before, too, and as meant
    assert not changed(kept(ScheduleConfig(), 3), kept(ScheduleConfig("", {"a": 1}), 9))
    notes: list[str] = []
    filled(replace(base, schedule=periodic), 6, notes)
    assert "ends after 3 steps of a run of 24" in notes[0]


def test_the_end_of_a_schedule_that_the_optimizer_was_made_with():
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    rates = keras.optimizers.schedules

    class Own(rates.PolynomialDecay):
        pass

    def end(rate):
        return (own_of(rate, 12, 2) or {"end": 0})["end"]

    assert [end(rate) for rate in (
        rates.CosineDecay(0.1, 9.5), rates.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=3),
        rates.CosineDecay(0.1, 9, warmup_steps=3), Own(0.1, 7), rates.PolynomialDecay(0.1, 7, cycle=True),
        rates.ExponentialDecay(0.1, 5, 0.5), None)] == [10, 12, 9, 7, 0, 0, 0]

    def check(*ends_and_steps):
        before, now = (kept(ScheduleConfig(), n, own_of(rates.CosineDecay(0.1, end), n, 2)) for end,
                       n in ends_and_steps)
        check_resumed(before, ScheduleConfig(), now)

    for before, now in (((30, 30), (40, 60)), ((29, 30), (29, 60)), ((30, 30), (20, 30))):
        with pytest.raises(UserError, match="decay_steps"):
            check(before, now)
    for before, now in (((20, 30), (20, 60)), ((28, 30), (56, 60)), ((30, 30), (60, 60)), ((30, 60), (30, 45))):
        check(before, now)  # of the first two the user meant the end


def test_only_keys_that_change_the_result_are_listed(tmp_path):
    base = replace(BASE, out=str(tmp_path), nan_guard="skip")
    fitted(solo(base, make_model("numpy"), DATA))
    more = replace(base, resume="auto", epochs=3, accumulate=2, trackers=["csv"], on_oom="stop", log_every=3,
                   max_skipped=3, deterministic=True, eval_every=2, metrics=[], clip_norm=1.0)
    steered = replace(more, early_stop=EarlyStopConfig("loss"))
    for settings, words in ((more, "clip_norm 0.0 -> 1.0"),
                            (steered, "metrics ['accuracy'] -> [], clip_norm 0.0 -> 1.0, eval_every 0 -> 2, "
                                      "early_stop.metric  -> loss")):
        note, = [note for note in solo(settings, make_model("numpy"), DATA).notes if "changed settings" in note]
        assert note == f"resumed with changed settings: {words}"


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_zero_follows_the_changes_as_replicas_do(framework, first, tmp_path):
    """Slots that begin, and a rate that is no state of the checkpoint's optimizer, over slices."""
    base = replace(scheduled(framework, "cosine"), optimizer=Named("Adam"), lr=0.01)
    found = []
    for size, changes in ((1, {}), (2, {"data_parallel": DataParallelConfig("zero", 2, [1, 3])})):
        first(framework, base, tmp_path / str(size))
        settings = replace(base, optimizer=Named("Adam", {"amsgrad": True}), schedule=ScheduleConfig(), epochs=3,
                           out=str(tmp_path / str(size)), resume="auto", **changes)
        found.append(lockstep(size, settings, lambda rank: make_model(framework), DATA,
                              lambda run: weights(fitted(run))))
    assert apart(found[1][0], found[0][0]) < 1e-5
    start = solo(replace(base, out=str(tmp_path / "1"), resume=str(tmp_path / "1/checkpoints/step-00000006")),
                 make_model(framework), DATA)
    assert apart(weights(start), found[0][0]) > 1e-3, "the rate is 0.01 again, where the cosine had come down to 0"
