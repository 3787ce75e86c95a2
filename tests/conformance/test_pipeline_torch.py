"""A PyTorch model that is cut over ranks, on ranks that are threads: the curve of one process, and what is refused."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import split_models  # noqa: E402
from small_runs import CLASSES, FEATURES, HIDDEN, apart, config, fitted, lockstep, samples, solo  # noqa: E402
from split_models import Chain, Skips, deep, tied  # noqa: E402
from torch import nn  # noqa: E402
from torch_tools import one_thread  # noqa: E402,F401

from hvdtrain.backends.model_spec import Spec  # noqa: E402
from hvdtrain.backends.torch.pipelined import measuring  # noqa: E402
from hvdtrain.backends.torch.pipelined.stage import Cut, is_cut, take_out  # noqa: E402
from hvdtrain.config import Named, PipelineConfig  # noqa: E402
from hvdtrain.core.comparison import LEAST  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

SGD = Named("SGD", {"momentum": 0.9})
ADAM = Named("Adam", {"eps": 1e-3})
BASE = config(max_steps=20, global_batch=24, lr=0.05, optimizer=SGD)
DATA = samples(100)
"""Four global batches and one of four samples, of which some micro-batches have none."""


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Run each test in a directory of its own."""
    monkeypatch.chdir(tmp_path)


def trained(size, model, data=DATA, settings=BASE, work=fitted, **changes) -> tuple[dict[str, Any], list[Any]]:
    """All ranks' model arrays by name, the same wherever two ranks have one, and the runs."""
    runs = lockstep(size, replace(settings, **changes), lambda rank: model(), data, work)
    held: dict[str, Any] = {}
    for run in runs:
        for name, array in run.parts.state.state()[0]["model"].items():
            assert name not in held or (held[name] == array).all(), name
            held[name] = array
    return held, runs


def same_curve(model, cut, data=DATA, settings=BASE, within=LEAST, also=None, **changes):
    """Train on one rank and on ``cut`` = (ranks, section), there with ``also``; compare, and return the latter's
    runs by place."""
    want, (alone,) = trained(1, model, data, settings, **changes)
    got, runs = trained(cut[0], model, data, settings, pipeline=cut[1], **changes, **(also or {}))
    assert sorted(got) == sorted(want)
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < within
    for run in runs:
        assert run.state.loss == pytest.approx(alone.state.loss, rel=1e-5)
        assert run.state.metrics == pytest.approx(alone.state.metrics, rel=1e-5)
    return sorted(runs, key=lambda run: (run.mesh.copy, run.mesh.place))


@pytest.fixture(scope="module", name="tokens")
def all_tokens():
    x = np.random.default_rng(0).integers(0, 20, (100, 8))
    y = np.concatenate([x[:, 1:], np.full((100, 1), -1)], axis=1)
    y[np.arange(100), np.random.default_rng(1).integers(1, 8, 100)] = -1  # samples weigh differently
    return x, y


def gpt():
    import torch_models.gpt

    torch.manual_seed(3)
    return torch_models.gpt.build(vocab=20, context=8, width=16, depth=3, heads=2)


# --- the curve of one process ----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("size", "cut", "changes"), [
    (3, PipelineConfig(3, "gpipe"), {}), (4, PipelineConfig(2), {"shares": [3, 1]})], ids=str)
def test_named_blocks_have_the_curve_of_one_process(size, cut, changes):
    for run in same_curve(lambda: deep(3), (size, cut), also=changes, optimizer=ADAM):
        own = {name.partition(".")[0] for name, _ in run.parts.model.named_parameters()}
        assert own == {run.parts.layout.names[i] for i in run.parts.layout.blocks}


def test_a_transformer_whose_tokens_weigh_in_four_stages(tokens):
    runs = same_curve(gpt, (4, PipelineConfig(4, cut=["block_0", "block_1", "block_2"])), tokens, metrics=[])
    assert [run.parts.layout.blocks for run in runs] == [[0], [1], [2], [3, 4]]
    assert [run.parts.stage.most_held for run in runs] == [4, 3, 2, 1]


class Fork(nn.Module):
    """Gives a tree: tensors with and without a gradient, one not in order, integers, a flag, one that nobody uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, width)

    def forward(self, x):
        y = self.linear(x)
        laid = y.t().contiguous().t()
        return {"y": laid, "rest": [(x[:, :3] > 0).long(), y.detach().sign(), y * 2], "skip": (x, y > 0, None, 2.0)}


class Join(nn.Module):

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, tree):
        (at, sign, _), (x, positive, none, two) = tree["rest"], tree["skip"]
        assert none is None and positive.dtype is torch.bool and two == 2.0
        assert tree["y"].stride() == (1, len(x)) or len(x) < 2, "as it lay where it was made"
        y = torch.where(positive, tree["y"], tree["y"] * 0.1) + 0.01 * sign
        return self.linear(y) + x[:, :1] + at.sum(1, keepdim=True)


class InPlace(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x.mul_(0.5).relu_())


def forked():
    torch.manual_seed(1)
    return Chain(fork=Fork(HIDDEN), join=Join(HIDDEN, HIDDEN), bend=nn.Softsign(), inplace=InPlace(HIDDEN),
                 head=nn.Linear(HIDDEN, CLASSES))


def test_trees_of_tensors_travel_and_blocks_may_write_to_what_came():
    """The model has a stage without parameters."""
    same_curve(forked, (5, PipelineConfig(5)), clip_norm=0.05)


def test_a_sequential_of_sequentials_needs_no_names():
    """A block with a hook is not taken apart."""
    def model():
        torch.manual_seed(1)
        inner, hooked = (nn.Sequential(nn.Linear(n, HIDDEN), nn.Tanh()) for n in (FEATURES, HIDDEN))
        hooked.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))
        return nn.Sequential(OrderedDict(body=inner, hooked=hooked, last=nn.Linear(HIDDEN, CLASSES)))

    runs = same_curve(model, (3, PipelineConfig(3, cut=["body.1", "last"])), max_steps=3)
    assert runs[0].parts.layout.names == ("body.0", "body.1", "hooked", "last")


# --- what is refused -------------------------------------------------------------------------------------------------

def plain():
    """Has no blocks, so `split_models.blocks` must not be a name of this module, where it would be found."""
    torch.manual_seed(1)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(HIDDEN, CLASSES)
            self.first = nn.Linear(FEATURES, HIDDEN)

        def forward(self, x):
            return self.last(self.first(x))

    return Plain()


def outside():
    model = deep()
    model.register_parameter("more", nn.Parameter(torch.ones(3)))
    return model


@pytest.mark.parametrize(("model", "changes", "said"), [
    (plain, {}, "has no named blocks, and whose children"),
    (lambda: deep(kind=Skips), {}, "give an output that differs from the model's"),
    (outside, {}, "more of the model is in none of its blocks"),
    (tied, {"pipeline": PipelineConfig(2, cut=["third"])}, "blocks second and third share a parameter"),
    (deep, {"sync_batchnorm": True}, "sync_batchnorm with a pipeline"),
    (deep, {"compile": "auto"}, "compile: auto with a pipeline"),
    (deep, {"pipeline": PipelineConfig(5)}, "has 4 blocks.*for 5 stages"),
], ids=lambda value: getattr(value, "__name__", None))
def test_what_cannot_be_cut_is_refused_on_every_rank(model, changes, said):
    settings = replace(BASE, **{"pipeline": PipelineConfig(2), **changes})
    with pytest.raises(UserError, match=said):
        trained(settings.pipeline.stages, model, settings=settings)


# --- what a stage has beside its gradients ---------------------------------------------------------------------------

def noisy(seed=0):
    torch.manual_seed(seed)
    return Chain(first=nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU()),
                 second=nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(inplace=True)),
                 head=nn.Linear(HIDDEN, CLASSES))


def test_statistics_are_those_of_one_process_with_the_same_micro_batches():
    want, _ = trained(1, noisy, samples(96), accumulate=8, max_steps=8)
    got, runs = trained(2, noisy, samples(96), pipeline=PipelineConfig(2, cut=["second"]), max_steps=8)
    assert sorted(got) == sorted(want) and "second.1.running_var" in got
    assert apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)]) < LEAST
    assert any("BatchNorm" in note for run in runs for note in run.notes)


def test_copies_have_one_mean_of_their_statistics():
    """`trained` holds that a block has the same arrays on all ranks that have it."""
    def meeting(run):
        fitted(run).parts.buffers.sync()
        return run

    got, runs = trained(4, noisy, samples(96), pipeline=PipelineConfig(2, cut=["second"], micro_batches=3), max_steps=8,
                        shares=[2, 1], work=meeting)
    assert got["second.1.num_batches_tracked"] == 24 and len(runs) == 4
    with pytest.raises(UserError, match="1 sample on rank 0 in the last step of an epoch with BatchNorm"):
        trained(2, noisy, samples(97), pipeline=PipelineConfig(2, cut=["second"]))


@pytest.mark.parametrize("metric", [["accuracy"], []])
def test_evaluation_goes_through_all_stages(metric):
    data = DATA, samples(50, 1)
    runs = same_curve(lambda: deep(3), (3, PipelineConfig(3)), data, max_steps=6, metrics=metric, eval_every=1)
    assert set(runs[0].state.metrics) == {"loss", *metric}


def test_blocks_that_are_recomputed_change_no_bit_but_keep_less():
    cut = PipelineConfig(2, cut=["block_1"])
    settings = replace(BASE, metrics=[], max_steps=5)
    x = np.random.default_rng(0).integers(0, 20, (40, 8))
    data = x, np.roll(x, -1, axis=1)
    plain, _ = trained(2, gpt, data, settings, pipeline=cut)
    again, runs = trained(2, gpt, data, settings, pipeline=cut, remat=["block_0", "block_2"])
    for name, array in plain.items():
        assert (again[name] == array).all()
    assert sorted(run.parts.remat.chosen for run in runs) == [("block_0",), ("block_2",)]
    with pytest.raises(UserError, match="block_9"):
        trained(2, gpt, data, settings, pipeline=cut, remat=["block_9"])


def test_dropout_needs_no_agreement():
    def model():
        return deep(3, drop=nn.Dropout(0.5))

    _, runs = trained(2, model, pipeline=PipelineConfig(2), max_steps=6)
    assert np.isfinite(runs[0].state.loss) and any("dropout" in note for note in runs[0].notes)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16:fp32", "fp32:bf16"])
def test_ranks_compute_in_their_own_types(precision):
    want, _ = trained(1, lambda: deep(3))
    got, runs = trained(2, lambda: deep(3), pipeline=PipelineConfig(2, cut=["third"]), precision=precision,
                        loss_scale=1024.0)
    distance = apart([got[n] for n in sorted(got)], [want[n] for n in sorted(want)])
    assert 1e-6 < distance < 3e-2
    if "fp16" in precision:
        assert {run.parts.scale.of(run.control.rank) for run in runs} == {1024.0}


def test_a_float16_overflow_leaves_the_step_out_on_all_stages():
    got, runs = trained(2, lambda: deep(3), pipeline=PipelineConfig(2, cut=["third"]), precision="fp16",
                        loss_scale=2.0**24,
                        max_steps=12)
    assert len({run.parts.scale.value for run in runs}) == 1 and runs[0].parts.scale.skipped > 0
    assert runs[0].parts.scale.value < 2.0**24 and all(np.isfinite(a).all() for a in got.values())


def test_a_nan_is_told_with_the_parameter_and_the_rank_that_it_began_on():
    x, y = DATA
    x = x.copy()
    x[30, 3] = np.nan
    with pytest.raises(UserError, match="not finite at step.*first there: .*the gradient of") as told:
        trained(2, lambda: deep(3), (x, y), pipeline=PipelineConfig(2, cut=["third"]))
    assert "first.0.weight" in str(told.value) and "third.weight" not in str(told.value)


def test_what_a_micro_batch_has_kept_is_freed_after_its_backward():
    import gc
    import weakref

    alive: list[weakref.ref] = []
    most = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            alive.append(weakref.ref(ctx))
            most.append(sum(ref() is not None for ref in alive))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Watch(nn.Linear):
        def forward(self, x):
            return super().forward(Watched.apply(x))

    def model():
        torch.manual_seed(1)
        return Chain(first=nn.Linear(FEATURES, HIDDEN), middle=Watch(HIDDEN, HIDDEN), head=nn.Linear(HIDDEN, CLASSES))

    def work(run):
        most.clear()
        gc.disable()
        try:
            return fitted(run)
        finally:
            gc.enable()

    trained(3, model, pipeline=PipelineConfig(3), max_steps=3, work=work)
    assert len(most) == 36 and max(most) <= 3


# --- tasks -----------------------------------------------------------------------------------------------------------

def summed(outputs, y):
    return nn.functional.cross_entropy(outputs, y, reduction="sum")


class Leaves(nn.Linear):
    """Leaves an auxiliary loss on itself."""

    def forward(self, x):
        y = super().forward(x)
        self.left = y.pow(2).sum()
        return y


TASKS = {
    "good": (lambda model, batch: (summed(model(batch[0]), batch[1]), len(batch[1])), None),
    "mode": (lambda model, batch: (summed(model(batch[0] * (2 if model.training else 1)), batch[1]), len(batch[1])),
             None),
    "penalty": (lambda model, batch: (summed(model(batch[0]), batch[1]) + model.third.weight.pow(2).sum(), 1),
                "task reads parameters"),
    "detached": (lambda model, batch: (summed(model(batch[0]), batch[1])
                                       + sum(p.detach().abs().sum() for p in model.parameters()), 1),
                 "with other parameters and the same outputs"),
    "auxiliary": (lambda model, batch: (summed(model(batch[0]), batch[1]) + model.leaves.left, 1),
                  "with other parameters and the same outputs"),
    "random": (lambda model, batch: (summed(model(batch[0] + torch.rand(1)), batch[1]), 1), "draws random numbers"),
    "twice": (lambda model, batch: (summed(model(batch[0]) + model(batch[0]), batch[1]), 1), "calls the model 2 times"),
    "never": (lambda model, batch: (batch[0].sum(), 1), "gives no call to a partitioned model"),
    "two": (lambda model, batch: (model(batch[0], batch[1]).sum(), 1), "gives 2 arguments to a partitioned model"),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_may_use_the_batch_and_the_outputs_alone(name):
    task, said = TASKS[name]
    model = deep(leaves=Leaves(HIDDEN, HIDDEN))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    batches = [tuple(map(torch.from_numpy, samples(6, seed))) for seed in (1, 2)]
    spec = Spec("m", model, "torch", task=task, blocks=split_models.blocks)
    with contextlib.nullcontext() if said is None else pytest.raises(UserError, match=said):
        measuring.check(spec, measuring.chain(spec), task, *batches)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_what_a_task_seeks_on_another_rank_is_told():
    model = deep()
    take_out(model, split_models.blocks(model), [2, 3])
    assert not hasattr(model.first, "weight") and is_cut(model)
    with pytest.raises(UserError, match="block second of the model is on another rank.*its weight was asked for"):
        model.second.weight
    with pytest.raises(UserError, match="an earlier pipeline run.*Build the model again"):
        solo(config(), model, samples(20))
    with pytest.raises(UserError, match="block first of the model is on another rank.*it was called"):
        model(torch.zeros(1, FEATURES))
    Cut(model)
    with pytest.raises(UserError, match="a call of Chain, of which this rank of a pipeline has only some blocks"):
        model(torch.zeros(1, FEATURES))
