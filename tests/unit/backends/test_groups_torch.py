"""Parameter groups and optimizers that a PyTorch model's file gives: a plain loop's results, any ranks, and refusals.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import apart, bits, config, fitted, lockstep, make_model, samples, solo, weights

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import grouped_torch  # noqa: E402

from hvdtrain.backends.model_spec import Spec, spec_of  # noqa: E402
from hvdtrain.backends.torch.optim import optimizer_spec, updating_fused  # noqa: E402
from hvdtrain.commands.convert import request as places  # noqa: E402
from hvdtrain.commands.convert import worker  # noqa: E402
from hvdtrain.commands.convert.request import Request, completed  # noqa: E402
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
ADAMW = Named("AdamW", {"weight_decay": 0.1, "eps": 1e-3})
RUN = config(global_batch=24, max_steps=8, lr=0.05, optimizer=ADAMW, exchange=ExchangeConfig(bucket_mb=0.0005))
ZERO = DataParallelConfig("zero", 2)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def groups_of(model):
    """Return the groups of `grouped_torch`, with the rest, for torch.optim itself."""
    small, head = grouped_torch.parameter_groups(model)
    rest = [p for p in model.parameters() if p.ndim > 1 and p is not model.head.weight]
    return [small, head, {"params": rest}]


def by_hand(make, rate=lambda step: 1.0, steps=8):
    """Return the results of a plain loop, with ``rate(step)`` times each group's rate."""
    model = grouped_torch.build()
    opt = make(groups_of(model))
    own = [group["lr"] for group in opt.param_groups]
    x, y = torch.from_numpy(DATA[0]), torch.from_numpy(DATA[1])
    for step in range(steps):
        for group, lr in zip(opt.param_groups, own):
            group["lr"] = lr * rate(step)
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return [t.detach().numpy() for _, t in sorted(model.state_dict().items())]


def of_file(model, config):
    """Return a file's own optimizer, with groups of its own."""
    return torch.optim.Adagrad(groups_of(model), lr=torch.tensor(config.lr), weight_decay=0.1,
                               initial_accumulator_value=0.1)


@pytest.mark.parametrize("named, make", [
    (ADAMW, lambda groups: torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1, eps=1e-3)),
    (Named("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
     lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)),
    (None, lambda groups: torch.optim.Adagrad(groups, lr=0.05, weight_decay=0.1, initial_accumulator_value=0.1))],
    ids=["AdamW", "SGD", "own"])
def test_training_is_that_of_a_plain_loop(named, make, monkeypatch):
    if named is None:
        monkeypatch.setattr(grouped_torch, "optimizer", of_file, raising=False)
    settings = replace(RUN, optimizer=named or ADAMW)
    assert apart(weights(fitted(solo(settings, grouped_torch.build(), DATA))), by_hand(make)) < 1e-6
    scheduled = replace(settings, schedule=ScheduleConfig("StepLR", {"step_size": 5, "gamma": 0.5}, warmup_steps=3,
                                                    linear_scaling_base=48))
    run = fitted(solo(scheduled, grouped_torch.build(), DATA))
    want = by_hand(make, lambda step: 0.5 * min(1.0, (step + 1) / 3) * (0.5 if step >= 5 else 1.0))
    assert apart(weights(run), want) < 1e-6
    assert run.parts.optimizer.learning_rate() == pytest.approx(0.0125)  # the base rate's, not a group's
    words = run.parts.optimizer.describe()
    assert words["parameter groups"] == "weight_decay 0.0: 3 tensors; lr 0.025: 1 tensor; as configured: 3 tensors"
    assert words["optimizer"].endswith("(the model file's)") is (named is None)
    assert run.notes == ([] if named else [n for n in run.notes if "model file defines optimizer" in n])


def held(runs):
    """Return (weights, moments) by name, of all ranks; each the same wherever two have it."""
    found = {}
    for run in runs:
        parts = run.parts.state.state()[0]
        for key, array in ((f"{group}/{name}", a) for group in parts for name, a in parts[group].items()):
            assert key not in found or (found[key] == array).all(), key
            found[key] = array
    return found


def grouped(size, settings, out, **changes):
    return lockstep(size, replace(settings, out=str(out), **changes), lambda rank: grouped_torch.build(), DATA, fitted)


@pytest.mark.parametrize("own", [False, True])
def test_any_ranks_and_ways_to_divide_follow_one_process(own, tmp_path, monkeypatch):
    if own:
        monkeypatch.setattr(grouped_torch, "optimizer", of_file, raising=False)
    (alone,) = grouped(1, RUN, tmp_path / "one")
    both = grouped(2, RUN, tmp_path / "two")
    zero = grouped(2, RUN, tmp_path / "zero", data_parallel=ZERO)
    assert len({bits(run) for run in (*both, *zero)}) == 1
    assert apart(weights(both[0]), weights(alone)) < 1e-5
    want = held([alone])
    stages = grouped(2, RUN, tmp_path / "stages", pipeline=PipelineConfig(2, cut=["third"]))
    by_rank = [[len(group["params"]) for group in run.parts.optimizer.optimizer.param_groups] for run in stages]
    assert sorted(by_rank) == [[0, 1, 1], [3, 0, 2]]  # no norm and no bias on one of the stages
    assert len({run.parts.optimizer.made_of() for run in (alone, *both, *zero, *stages)}) == 1
    got = held(stages)
    assert set(got) == set(want) and len([key for key in got if key.startswith("optimizer/")]) == (2 if own else 3) * 7
    assert apart([got[k] for k in sorted(got)], [want[k] for k in sorted(want)]) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"data_parallel": ZERO}, {"pipeline": PipelineConfig(2)}],
                         ids=["whole", "zero", "cut"])
@pytest.mark.parametrize(("hook", "asked"), [
    ("optimizer", lambda m, c: torch.optim.SGD(m.parameters(), lr=0.05 * (1 + m.rank))),
    ("optimizer", lambda m, c: (torch.optim.SGD, torch.optim.Adam)[m.rank](m.parameters(), lr=0.05)),
    ("parameter_groups", lambda m: [{"params": [m.head.weight], "lr": 0.05 * (1 + m.rank)}])],
    ids=["lr", "class", "group"])
def test_ranks_whose_files_say_different_things_are_refused(hook, asked, changes, tmp_path, monkeypatch):
    def of_rank(rank):
        model = grouped_torch.build()
        model.rank = rank
        return model

    monkeypatch.setattr(grouped_torch, hook, asked, raising=False)
    with pytest.raises(UserError, match="models differ: rank 1 has optimizer .* where rank 0 has optimizer "):
        lockstep(2, replace(RUN, out=str(tmp_path), **changes), of_rank, DATA, fitted)


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_other_ranks_and_ways_with_its_moments(tmp_path):
    (want,) = grouped(1, RUN, tmp_path / "whole")
    saves = {"checkpoint": CheckpointConfig(every_steps=4, at_end=False)}
    ways = [(2, {"data_parallel": ZERO}), (1, {}), (2, {"pipeline": PipelineConfig(2)}),
            (4, {"pipeline": PipelineConfig(2), "data_parallel": ZERO})]
    for i, (before, after) in enumerate(zip(ways, ways[1:])):
        grouped(before[0], RUN, tmp_path / f"run{i}", max_steps=4, **before[1], **saves)
        runs = grouped(after[0], RUN, tmp_path / f"run{i}", resume="auto", **after[1], **saves)
        got = held(runs)
        assert {run.state.cursor.step for run in runs} == {8}
        names = [key for key in sorted(got) if key.startswith("model/")]
        assert apart([got[k] for k in names], [held([want])[k] for k in names]) < 1e-5
    (faster,) = grouped(1, replace(RUN, lr=0.1), tmp_path / "run0", resume="auto", max_steps=9)
    assert [group["lr"] for group in faster.parts.optimizer.optimizer.param_groups] == [0.1, 0.025, 0.1]
    given = grouped_torch.parameter_groups
    others = {"one fewer": lambda model: given(model)[:1], "none": lambda model: [],
              "moved": lambda model: [{"params": model.second[0].bias, "weight_decay": 0.0},
                                      {"params": model.head.weight, "lr": 0.025}]}
    for name, groups in others.items():
        words = "parameter group 0 of the checkpoint" if name == "moved" else "has 3 parameter groups"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=words):
            patch.setattr(grouped_torch, "parameter_groups", groups)
            grouped(1, RUN, tmp_path / "run0", resume="auto", max_steps=9)


def test_a_converted_checkpoint_is_refused(tmp_path):
    grouped(1, RUN, tmp_path / "run", checkpoint=CheckpointConfig(every_steps=4))
    (tmp_path / "out").mkdir()
    request = completed(Request(places.source_of(str(tmp_path / "run"), print),
                                places.target_of(str(tmp_path / "out")), "grouped_torch:build", "tf_models.mlp:build"))
    with pytest.raises(UserError, match="AdamW with 3 parameter groups"):
        worker.read(request, tmp_path / "exchange")


def test_a_schedule_with_a_rate_of_its_own_keeps_the_groups_apart():
    for name, args in (("OneCycleLR", {"max_lr": 0.2, "total_steps": 99}),
                       ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False})):
        run = solo(replace(RUN, schedule=ScheduleConfig(name, args)), grouped_torch.build(), DATA)
        rates = [group["lr"] for group in run.parts.optimizer.optimizer.param_groups]
        assert rates[1] == pytest.approx(rates[0] / 2) and rates[2] == rates[0]


def reads(groups=None, optimizer=None, model=None, named="AdamW", **args):
    spec = Spec("file.py:build", model or grouped_torch.build(), "torch", parameter_groups=groups, optimizer=optimizer)
    return optimizer_spec(spec, Config(lr=0.1, optimizer=Named(named, args)))


def test_forms_that_torch_takes_are_taken():
    def small(model):
        return (p for p in model.parameters() if p.ndim < 2)

    one = reads(lambda m: [{"params": small(m), "weight_decay": 0.0}])
    assert [len(group.names) for group in one.groups] == [3, 4]
    same = reads(lambda m: ({"params": [(n, p) for n, p in m.named_parameters() if p.ndim < 2],
                             "weight_decay": torch.tensor(0.0)} for _ in range(1)))
    assert same == one and [g.checksum() for g in same.groups] == [g.checksum() for g in one.groups]
    assert reads(lambda m: []).groups == () == reads(lambda m: [{"params": m.parameters()}]).groups
    empty = reads(lambda m: [{"params": [], "weight_decay": 0.0}, {"params": m.head.weight, "lr": torch.tensor(0.01)}])
    assert [len(g.names) for g in empty.groups] == [0, 1, 6] and empty.groups[1].options == {"lr": 0.01}
    over = reads(lambda m: [{"params": small(m), "weight_decay": 0.0}],
                 lambda m, c: torch.optim.Adagrad(m.parameters(), lr=c.lr))
    assert over.kind is torch.optim.Adagrad and over.groups == one.groups and over.rate(Config()) == 0.1
    own = reads(lambda m: [{"params": small(m), "weight_decay": 0.3}],
                lambda m, c: torch.optim.AdamW(groups_of(m), lr=c.lr))
    assert own.groups[0].options == {"weight_decay": 0.0}  # the optimizer's own groups count first


def test_tied_and_frozen_parameters():
    import torch_models.gpt

    gpt = torch_models.gpt.build(vocab=11, context=8, width=8, depth=1, heads=2, tied=True)
    matrices = [p for p in gpt.parameters() if p.ndim > 1]
    twice = reads(lambda m: [{"params": [*matrices, *matrices[:1]], "weight_decay": 0.5}], model=gpt)
    assert len(twice.groups[0].names) == len(matrices) and len(twice.groups) == 2
    frozen = grouped_torch.build()
    frozen.first[0].weight.requires_grad = False
    waits = reads(lambda m: [{"params": m.first.parameters(), "weight_decay": 0.0}], model=frozen)
    assert waits.frozen == {"first.0.weight": 0} and "first.0.weight" not in waits.groups[0].names
    assert waits.joined(["first.0.weight"]).groups[0].names[-1] == "first.0.weight"
    made = reads(None, lambda m, c: torch.optim.SGD(m.parameters(), lr=c.lr), model=frozen)
    run = solo(RUN, frozen, DATA)
    assert made.kind is torch.optim.SGD and len(run.parts.optimizer.tensors) == 6


def test_fused_kernels_are_the_users_choice():
    def groups(kernel):
        return lambda m: [{"params": m.second.parameters(), "weight_decay": 0.0, **kernel}]

    with pytest.MonkeyPatch.context() as patch:
        for kernel, want in (({}, [True, True]), ({"fused": True}, [True, None]), ({"foreach": False}, [None, None])):
            patch.setattr(grouped_torch, "parameter_groups", groups(kernel))
            run = fitted(solo(replace(RUN, optimizer=Named("SGD", {"momentum": 0.9})), grouped_torch.build(), DATA))
            assert [g["fused"] for g in run.parts.optimizer.optimizer.param_groups] == want


class Kept(torch.optim.SGD):
    """Keeps an argument that its defaults do not tell."""

    def __init__(self, params, lr, every=3):
        super().__init__(params, lr)
        self.every = every


def used(model, config):
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 12)).sum().backward()
    made.step()
    return made


def hooked(model, config):
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.register_step_post_hook(lambda *given: None)
    return made


@pytest.mark.parametrize("groups, optimizer, words", [
    (lambda m: None, None, "parameter_groups gives None"),
    (lambda m: {"params": []}, None, "parameter_groups gives a dict"),
    (lambda m: [m.parameters()], None, "group 0 of parameter_groups is a generator"),
    (lambda m: [{"params": "head"}], None, "params of group 0 of parameter_groups is 'head'"),
    (lambda m: [{"params": ["head"]}], None, "holds 'head'"),
    (lambda m: [{"params": m.head.parameters()}, {"params": m.parameters()}], None, "head.weight is in groups 0 and 1"),
    (lambda m: [{"params": [torch.zeros(3)]}], None, r"shape \(3,\) that is not a parameter of the model"),
    (lambda m: [{"params": m.head.weight, "wieght_decay": 0}], None, "did you mean 'weight_decay'"),
    (lambda m: [{"params": m.head.weight, "momentum": 0.9}], None, "has the option 'momentum'"),
    (lambda m: [{"params": m.head.weight, "weight_decay": "0"}], None, "AdamW refused the options"),
    (lambda m: [{"params": m.head.weight, "lr": -1.0}], None, "lr is -1.0"),
    (lambda: [], None, "parameter_groups of file.py:build does not take 1 arguments"),
    (None, lambda model: None, "optimizer of file.py:build does not take 2 arguments"),
    (None, lambda m, c: 3, "optimizer gives a int"),
    (None, lambda m, c: torch.optim.LBFGS(m.parameters()), "LBFGS, which needs a closure"),
    (None, lambda m, c: torch.optim.SGD(m.head.parameters(), lr=0.1), "lacks 6 of the model's parameters"),
    (None, lambda m, c: Kept(m.parameters(), 0.1, every=4), "its attribute every differs"),
    (None, used, "it has made updates"), (None, hooked, "its hooks would be lost")])
def test_what_is_no_group_or_cannot_be_made_anew_is_refused(groups, optimizer, words):
    with pytest.raises(UserError, match=words):
        reads(groups, optimizer)


def test_zero_refuses_an_optimizer_of_the_file_that_it_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped_torch, "optimizer", lambda m, c: Kept(m.parameters(), 0.1), raising=False)
    with pytest.raises(UserError, match="optimizer Kept, which may need whole tensors"):
        grouped(2, RUN, tmp_path, data_parallel=ZERO)
    assert np.isfinite(grouped(2, RUN, tmp_path)[0].state.loss)


def test_models_of_other_kinds_refuse_both(monkeypatch):
    spec = replace(spec_of(make_model("numpy")), parameter_groups=lambda model: [])
    from hvdtrain.backends.numpy import make_parts

    with pytest.raises(UserError, match="parameter_groups in the file of a model of the numpy backend"):
        make_parts(spec, config(), None, None, 1)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
                                      {"momentum": 0.9, "dampening": 0.3, "maximize": True}])
def test_a_users_sgd_takes_the_same_steps_fused(settings):
    """The third step has a parameter with a momentum and one without, which the kernel cannot update together."""
    torch.manual_seed(0)
    usual = [torch.randn(33, 7, requires_grad=True), torch.randn(5, requires_grad=True)]
    fused = [x.detach().clone().requires_grad_() for x in usual]
    optimizers = [torch.optim.SGD(params, lr=0.1, **settings) for params in (usual, fused)]
    ways = []
    for step in range(4):
        for x, y in list(zip(usual, fused))[:1 if step < 2 else 2]:
            x.grad = torch.randn_like(x)
            y.grad = x.grad.clone()
        optimizers[0].step()
        with updating_fused(optimizers[1]):
            ways.append(optimizers[1].param_groups[0]["fused"])
            optimizers[1].step()
    assert ways == [True, True, None if "momentum" in settings else True, True]
    assert optimizers[1].param_groups[0]["fused"] is None, "state_dict() is the user's"
    assert all(torch.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in zip(usual, fused))


@pytest.mark.parametrize("settings", [{"foreach": False}, {"fused": False}, {"differentiable": True}])
def test_a_kernel_that_the_user_chose_stays(settings):
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1, **settings)
    with updating_fused(optimizer):
        assert not optimizer.param_groups[0]["fused"]
