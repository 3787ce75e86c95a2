"""The memory plan's states against the real tensors after two steps: to the byte, whole and divided, both frameworks.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_runs import FRAMEWORKS, config, lockstep, make_model, samples, solo

from hvdtrain import backends
from hvdtrain.commands.plan.cli import checked
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.engine import loop
from hvdtrain.engine import memory_plan as plan
from hvdtrain.engine import memory_survey as survey
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.planning.memory.forecast import forecast

DATA = samples(96)
OPTIMIZERS = {"torch": [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adam", {"amsgrad": True}),
                        ("RMSprop", {"centered": True}), ("Adagrad", {}), ("NAdam", {})],
              "tensorflow": [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adam", {"amsgrad": True}),
                             ("RMSprop", {"centered": True}), ("Adagrad", {}), ("Nadam", {}), ("Lion", {})]}
CASES = [(framework, *case) for framework in FRAMEWORKS for case in OPTIMIZERS[framework]]


def counted(run):
    """(bytes of state that the plan tells before the first step, bytes that are there after two)."""
    backend = backends.load(run.spec.framework)
    scene = survey.scene_of(run, backend)
    told = forecast(survey.facts_of(scene, survey.way_of(scene, run.dp))).state
    loop.fit(run)
    return told, backend.state_now(run.parts)


@pytest.mark.parametrize("framework, name, args", CASES)
def test_state_is_told_to_the_byte(framework, name, args, tmp_path):
    settings = config(optimizer=Named(name, args), max_steps=2, out=str(tmp_path), lr=0.001)
    told, held = counted(solo(settings, make_model(framework), DATA))
    assert told == held


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("stage", (1, 2))
def test_divided_state_is_told_to_the_byte(framework, stage, tmp_path):
    settings = config(optimizer=Named("Adam"), max_steps=2, global_batch=24, out=str(tmp_path),
                      exchange=ExchangeConfig(bucket_mb=0.0005),
                      data_parallel=DataParallelConfig("zero", stage, [2, 1]))
    found = lockstep(2, settings, lambda rank: make_model(framework), DATA, counted)
    assert all(told == held for told, held in found) and found[0][0] > found[1][0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_measuring_leaves_no_trace_and_tells_a_pass(framework, tmp_path):
    def trained(measures):
        run = solo(config(max_steps=3, out=str(tmp_path / str(measures)), optimizer=Named("Adam")),
                   make_model(framework), DATA)
        if measures:
            scene = survey.scene_of(run, backends.load(framework))
            found = plan.made(scene, run.dp)
            assert found.needs_P[0].workspace > 0 and found.free_P[0]
        loop.fit(run)
        return run.state.loss

    assert trained(True) == trained(False)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_ranks_come_to_one_plan(framework, tmp_path):
    settings = replace(config(global_batch=24, out=str(tmp_path)), shares=[3, 1])

    def work(run):
        return plan.made(survey.scene_of(run, backends.load(framework)), run.dp, measures=False)

    one, other = lockstep(2, settings, lambda rank: make_model(framework), DATA, work)
    assert one == other
    assert [row[0] for row in one.rows()] == ["0", "1"]


def test_options_have_the_parts_that_the_settings_give(tmp_path):
    settings = replace(config(global_batch=24, out=str(tmp_path), optimizer=Named("Adam")), shares=[3, 1],
                       data_parallel=DataParallelConfig("replicate", 2, [0, 1]))

    def work(run):
        return plan.made(survey.scene_of(run, backends.load("torch")), run.dp, measures=False)

    one = lockstep(2, settings, lambda rank: make_model("torch"), DATA, work)[0]
    states = {option.name: [need.state for need in option.needs_P] for option in one.options}
    assert states["zero stage 2"] == [0, one.needs_P[1].state]


def test_steps_that_check_a_plan_are_no_fit(tmp_path, capsys):
    """Callbacks, which count on a fit's begin, are not called: neither its own nor a user's."""
    class Counts(Callback):
        where = "all"

        def fit_start(self, run):
            self.begun = run.state.cursor.step

        def step_end(self, run):
            assert run.state.cursor.step > self.begun

    run = solo(config(global_batch=24, out=str(tmp_path / "run"), progress="plain"), make_model("torch"), DATA)
    run.callbacks.append(Counts())
    checked(run, plan.made(survey.scene_of(run, backends.load("torch")), run.dp, measures=False), 2)
    assert "measured in 2 steps" in capsys.readouterr().out and run.state.cursor.step == 2
    assert not (tmp_path / "run").exists()


def test_a_users_way_of_keeping_copies_alike_is_counted_as_whole(tmp_path):
    """It has what the protocol asks for, and no reducer or stage of ours."""
    class Own:
        def __init__(self, inner):
            self.inner, self.stage = inner, "mine"

        def __getattr__(self, name):
            if name in ("reducer", "sizes_BP"):
                raise AttributeError(name)
            return getattr(self.inner, name)

    def work(run):
        want = survey.way_of(survey.scene_of(run, backends.load("torch")), run.dp)
        run.dp = Own(run.dp)
        assert want.buckets and survey.way_of(survey.scene_of(run, backends.load("torch")), run.dp) == want
        return loop.fit(run)

    lockstep(2, config(global_batch=24, max_steps=2, out=str(tmp_path / "run")), lambda rank: make_model("torch"), DATA,
             work)


def test_zero_is_not_offered_for_the_optimizer_that_keras_on_pytorch_compiled():
    """It is refused there, whatever its rule is."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from hvdtrain.backends.torch.memory import model_bytes

    model = torch.nn.Linear(3, 2)
    tensors = list(model.parameters())
    parts = SimpleNamespace(
        model=model, params=SimpleNamespace(specs=[ParamSpec("w", (2, 3), "float32"), ParamSpec("b", (2,), "float32")],
                                            tensors=tensors),
        optimizer=SimpleNamespace(adopted=object(), elementwise=True, tensors=tensors,
                                  optimizer=SimpleNamespace(state={})))
    assert not model_bytes(parts).elementwise
