"""A PyTorch model split over devices: on one CPU as two of them, so that everything but the copies is as on GPUs."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from small_runs import Record, apart, config, fitted, lockstep, make_model, samples, solo, weights  # noqa: E402
from split_models import Chain, Skips, blocks, deep, example, tied  # noqa: E402
from torch import nn  # noqa: E402
from torch_tools import one_thread, spec  # noqa: E402,F401

import torch_models.cnn  # noqa: E402
import torch_models.device_split  # noqa: E402
import torch_models.gpt  # noqa: E402
from hvdtrain.backends.torch import Ops, create_step, placement  # noqa: E402
from hvdtrain.backends.torch.blocks import measure  # noqa: E402
from hvdtrain.backends.torch.pipeline import Pipeline, release  # noqa: E402
from hvdtrain.backends.torch.split import Layout, Placed, check_slots, slots  # noqa: E402
from hvdtrain.cluster.control import SoloControl  # noqa: E402
from hvdtrain.collectives.null import NullCollectives  # noqa: E402
from hvdtrain.config import Checkpoint, Exchange, Named  # noqa: E402
from hvdtrain.errors import UserError  # noqa: E402
from hvdtrain.exchange.buckets import plan_buckets  # noqa: E402
from hvdtrain.exchange.compressors import create  # noqa: E402
from hvdtrain.exchange.reducer import Reducer  # noqa: E402
from hvdtrain.parallel.cut import Cut  # noqa: E402
from hvdtrain.parallel.memory import Block, Needs  # noqa: E402
from hvdtrain.parallel.plan import Plan, agree  # noqa: E402

CPU, META = torch.device("cpu"), torch.device("meta")
BASE = config(global_batch=32, max_steps=12, optimizer=Named("SGD", {"momentum": 0.5}), lr=0.1, control_timeout_s=30.0)
DATA = samples(107)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Runs make their directories there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cpus(monkeypatch):
    """This host's CPU stands for each of a rank's devices."""
    monkeypatch.setattr(placement, "devices", lambda n: [CPU] * n)


def plan_of(named, starts, devices, micros=4):
    made = tuple(Block(name, 1.0, 4, 4) for name, _ in named)
    return Plan(Cut(starts), made, tuple(map(str, devices)), (0,) * len(devices), Needs(micros=micros))


def split_step(model, starts, settings, devices=None, **parts):
    """A step whose cut is given, in place of measured."""
    step = create_step(spec(model, blocks=blocks, **parts), replace(settings, model_parallel=1), SoloControl(), 10)
    step._layout.devices = devices or [CPU] * len(starts)
    step.split(plan_of(blocks(model), starts, step._layout.devices))
    return step


# --- the forward pass ------------------------------------------------------------------------------------------------


def noting(model):
    """The names of the blocks in the order of their calls."""
    calls = []
    for name, block in blocks(model):
        block.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def test_parts_walk_through_the_stages_in_gpipes_order():
    model = deep()
    calls = noting(model)
    stages = [[model.first, model.second], [model.third, model.head]]
    Pipeline(stages, [CPU, CPU], micros=3).install(model)
    model(torch.zeros(7, 12))
    a, b = ["first", "second"], ["third", "head"]
    assert calls == [*a, *a, *b, *a, *b, *b], "stage 0 takes its next part before stage 1 takes the last one"


@pytest.mark.parametrize("samples_B, micros", [(8, 4), (7, 3), (3, 8), (1, 8), (5, 1)])
def test_outputs_and_gradients_are_those_of_the_whole_model(samples_B, micros):
    whole, split = deep(), deep()
    Pipeline([[split.first], [split.second, split.third], [split.head]], [CPU] * 3, micros).install(split)
    x = torch.randn(samples_B, 12)
    fired = {name: 0 for name, _ in split.named_parameters()}
    for name, param in split.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: fired.update({name: fired[name] + 1}))
    for model in (whole, split):
        model(x).square().sum().backward()
    assert set(fired.values()) == {1}, "a gradient is ready once in a backward, however many parts there are"
    for (name, got), want in zip(split.named_parameters(), whole.parameters()):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_copies_only_at_the_cuts(monkeypatch):
    from hvdtrain.backends.torch import pipeline

    seen = []
    monkeypatch.setattr(pipeline, "moved", lambda value, where: seen.append(where) or value.to(where))
    model = deep().to(META)
    Pipeline([[model.first, model.second], [model.third, model.head]], [META, META], micros=2).forward(
        torch.zeros(4, 12, device=META))
    assert len(seen) == 4, "2 parts x (to the first device, at the cut)"


def test_trees_of_tensors_pass_the_cuts():
    class Two(nn.Module):
        def forward(self, pair):
            return {"a": pair[0] + pair[1], "n": [pair[0].sum(1)]}

    class One(nn.Module):
        def forward(self, tree):
            return tree["a"] * tree["n"][0][:, None], tree["n"][0]

    model = Chain(two=Two(), one=One())
    x = (torch.randn(5, 3), torch.randn(5, 3))
    want = model(x)
    Pipeline([[model.two], [model.one]], [CPU, CPU], 2).install(model)
    torch.testing.assert_close(model(x), want)


def test_what_cannot_be_cut_into_parts_says_so():
    pipe = Pipeline([[nn.Identity()], [nn.Identity()]], [CPU, CPU], 2)
    with pytest.raises(UserError, match=r"first dimensions \[2, 3\]"):
        pipe.forward((torch.zeros(2), torch.zeros(3)))
    with pytest.raises(UserError, match="returns a Tensor without samples"):
        Pipeline([[nn.Identity()], [Mean()]], [CPU, CPU], 2).forward(torch.zeros(4, 2))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def test_the_model_is_its_users_again_and_copies_split_their_own_blocks():
    model = deep()
    pipe = Pipeline([[model.first, model.second, model.third], [model.head]], [CPU, CPU], 2)
    pipe.install(model)
    twin = copy.deepcopy(model)
    assert vars(twin)["forward"].__self__.stages[1] == [twin.head] and twin.head is not model.head
    pipe.leave(model)
    assert "forward" not in vars(model)
    release(twin)
    assert "forward" not in vars(twin)
    pipe.devices = [CPU, META]
    vars(model)["forward"] = pipe.forward
    pipe.leave(model)
    assert "forward" in vars(model), "blocks on several devices run only that way"


def test_the_bubble_is_measured_of_one_pass():
    model = deep()
    pipe = Pipeline([[model.first, model.second], [model.third, model.head]], [CPU, CPU], micros=4)
    pipe.install(model)
    assert pipe.bubble() is None
    for _ in range(4):
        model(torch.randn(64, 12)).square().sum().backward()
        model(torch.randn(2, 12)).square().sum().backward()  # fewer parts: not the pass to measure
    assert 0.5 - 1e-9 <= pipe.bubble() < 1, "two stages on one device take turns"


def test_a_first_stage_without_gradients_leaves_the_bubble_unmeasured():
    model = deep()
    model.first.requires_grad_(False)
    pipe = Pipeline([[model.first], [model.second, model.third, model.head]], [CPU, CPU], micros=2)
    pipe.install(model)
    for _ in range(4):
        model(torch.randn(8, 12)).sum().backward()
    assert pipe.bubble() is None


# --- places ----------------------------------------------------------------------------------------------------------


def test_parameters_buckets_and_slots_have_the_place_of_their_stage():
    model = deep()
    step = split_step(model, (0, 2), BASE, devices=[CPU, META])
    found = {s.name: s.place for s in step.params()}
    by_block = {name.split(".")[0]: place for name, place in found.items()}
    assert by_block == {"first": 0, "second": 0, "third": 1, "head": 1}
    assert {p.device for p in model.third.parameters()} == {META}
    assert {p.device for p in model.first.parameters()} == {CPU}
    reducer = Reducer(plan_buckets(step.params(), 16.0), create("int8", BASE), NullCollectives(0, 2), Ops())
    step.attach(reducer)
    assert [b.place for b in reducer.buckets] == [1, 0]
    assert [f.device for f in step._flats] == [META, CPU]
    assert {i: view.device for i, view in step._views.items()} == {
        i: META if p.place else CPU for i, p in enumerate(step.params())}
    for param in step._params:
        param.grad = torch.zeros_like(param)
    step._opt.optimizer.step()
    assert {step._opt.optimizer.state[p]["momentum_buffer"].device for p in model.head.parameters()} == {META}
    check_slots(step._opt.optimizer)
    param = next(model.head.parameters())
    step._opt.optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, device=CPU)
    with pytest.raises(AssertionError, match="momentum_buffer on cpu, its parameter on meta"):
        check_slots(step._opt.optimizer)


def test_a_compressor_works_on_each_buckets_device():
    class Inner:
        name = "inner"

        def exchange(self, ops, flat_N, state, bucket, size, stage):
            assert {ops.device, flat_N.device, state["residual"].device} == {META}
            got = yield "request"
            assert got.device == META
            return got, {"residual": ops.zeros(3, "float32")}

    placed = Placed(Inner(), [CPU, META])
    assert placed.name == "inner"
    bucket = SimpleNamespace(place=1)
    run = placed.exchange(None, torch.zeros(3, device=META), {"residual": torch.zeros(3)}, bucket, 2)
    assert next(run) == "request"
    with pytest.raises(StopIteration) as stop:
        run.send(torch.zeros(3))
    assert stop.value.value[1]["residual"].device == META


@pytest.mark.parametrize("gpus, n, want", [(2, 2, ["cuda:0", "cuda:1"]), (4, 2, ["cuda:0", "cuda:1"]),
                                           (1, 2, ["cpu", "cuda:0"]), (3, 3, ["cuda:0", "cuda:1", "cuda:2"])])
def test_devices_of_a_rank(monkeypatch, gpus, n, want):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert [str(d) for d in placement.devices(n)] == want


def test_a_cpu_stands_in_for_no_gpu_that_is_listed_and_not_shown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    with pytest.raises(UserError, match=r"this rank has 1 GPU \(CUDA_VISIBLE_DEVICES is 0,7\); expected 2 GPUs"):
        placement.devices(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert [str(d) for d in placement.devices(2)] == ["cpu", "cuda:0"]


@pytest.mark.parametrize("gpus, n", [(0, 2), (1, 3), (2, 3)])
def test_too_few_devices_say_how_many(monkeypatch, gpus, n):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError) as caught:
        placement.devices(n)
    assert caught.value.got == f"model_parallel {n}, but this rank has {gpus} GPU{'' if gpus == 1 else 's'}"
    assert f"{n} GPUs for each rank" in caught.value.expected


# --- measuring -------------------------------------------------------------------------------------------------------


def test_blocks_are_measured_and_left_as_they_were():
    model = nn.Sequential(nn.Linear(12, 100), nn.BatchNorm1d(100), nn.Tanh())
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = measure(list(model.named_children()), torch.randn(8, 12), CPU)
    assert [b.name for b in found] == ["0", "1", "2"] and all(b.cost_s > 0 for b in found)
    assert found[0].param_bytes == 4 * 1300 and found[2].param_bytes == 0
    assert found[0].activation_bytes == 8 * 12 * 4, "a linear layer keeps its input"
    assert found[2].activation_bytes == 8 * 100 * 4, "tanh keeps its output"
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("optimizer, want", [
    (Named("SGD"), 0), (Named("SGD", {"momentum": 0.9}), 1), (Named("Adam"), 2), (Named("Adam", {"amsgrad": True}), 3)])
def test_slots_are_counted_as_the_optimizer_makes_them(optimizer, want):
    assert slots(config(optimizer=optimizer)) == want


def test_random_generators_go_on_as_if_nothing_had_been_measured(cpus):
    model = deep(drop=nn.Dropout(0.5))
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    Layout(spec(model, blocks=blocks, example=example), replace(BASE, model_parallel=2)).measure(
        lambda model, batch: model(batch[0]), None, 0, 1, 1,
        lambda batch, where: tuple(torch.from_numpy(a) for a in batch), "fp32")
    assert torch.equal(torch.rand(3), want)


def test_a_cpu_beside_a_gpu_is_given_what_it_can_do(monkeypatch):
    """A GPU that is three times as fast as the CPU before it gets three times the blocks."""
    def costs(named, x, device):
        return tuple(Block(name, 3.0 if device == CPU else 1.0, 4, 4) for name, _ in named)

    monkeypatch.setattr("hvdtrain.backends.torch.blocks.measure", costs)
    monkeypatch.setattr(placement, "devices", lambda n: [CPU, META])
    layout = Layout(spec(deep(), blocks=blocks, example=example), replace(BASE, model_parallel=2))
    found = layout.measure(lambda model, batch: model(batch[0]), None, 0, 1, 1,
                           lambda batch, where: tuple(torch.from_numpy(a) for a in batch), "fp32")
    assert found.speeds == (1.0, 3.0)
    assert agree(found, replace(BASE, model_parallel=2), SoloControl()).cut.starts == (0, 1)


@pytest.mark.parametrize("model, words", [
    (lambda: nn.Sequential(nn.Linear(12, 5)), "model_parallel is 2 and the model has 1 blocks"),
    (lambda: deep(kind=Skips), "do not give what the model gives"),
    (lambda: Unnamed(), "Unnamed, which has no named blocks"),
    (lambda: Loose(), "extra of the model is in none of its blocks"),
], ids=["one block", "skips", "unnamed", "loose"])
def test_what_cannot_be_split_says_so(cpus, model, words):
    built = model()
    parts = {"blocks": None if isinstance(built, (Unnamed, nn.Sequential)) else blocks, "example": example}
    with pytest.raises(UserError, match=words):
        create_step(spec(built, **parts), replace(BASE, model_parallel=2), SoloControl(), 10)


class Trains(Chain):
    """Between its blocks it does something while it trains, and only then."""

    def __init__(self, extra, **named):
        super().__init__(**named)
        vars(self)["extra"] = extra  # no module of its own: not a block either

    def forward(self, x):
        (_, first), *rest = blocks(self)
        x = self.extra(first(x), self)
        for _, block in rest:
            x = block(x)
        return x


def put_between(extra):
    return deep(kind=lambda **named: Trains(extra, **named))


@pytest.mark.parametrize("extra", [
    lambda x, model: nn.functional.dropout(x, 0.5, model.training),
    lambda x, model: nn.Dropout(0.1).train(model.training)(x),
    lambda x, model: x * 2 if model.training else x,
    lambda x, model: x if not model.training or torch.rand(()) < 2 else 0 * x,
], ids=["function", "layer", "factor", "a draw alone"])
def test_what_a_model_does_between_its_blocks_only_while_it_trains_is_refused(cpus, extra):
    with pytest.raises(UserError, match="do not give what the model gives while it trains"):
        create_step(spec(put_between(extra), blocks=blocks, example=example), replace(BASE, model_parallel=2),
                    SoloControl(), 10)


class Leaves(nn.Linear):
    """Leaves something on itself that a task may read."""

    always = True

    def forward(self, x):
        y = super().forward(x)
        if self.always or self.training:
            self.aux = y.square().sum()
        return y


def read_aux(model, batch):
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    return loss + 0.01 * model.extra.aux, len(x)


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Identity()],
                         ids=["dropout", "batchnorm", "nothing"])
def test_a_task_that_reads_what_a_forward_pass_left_on_a_block_is_refused(cpus, between):
    def step(settings, task, **extra):
        return create_step(spec(deep(between=between, **extra), blocks=blocks, example=example, task=task),
                           replace(settings, model_parallel=2), SoloControl(), 10)

    with pytest.raises(UserError, match="in one part and .* in two.*split_micro_batches: 1"):
        step(BASE, read_aux, extra=Leaves(16, 16))
    only_training = Leaves(16, 16)
    only_training.always = False
    with pytest.raises(UserError, match="in one part and .* in two"):
        step(BASE, read_aux, extra=only_training)
    step(replace(BASE, split_micro_batches=1), read_aux, extra=Leaves(16, 16))
    made = step(BASE, lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])), extra=Leaves(16, 16))
    assert all(m.training for m in made.model.modules()) and "forward" in vars(made.model)


def test_buffers_that_each_part_changes_are_named(cpus):
    def made(*layers):
        torch.manual_seed(0)
        return nn.Sequential(nn.Unflatten(1, (3, 4)), *layers, nn.Flatten(), nn.Linear(12, 5))

    model = made(nn.InstanceNorm1d(3, track_running_stats=True), nn.utils.parametrizations.spectral_norm(
        nn.Linear(4, 4)), nn.BatchNorm1d(3))
    before = {n: b.clone() for n, b in model.named_buffers()}
    step = create_step(spec(model, example=example), replace(BASE, model_parallel=2), SoloControl(), 10)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers()), "measuring leaves no trace"
    assert "buffers of 1 (InstanceNorm1d), 2.parametrizations.weight.0 (_SpectralNorm) change with each part of a " \
           "micro-batch" in step.caveats() and "BatchNorm takes" in " ".join(step._layout.caveats())
    quiet = create_step(spec(made(), example=example), replace(BASE, model_parallel=2), SoloControl(), 10)
    assert quiet._layout.caveats() == []


class Unnamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(12, 5)


class Loose(Chain):
    def __init__(self):
        super().__init__(first=nn.Linear(12, 12), head=nn.Linear(12, 5))
        self.extra = nn.Parameter(torch.zeros(1))


def test_a_matrix_of_two_stages_is_refused_and_of_one_stage_is_not():
    with pytest.raises(UserError, match="blocks second and third share a parameter or buffer and fall on two devices"):
        split_step(tied(), (0, 2), BASE)
    split_step(tied(), (0, 1), BASE)


def test_sync_batchnorm_in_parts_is_refused(cpus):
    with pytest.raises(UserError, match="split_micro_batches: 1"):
        solo(replace(BASE, model_parallel=2, sync_batchnorm=True), deep(), DATA)


# --- whole runs ------------------------------------------------------------------------------------------------------


def trained(settings, model=None, data=DATA):
    return fitted(solo(settings, model or deep(), data))


@pytest.mark.parametrize("changes", [
    {},
    {"optimizer": Named("Adam"), "lr": 1e-2},
    {"accumulate": 2, "micro_batch": 7, "clip_norm": 0.05},
    {"split_micro_batches": 3, "nan_guard": "skip"},
    {"split_micro_batches": 1},
], ids=["momentum", "adam", "accumulate and clip", "three parts", "one part"])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_split_model_follows_the_whole_one(cpus, devices, changes):
    settings = replace(BASE, **changes)
    whole, split = trained(settings), trained(replace(settings, model_parallel=devices))
    assert apart(weights(split), weights(whole)) < 1e-5
    assert split.step.table.startswith(f"model split over {devices} devices") and whole.step.table == ""
    assert split.state.metrics == pytest.approx(whole.state.metrics)
    assert "forward" not in vars(split.spec.model), "the model is its user's again"


def test_blocks_are_measured_with_the_runs_own_data(cpus):
    """The example of mlp.py has 64 values a sample, this model and these data 12."""
    whole, split = trained(BASE, make_model("torch")), trained(replace(BASE, model_parallel=2), make_model("torch"))
    assert apart(weights(split), weights(whole)) < 1e-5


def test_a_sequential_is_split_by_its_children(cpus):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))

    whole, split = trained(BASE, build()), trained(replace(BASE, model_parallel=3), build())
    assert apart(weights(split), weights(whole)) < 1e-5
    assert split.step.describe()["split"].startswith("0 | 1 | 2 on cpu, cpu, cpu")


def test_a_model_is_split_again_wherever_the_run_before_has_left_it(cpus):
    model, whole = deep(), deep()
    trained(replace(BASE, max_steps=5, model_parallel=2), model)
    kept = Pipeline([[model.first], [model.second, model.third, model.head]], [CPU, CPU], 2)
    kept.install(model)  # as it stays after a run on two GPUs
    trained(replace(BASE, max_steps=5, model_parallel=3), model)
    assert "forward" not in vars(model)
    for _ in range(2):
        trained(replace(BASE, max_steps=5), whole)
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)


def test_joint_batchnorm_where_a_split_model_computes_in_one_part(cpus):
    settings = replace(BASE, sync_batchnorm=True, split_micro_batches=1)
    build = lambda rank=0: deep(norm=nn.BatchNorm1d(16))  # noqa: E731
    runs = lockstep(2, replace(settings, model_parallel=2, shares=[3, 1]), build, DATA, fitted)
    want = weights(trained(settings, build()))
    assert all(apart(weights(run), want) < 1e-5 for run in runs)


def test_a_keras_model_on_pytorch_is_not_split():
    model = type("Model", (nn.Module,), {"__module__": "keras.src.models.model"})()
    with pytest.raises(UserError, match="a Keras model on PyTorch"):
        create_step(spec(model), replace(BASE, model_parallel=2), SoloControl(), 10)


def test_devices_that_finish_buckets_at_once_hand_them_over_one_by_one():
    """In backward each device has a thread of autograd's, and hooks run in it."""
    step = split_step(deep(), (0, 2), BASE)
    step.attach(Reducer(plan_buckets(step.params(), 0.0), create("none", BASE), NullCollectives(0, 2), Ops()))
    step.zero()
    step._last, inside, most = True, [], []

    def start(bucket, flat_N):
        inside.append(bucket)
        most.append(len(inside))
        time.sleep(0.02)
        inside.remove(bucket)

    step._reducer.start = start
    hooks = [(step._hook(b.index, i), step._params[i]) for b in step._reducer.buckets for i in b.params]
    threads = [threading.Thread(target=hook, args=(param,)) for hook, param in hooks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [1] * len(hooks)


@pytest.mark.parametrize("cut", [[1, 1], [3, 1], [0, 1]], ids=["equal", "unequal", "one with nothing"])
@pytest.mark.parametrize("changes", [
    {},
    {"compression": "topk", "exchange": Exchange(topk_ratio=1.0, bucket_mb=0.0005)},
], ids=["plain", "compressed"])
def test_hybrid_two_ranks_of_two_devices_equal_one_of_one(cpus, cut, changes):
    """topk that sends every entry loses nothing, so that law 2 holds to 1e-5 through a compressor with state."""
    settings = replace(BASE, max_steps=20, shares=cut, model_parallel=2, **changes)
    runs = lockstep(2, settings, lambda rank: deep(), DATA, fitted)
    want = weights(trained(replace(BASE, max_steps=20)))
    for run in runs:
        assert apart(weights(run), want) < 1e-5
        assert {b.place for b in run.reducer.buckets} == {0, 1} and run.reducer.compressor.name == settings.compression
    np.testing.assert_array_equal(runs[0].step.table, runs[1].step.table)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_hybrid_with_narrow_gradients_equals_ranks_that_are_not_split(cpus, name):
    settings = replace(BASE, compression=name, shares=[3, 1])
    split = lockstep(2, replace(settings, model_parallel=2), lambda rank: deep(), DATA, fitted)
    whole = lockstep(2, settings, lambda rank: deep(), DATA, fitted)
    assert apart(weights(split[1]), weights(whole[0])) < 2e-3, "a rounding may fall to the other side"
    assert apart(weights(split[0]), weights(split[1])) == 0


def test_gpt_with_its_own_task_and_a_whole_number_input(cpus):
    x = np.random.default_rng(0).integers(0, 96, (48, 64))
    data = (x, np.concatenate([x[:, 1:], np.full((48, 1), -1)], axis=1))
    settings = replace(BASE, max_steps=3, global_batch=16, metrics=[])

    def build():
        torch.manual_seed(0)
        return torch_models.gpt.build(width=16, depth=2, heads=2)

    whole, split = trained(settings, build(), data), trained(replace(settings, model_parallel=2), build(), data)
    assert apart(weights(split), weights(whole)) < 1e-5


def test_batchnorm_takes_each_part_and_says_so(cpus):
    x, y = np.random.default_rng(0).random((34, 8, 8), dtype=np.float32), np.arange(34) % 10
    model = torch_models.cnn.build(channels=(4, 4), norm="batch")
    run = solo(replace(BASE, max_steps=4, model_parallel=2), model, (x, y))
    said = "BatchNorm takes its statistics over each part of a micro-batch"
    assert said in run.step.caveats() and run.step.table.endswith(said)
    counts = []
    run.spec.model.conv_0.norm.register_forward_hook(lambda m, args, out: counts.append(len(args[0])))
    fitted(run)
    assert min(counts) >= 2, "never one sample, of which there are no statistics"


def test_dropout_in_a_split_model_trains_and_repeats(cpus):
    settings = replace(BASE, model_parallel=2)
    build = lambda: deep(drop=nn.Dropout(0.3))  # noqa: E731
    assert "dropout draws differ with the parts of a micro-batch" in solo(settings, build(), DATA).step.table
    assert apart(weights(trained(settings, build())), weights(trained(settings, build()))) < 1e-5


@pytest.mark.parametrize("own", ["bf16", "fp16"])
def test_16_bits_in_a_split_model(cpus, own):
    settings = replace(BASE, precision=own, loss_scale=1024.0)
    whole, split = trained(settings), trained(replace(settings, model_parallel=2))
    assert apart(weights(split), weights(whole)) < 2e-2
    assert split.step.scale.on is (own == "fp16")


def test_a_step_that_is_not_finite_is_left_out_of_a_split_model(cpus):
    x, y = np.copy(DATA[0]), DATA[1]
    x[5] = np.nan
    runs = []
    for devices in (1, 2):
        record = Record()
        run = solo(replace(BASE, model_parallel=devices, nan_guard="skip"), deep(), (x, y))
        run.callbacks.insert(0, record)
        runs.append((fitted(run), record.non_finite_at))
    assert runs[0][1] == runs[1][1] != []
    assert apart(weights(runs[1][0]), weights(runs[0][0])) < 1e-5


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3), (2, 2)])
def test_a_checkpoint_goes_on_with_another_number_of_devices(cpus, tmp_path, before, after):
    settings = replace(BASE, out=str(tmp_path), optimizer=Named("Adam"), lr=1e-2)
    trained(replace(settings, max_steps=5, model_parallel=before, checkpoint=Checkpoint(at_end=True)))
    run = trained(replace(settings, max_steps=12, model_parallel=after, resume="auto"))
    want = trained(replace(settings, out=str(tmp_path / "whole"), max_steps=12))
    assert run.state.cursor.step == 12 and apart(weights(run), weights(want)) < 1e-5
    files = run.step.export(tmp_path)
    saved = torch.load(tmp_path / files[1], weights_only=True)
    assert saved.keys() == deep().state_dict().keys()
    assert all(torch.equal(saved[n], t) for n, t in run.spec.model.state_dict().items())


def test_a_rank_whose_file_cannot_be_split_ends_all_ranks_alike(cpus):
    def work(run):
        raise AssertionError("no run is to come of it")

    with pytest.raises(UserError, match="rank 1 on host .* do not give what the model gives"):
        lockstep(2, replace(BASE, model_parallel=2), lambda rank: deep(kind=(Chain, Skips)[rank]), DATA, work)


def test_the_twin_of_the_seeds_example_trains_by_hand(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    losses = torch_models.device_split.main(steps=5, B=32)
    out = capsys.readouterr().out
    assert losses[-1] < losses[0] and "Two devices need a GPU" in out and "second.weight (10, 512) on cpu" in out


def test_the_seeds_example_in_two_stages(cpus):
    data = torch_models.device_split.example(64)
    whole = trained(replace(BASE, max_steps=4), built(), data)
    split = trained(replace(BASE, max_steps=4, model_parallel=2), built(), data)
    assert apart(weights(split), weights(whole)) < 1e-5
    assert [s.place for s in split.step.params()] == [0, 0, 1, 1]
    described = split.step.describe()
    assert described["device"] == "cpu, cpu" and described["split"].startswith("first | second on cpu, cpu")
    assert "predicted" in described["bubble"] and "measured" in described["bubble"]


def built():
    torch.manual_seed(1)
    return torch_models.device_split.build(hidden=32)
