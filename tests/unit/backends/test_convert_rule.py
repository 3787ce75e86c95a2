"""Optimizers between the frameworks: the formulas against both updates written out, settings, refusals, remarks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdtrain.backends.interchange import rule
from hvdtrain.backends.interchange.rule import Rule
from hvdtrain.commands.convert import request as resume
from hvdtrain.config import Config, Named, ScheduleConfig
from hvdtrain.core.errors import UserError

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "weight_decay": 0, "maximize": False}
ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0, "amsgrad": False, "maximize": False}
KERAS = {"weight_decay": None, "clipnorm": None, "clipvalue": None, "global_clipnorm": None, "use_ema": False}
KERAS_SGD = {**KERAS, "momentum": 0.9, "nesterov": False}
KERAS_ADAM = {**KERAS, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-7, "amsgrad": False}


def keras_step(p, m, g, lr, u, nesterov):
    m = u * m - lr * g
    return (p + u * m - lr * g if nesterov else p + m), m


def torch_step(p, b, g, lr, u, nesterov):
    b = u * b + g
    return p - lr * (g + u * b if nesterov else b), b


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rates", [[0.1] * 10, [0.2, 0.4, 0.6] + [0.1] * 7], ids=["constant", "constant from here"])
@pytest.mark.parametrize("first", ["keras", "torch"])
def test_sgd_with_momentum_goes_on_as_it_would_have(first, rates, nesterov):
    """Ten steps in one framework, or five here and five there: the rates before the change do not matter."""
    step, other = (keras_step, torch_step) if first == "keras" else (torch_step, keras_step)
    gradients = np.random.default_rng(0).standard_normal((10, 4))
    p = held = q = kept = np.zeros(4)
    for t in range(10):
        p, held = step(p, held, gradients[t], rates[t], 0.9, nesterov)
        if t < 5:
            q, kept = step(q, kept, gradients[t], rates[t], 0.9, nesterov)
        else:
            if t == 5:
                made = Rule("sgd", 0.1, 0.1, rates[5], 5, momentum=0.9, nesterov=nesterov)
                kept = (rule.buffer if first == "keras" else rule.velocity)(made, {"p": kept})["p"]
            q, kept = other(q, kept, gradients[t], rates[t], 0.9, nesterov)
    np.testing.assert_allclose(q, p, rtol=1e-12)


def test_momentum_there_and_back_is_the_same_but_for_a_rounding():
    made = Rule("sgd", 0.03, 0.03, 0.03, 7, momentum=0.9)
    held = {"w": np.random.default_rng(1).standard_normal(1000).astype(np.float32)}
    back = rule.velocity(made, rule.buffer(made, held))
    np.testing.assert_array_max_ulp(back["w"], held["w"], 1)
    assert back["w"].dtype == np.float32
    with pytest.raises(UserError, match="rate of the next update is 0"):
        rule.buffer(Rule("sgd", 0.0, 0.0, 0.0, 7, momentum=0.9), held)


@pytest.mark.parametrize("name, group, keras_name, keras_args", [
    ("SGD", SGD, "SGD", {"momentum": 0.9}),
    ("SGD", {**SGD, "nesterov": True}, "SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {**SGD, "momentum": 0, "weight_decay": 0.1}, "SGD", {"weight_decay": 0.1}),
    ("Adam", ADAM, "Adam", {"beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-8}),
    ("AdamW", {**ADAM, "weight_decay": 0.1, "amsgrad": True}, "AdamW",
     {"beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1, "amsgrad": True}),
])
def test_settings_from_torch(name, group, keras_name, keras_args):
    made = rule.from_torch(name, group, 0.1, 0.1, 3)
    assert made.in_keras() == (keras_name, keras_args)
    assert Rule.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize("name, settings, torch_name, torch_args", [
    ("SGD", KERAS_SGD, "SGD", {"momentum": 0.9}),
    ("Adam", KERAS_ADAM, "Adam", {"betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.0}),
    ("Adam", {**KERAS_ADAM, "weight_decay": 0.1}, "AdamW", {"betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.1}),
    ("AdamW", {**KERAS_ADAM, "weight_decay": 0.1, "amsgrad": True}, "AdamW",
     {"betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.1, "amsgrad": True}),
])
def test_settings_from_keras(name, settings, torch_name, torch_args):
    assert rule.from_keras(name, settings, 0.1, 0.1, 0.1, 3).in_torch() == (torch_name, torch_args)


@pytest.mark.parametrize("make, words", [
    (lambda: rule.from_torch("SGD", {**SGD, "dampening": 0.1}, 0.1, 0.1, 1), "SGD with dampening 0.1"),
    (lambda: rule.from_torch("SGD", {**SGD, "weight_decay": 0.1}, 0.1, 0.1, 1), "weight_decay with momentum"),
    (lambda: rule.from_torch("Adam", {**ADAM, "weight_decay": 0.1}, 0.1, 0.1, 1), "and in AdamW"),
    (lambda: rule.from_torch("Adam", {**ADAM, "maximize": True}, 0.1, 0.1, 1), "maximize"),
    (lambda: rule.from_torch("Adagrad", {"lr": 0.1}, 0.1, 0.1, 1), "the optimizer is Adagrad"),
    (lambda: rule.from_keras("SGD", {**KERAS_SGD, "weight_decay": 0.1}, 0.1, 0.1, 0.1, 1), "included in PyTorch"),
    (lambda: rule.from_keras("Adam", {**KERAS_ADAM, "clipnorm": 1.0}, 0.1, 0.1, 0.1, 1), "clip_norm"),
    (lambda: rule.from_keras("Adam", {**KERAS_ADAM, "use_ema": True}, 0.1, 0.1, 0.1, 1), "use_ema"),
    (lambda: rule.from_keras("Lion", KERAS, 0.1, 0.1, 0.1, 1), "the optimizer is Lion"),
    (lambda: rule.same_updates({"w": 4.0, "v": 3.0}, 4), "v has had 3 updates and the run 4"),
])
def test_what_has_no_counterpart_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_what_is_not_exact_is_told():
    early = Rule("adam", 0.1, 0.1, 0.1, 20)
    assert "7.1 times" in rule.remarks(early, 0)[0]
    assert not rule.remarks(Rule("adam", 0.1, 0.1, 0.1, 1000), 0)
    warm = Rule("sgd", 0.1, 0.1, 0.05, 20, momentum=0.9)
    assert "warm-up" in rule.remarks(warm, 40)[0] and not rule.remarks(warm, 20)


def test_the_configuration_of_the_other_framework(tmp_path):
    config = Config(lr=0.2, global_batch=128, schedule=ScheduleConfig(linear_scaling_base=64, warmup_steps=5), seed=4,
                    optimizer=Named("sgd", {"momentum": 0.5, "fused": True}))
    again = resume.config_of({**json.loads(json.dumps(config.to_dict())), "of_another_release": 1})
    assert again == config
    made = Rule("sgd", 0.4, 0.4, 0.4, 3, momentum=0.5)
    there = resume.config_for(config, "tensorflow", made, "tf_models.mlp:build", {"classes": 3}, tmp_path / "run")
    assert there.optimizer == Named("SGD", {"momentum": 0.5}) and there.model_args == {"classes": 3}
    assert (there.lr, there.schedule) == (0.2, config.schedule) and there.resume == "auto" and there.seed == 4
    # a rate that the configuration does not say (a compiled optimizer's) is written into it, as it is
    own = Rule("sgd", 0.7, 0.7, 0.7, 3)
    there = resume.config_for(config, "torch", own, "m:b", {}, tmp_path / "run")
    assert there.lr == 0.7 and there.schedule == ScheduleConfig(warmup_steps=5) and there.check()


def test_a_schedule_is_refused_and_warm_up_is_not():
    resume.require_constant_rate(Config(schedule=ScheduleConfig(warmup_steps=9)))
    with pytest.raises(UserError, match="follows StepLR"):
        resume.require_constant_rate(Config(schedule=ScheduleConfig("StepLR")))
    with pytest.raises(UserError, match="follows CosineDecay"):
        resume.require_constant_rate(Config(), "CosineDecay")


def test_generators_and_position():
    old = {"python.words": np.arange(3), "numpy.key": np.arange(4), "torch.cpu": np.arange(5),
           "compressor.0.error": np.ones(2)}
    found = resume.rank_arrays(old, {"python.words": np.zeros(3), "seed.00000/x": np.ones(2)})
    assert sorted(found) == ["numpy.key", "python.words", "seed.00000/x"] and found["python.words"][2] == 2
    meta = {"framework": "torch", "model": "a:b", "cursor": {"step": 3}, "samples": 9, "world_size": 2,
            "callbacks": {"EarlyStop": {"best": 1}}, "step_rest": {"groups": [], "loss_scale": [8.0, 1, 0]}}
    made = resume.meta_for(meta, "tensorflow", "c:d", {"optimizer": "SGD"}, Config())
    assert made["step_rest"] == {"optimizer": "SGD", "loss_scale": [8.0, 1, 0]} and made["cursor"] == {"step": 3}
    assert (made["framework"], made["model"], made["converted_from"]) == ("tensorflow", "c:d", "torch")
    assert (made["samples"], made["world_size"], made["callbacks"]) == (9, 2, {"EarlyStop": {"best": 1}})


def test_what_does_not_go_over_is_told():
    told = " ".join(resume.remarks(Config(loss=Named("mse")), True, True, ""))
    assert "dropout" in told and "compressor state" in told and "loss mse" in told
    assert resume.remarks(Config(), False, False, "") == []
    assert "compiled with loss mse" in resume.remarks(Config(), False, False, "loss mse")[0]


def test_keras_settings_without_a_counterpart_are_refused():
    with pytest.raises(UserError, match="gradient_accumulation_steps"):
        rule.from_keras("SGD", {**KERAS_SGD, "gradient_accumulation_steps": 4}, 0.1, 0.1, 0.1, 3)

    class Kept:
        weight_decay = 0.1
        _exclude_from_weight_decay = {"kernel"}

    with pytest.raises(UserError, match="exclude_from_weight_decay"):
        rule.require_one_rule(Kept())
    Kept.weight_decay = None
    rule.require_one_rule(Kept())
