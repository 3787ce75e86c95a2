"""Rates over a run, as the frameworks' own schedules give them; what follows from the run's length is filled in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import SLOW_TENSORFLOW, config, fitted, make_model, samples, solo

from hvdtrain.config import CheckpointConfig, Config, Named, ScheduleConfig
from hvdtrain.config.run_length import filled, too_long
from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks.base import Callback

N, BATCH, EPOCHS = 40, 16, 4
STEPS = 12
LR = 0.1


class Rates(Callback):
    """Keeps the rate (and momentum) of every update; asks for a stop after ``stop_after`` steps."""

    where = "all"

    def __init__(self, stop_after: int = 0) -> None:
        self.rates: list[float] = []
        self.momenta: list[float] = []
        self._stop = stop_after

    def step_start(self, run):
        self.rates.append(run.parts.optimizer.learning_rate())
        groups = getattr(getattr(run.parts.optimizer, "optimizer", None), "param_groups", None)
        self.momenta.append(groups[0].get("momentum", 0.0) if groups else 0.0)

    def step_end(self, run):
        if self._stop == run.state.cursor.step:
            run.state.wishes.stop = "the test says so"


def rates(framework, settings, stop_after=0):
    run = solo(settings, make_model(framework), samples(N))
    run.callbacks[:0] = [kept := Rates(stop_after)]
    fitted(run)
    return kept


def own_torch(name, momentum=0.9, **args):
    import torch

    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR, momentum=momentum)
    schedule = getattr(torch.optim.lr_scheduler, name)(opt, **args)
    found = []
    for _ in range(STEPS):
        found.append((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
        opt.step()
        schedule.step()
    return list(zip(*found))


def own(framework, kind):
    """Return (the schedule's section, its rates by the framework itself, its momenta or None)."""
    warm = [min(1.0, (t + 1) / 4) for t in range(STEPS)]
    if framework == "torch":
        if kind == "cosine":
            wanted, _ = own_torch("CosineAnnealingLR", T_max=STEPS)
            return ScheduleConfig("CosineAnnealingLR", warmup_steps=4), np.multiply(wanted, warm), None
        return ScheduleConfig("OneCycleLR"), *own_torch("OneCycleLR", max_lr=LR, total_steps=STEPS)
    import keras

    if kind == "cosine":
        made = keras.optimizers.schedules.CosineDecay(LR, STEPS)
        return ScheduleConfig("CosineDecay", warmup_steps=4), [float(made(t)) * w for t, w in enumerate(warm)], None
    pytest.importorskip("torch", reason="Keras has no OneCycle of its own, and PyTorch, which has, is not installed")
    return ScheduleConfig("OneCycle"), own_torch("OneCycleLR", max_lr=LR, total_steps=STEPS)[0], None


@pytest.mark.parametrize("kind", ["cosine", "one cycle"])
@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_the_rate_is_the_framework_s_own_and_goes_on_after_a_resume(framework, kind, tmp_path):
    make_model(framework)
    schedule, wanted, momenta = own(framework, kind)
    base = config(epochs=EPOCHS, global_batch=BATCH, lr=LR, out=str(tmp_path), schedule=schedule, clip_norm=1.0,
                  optimizer=Named("SGD", {"momentum": 0.9}), checkpoint=CheckpointConfig(every="off"))
    first = rates(framework, base, stop_after=5)
    second = rates(framework, replace(base, resume="auto"))
    got = first.rates + second.rates
    assert len(got) == STEPS and 4 < len(first.rates) < 8
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    if momenta is not None:
        np.testing.assert_allclose(first.momenta + second.momenta, momenta, rtol=1e-6)
        assert max(momenta) - min(momenta) > 0.05, "the momentum is cycled"


@pytest.mark.parametrize("schedule, wanted", [
    (ScheduleConfig("CosineAnnealingLR"), {"T_max": 12}), (ScheduleConfig("cosinedecay"), {"decay_steps": 12}),
    (ScheduleConfig("CosineAnnealingLR", interval="epoch"), {"T_max": 4}),
    (ScheduleConfig("CosineAnnealingLR", {"T_max": 7}), {"T_max": 7}),
    (ScheduleConfig("CosineDecay", {"warmup_steps": 3, "warmup_target": 0.1}),
     {"warmup_steps": 3, "warmup_target": 0.1, "decay_steps": 9}),
    (ScheduleConfig("OneCycleLR"), {"total_steps": 12}),
    (ScheduleConfig("OneCycle", linear_scaling_base=32), {"total_steps": 12}),
    (ScheduleConfig("OneCycleLR", {"max_lr": 1.0, "epochs": 4, "steps_per_epoch": 3}),
     {"max_lr": 1.0, "epochs": 4, "steps_per_epoch": 3}),
    (ScheduleConfig("StepLR", {"step_size": 3}), {"step_size": 3}), (ScheduleConfig(), {}),
])
def test_what_follows_from_the_run_is_filled_in(schedule, wanted):
    base = Config(epochs=4, lr=0.1, global_batch=16, schedule=schedule)
    assert filled(base, 3).schedule.args == wanted


def test_a_length_that_nobody_knows_and_a_cycle_that_is_too_short_are_refused():
    assert filled(Config(max_steps=9, schedule=ScheduleConfig("CosineDecay")), None).schedule.args == {"decay_steps": 9}
    with pytest.raises(UserError, match="CosineDecay needs the length of the run.*set schedule.args.decay_steps|Set"):
        filled(Config(schedule=ScheduleConfig("CosineDecay")), None)
    with pytest.raises(UserError, match="OneCycleLR of 5 steps in a run of 12"):
        filled(Config(epochs=4, schedule=ScheduleConfig("OneCycleLR", {"total_steps": 5})), 3)
    for name, milestones, fits in (("SequentialLR", [5], 7), ("ChainedScheduler", [], 12)):
        def of(steps):
            cycle = {"name": "OneCycleLR", "args": {"max_lr": 1.0, "total_steps": steps}}
            args = {"schedulers": ["ConstantLR", cycle], "milestones": milestones}
            return Config(epochs=4, schedule=ScheduleConfig(name, args))

        assert filled(of(fits), 3) == of(fits)
        with pytest.raises(UserError, match=f"OneCycleLR of {fits - 1} steps in {name}, where it holds for {fits}"):
            filled(of(fits - 1), 3)


def test_what_is_set_for_a_longer_run_is_told():
    long = Config(epochs=3, schedule=ScheduleConfig(warmup_steps=6250), ema=0.9999)
    notes: list[str] = []
    filled(long, 200, notes)
    assert len(notes) == 2 and "6,250 steps is longer than the run of 600" in notes[0] and "94 % " in notes[1]
    assert not too_long(replace(long, ema=0.0), 6250) and not too_long(replace(long, ema=0.99), 6250)
    filled(long, None, notes)
    assert len(notes) == 2
