"""A PyTorch model partitioned over devices: one CPU as two devices, so that all but the copies is as on GPUs."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from split_models import Chain, blocks, deep  # noqa: E402
from split_torch_tools import BASE, CPU, DATA, META, all_cpu, elsewhere, plan_of, replicated, split_parts  # noqa: E402,F401
from torch import nn  # noqa: E402
from torch_tools import one_thread, spec  # noqa: E402,F401

from hvdtrain.backends.torch import Ops, placement  # noqa: E402
from hvdtrain.backends.torch.optimizer import check_slots  # noqa: E402
from hvdtrain.backends.torch.pipelined.over_devices import OverDevices, release  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.comm.compressors.base import Stateless  # noqa: E402
from hvdtrain.comm.reducer.reducer import Reducer  # noqa: E402
from hvdtrain.core.buckets import plan_buckets  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.protocols import AllReduce, ParamSpec  # noqa: E402


def noting(model):
    """Return the names of the blocks in the order of their calls."""
    calls = []
    for name, block in blocks(model):
        block.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def test_parts_walk_through_the_stages_in_gpipes_order():
    model = deep()
    calls = noting(model)
    stages = [[model.first, model.second], [model.third, model.head]]
    OverDevices(stages, [CPU, CPU], micros=3).install(model)
    model(torch.zeros(7, 12))
    a, b = ["first", "second"], ["third", "head"]
    assert calls == [*a, *a, *b, *a, *b, *b], "stage 0 takes its next part before stage 1 takes the last one"


@pytest.mark.parametrize("samples_B, micros", [(8, 4), (7, 3), (3, 8), (1, 8), (5, 1)])
def test_outputs_and_gradients_are_those_of_the_whole_model(samples_B, micros):
    whole, split = deep(), deep()
    OverDevices([[split.first], [split.second, split.third], [split.head]], [CPU] * 3, micros).install(split)
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
    from hvdtrain.backends.torch.pipelined import over_devices

    seen = []
    monkeypatch.setattr(over_devices, "moved", lambda value, where: seen.append(where) or value.to(where))
    model = deep().to(META)
    OverDevices([[model.first, model.second], [model.third, model.head]], [META, META], micros=2).forward(
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
    OverDevices([[model.two], [model.one]], [CPU, CPU], 2).install(model)
    torch.testing.assert_close(model(x), want)


def test_what_cannot_be_cut_into_parts_says_so():
    pipe = OverDevices([[nn.Identity()], [nn.Identity()]], [CPU, CPU], 2)
    with pytest.raises(UserError, match=r"first dimensions \[2, 3\]"):
        pipe.forward((torch.zeros(2), torch.zeros(3)))
    with pytest.raises(UserError, match="returns a Tensor without samples"):
        OverDevices([[nn.Identity()], [Mean()]], [CPU, CPU], 2).forward(torch.zeros(4, 2))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def test_the_model_is_its_users_again_and_copies_split_their_own_blocks():
    model = deep()
    pipe = OverDevices([[model.first, model.second, model.third], [model.head]], [CPU, CPU], 2)
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
    pipe = OverDevices([[model.first, model.second], [model.third, model.head]], [CPU, CPU], micros=4)
    pipe.install(model)
    assert pipe.bubble() is None
    for _ in range(4):
        model(torch.randn(64, 12)).square().sum().backward()
        model(torch.randn(2, 12)).square().sum().backward()  # fewer parts: not the pass to measure
    assert 0.5 - 1e-9 <= pipe.bubble() < 1, "two stages on one device take turns"


def test_a_first_stage_without_gradients_leaves_the_bubble_unmeasured():
    model = deep()
    model.first.requires_grad_(False)
    pipe = OverDevices([[model.first], [model.second, model.third, model.head]], [CPU, CPU], micros=2)
    pipe.install(model)
    for _ in range(4):
        model(torch.randn(8, 12)).sum().backward()
    assert pipe.bubble() is None


# --- places ----------------------------------------------------------------------------------------------------------


def test_parameters_buckets_and_slots_have_the_place_of_their_stage():
    model = deep()
    parts = split_parts(model, (0, 2), BASE, devices=[CPU, META])
    found = {s.name: s.place for s in parts.params.specs}
    by_block = {name.split(".")[0]: place for name, place in found.items()}
    assert by_block == {"first": 0, "second": 0, "third": 1, "head": 1}
    assert {p.device for p in model.third.parameters()} == {META}
    assert {p.device for p in model.first.parameters()} == {CPU}
    dp = replicated(parts, 16.0, "int8")
    parts.stage.connect(dp)
    assert [b.place for b in dp.buckets] == [1, 0]
    parts.stage.begin()
    parts.stage.nothing(dp)
    assert [p.grad.device for p in parts.params.tensors] == [META if p.place else CPU for p in parts.params.specs]
    optimizer = parts.optimizer.optimizer
    optimizer.step()
    assert {optimizer.state[p]["momentum_buffer"].device for p in model.head.parameters()} == {META}
    check_slots(optimizer)
    param = next(model.head.parameters())
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, device=CPU)
    with pytest.raises(AssertionError, match="momentum_buffer on cpu, its parameter on meta"):
        check_slots(optimizer)


def test_a_compressor_works_on_each_buckets_device():
    class Summing(Stateless):
        name = "summing"

        def init(self, ops, bucket):
            return {"residual": ops.zeros(bucket.n, "float32")}

        def exchange(self, ops, flat_N, state, bucket, size, stage=0):
            want = [CPU, META][bucket.place]
            assert {ops.device, flat_N.device, state["residual"].device} == {want}
            got = yield AllReduce(torch.zeros(bucket.n))
            assert got.device == want
            return got, {"residual": ops.zeros(bucket.n, "float32")}

    class OnHost(NullCollectives):
        host = True

    plan = plan_buckets([ParamSpec(f"p{i}", (3,), "float32", i) for i in range(2)], 1)
    reducer = Reducer(plan, Summing(), OnHost(0, 2), Ops(CPU), [Ops(CPU), Ops(META)])
    for bucket in plan:
        reducer.start(bucket.index, torch.zeros(3, device=[CPU, META][bucket.place]))
    reducer.finish()
    assert [s["residual"].device for s in reducer.state.all()] == [[CPU, META][b.place] for b in plan]


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
