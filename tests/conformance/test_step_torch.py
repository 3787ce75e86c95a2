"""The PyTorch step: against a plain PyTorch loop, and against itself under other cuts."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402
from torch_tools import (  # noqa: E402,F401
    SGD, TwoRanksInOne, attached, batch, close, cut, mlp, one_thread, plain, run, spec, tied, weights,
)

from hvdtrain.backends.torch import Ops, create_step  # noqa: E402
from hvdtrain.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.collectives.null import NullCollectives  # noqa: E402
from hvdtrain.config import Config, Named, Schedule  # noqa: E402
from hvdtrain.exchange.buckets import plan_buckets  # noqa: E402
from hvdtrain.exchange.compressors.none import NoCompression  # noqa: E402
from hvdtrain.exchange.reducer import Reducer  # noqa: E402

CUTS = [((32,),), ((20,), (12,)), ((0,), (32,)), ((7, 6), (0,), (19,)), ((1,), (30, 1), (0,))]

OPTIMIZERS = {"sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}), "adam": (torch.optim.Adam, {}),
              "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1})}


@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop_bit_for_bit(name, micros, wire):
    """Gradients as autograd leaves them and as views of buckets: the same bits as without hvdtrain."""
    make, args = OPTIMIZERS[name]
    want = mlp()
    kernel = {"fused": True} if name == "sgd" else {}  # which hvdtrain asks for on a CPU
    plain(want, make(want.parameters(), lr=0.01, **args, **kernel), micros=micros)
    step = attached(mlp(), Config(optimizer=Named(name, args), lr=0.01), wire())
    for t in range(20):
        run(step, cut(batch(t), *[32 // micros] * micros), 1 / 32)
    close(weights(step), weights(want), 0)


@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
@pytest.mark.parametrize("clip", [0.05, 0.5, 100.0])
def test_clipping_is_torchs(clip, wire):
    want = mlp()
    plain(want, torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9), clip=clip)
    step = attached(mlp(), SGD, wire())
    for t in range(20):
        run(step, [batch(t)], 1 / 32, clip=clip)
    close(weights(step), weights(want), 1e-5)  # torch divides by norm + 1e-6


def test_auto_is_adam_with_torchs_defaults():
    want = mlp()
    plain(want, torch.optim.Adam(want.parameters(), lr=0.01), steps=5)
    step = attached(mlp(), Config(lr=0.01))
    for t in range(5):
        run(step, [batch(t)], 1 / 32)
    close(weights(step), weights(want), 0)
    assert step.describe() == {"optimizer": "Adam, lr 0.01", "device": "cpu"}


# --- ranks ---------------------------------------------------------------------------------------------------------

def ranks(models, parts, config=SGD, steps=20, **spec_parts):
    """Weights of every rank after ``steps`` in lockstep; ``parts``: micro-batch sizes of each rank, rotated."""
    def one_rank(control, wire):
        step = attached(models[control.rank], config, wire, control.rank, **spec_parts)
        for t in range(steps):
            now = parts[t % len(parts):] + parts[:t % len(parts)]
            before = sum(map(sum, now[:control.rank]))
            run(step, cut(tuple(a[before:] for a in batch(t)), *now[control.rank]), 1 / 32)
        return weights(step)

    return LockstepWorld(len(parts)).run(one_rank)


@pytest.mark.parametrize("parts", CUTS, ids=str)
def test_ranks_with_unequal_parts_follow_one_process(parts):
    """Laws 1 and 2 in lockstep."""
    single = attached(mlp())
    for t in range(20):
        run(single, [batch(t)], 1 / 32)
    results = ranks([mlp(3 + rank) for rank in range(len(parts))], parts)  # share_initial makes them equal
    for other in results[1:]:
        close(other, results[0], 0)
    close(results[0], weights(single), 1e-6 if len(parts) == 1 else 1e-5)


def test_a_global_batch_without_any_sample_is_no_error():
    """Weight 0: every rank hands over zeros."""
    step = attached(mlp(), replace(SGD, optimizer=Named("sgd")), TwoRanksInOne())
    before = weights(step)
    assert run(step, [], 0.0, check=True)[0] == (True, 0.0)
    close(weights(step), before, 0)


TOKENS = np.sort(np.random.default_rng(5).integers(0, 7, 24))  # the zeros come first: only rank 0 sees them


@pytest.mark.parametrize("name, args", [("sgd", {"momentum": 0.9}), ("adamw", {"weight_decay": 0.3})])
@pytest.mark.parametrize("sizes", [(12, 12), (4, 20), (24, 0), (8, 8, 8)], ids=str)
def test_tied_unused_and_sometimes_used_parameters(sizes, name, args):
    """A parameter that some ranks or none use has a zero gradient there, in one process too (law 2)."""
    config = Config(optimizer=Named(name, args), lr=0.05)
    parts = cut((TOKENS, (TOKENS + 1) % 7), 24), cut((TOKENS, (TOKENS + 1) % 7), *sizes)
    single = attached(tied(), config)
    for _ in range(10):
        run(single, parts[0], 1 / 24)

    models = [tied(10 + r) for r in range(len(sizes))]
    torch.manual_seed(0)
    models[0].load_state_dict(tied().state_dict())
    ends = np.cumsum((0, *sizes))

    def one_rank(control, wire):
        step = attached(models[control.rank], config, wire, control.rank, bucket_mb=1e-4)
        mine = slice(ends[control.rank], ends[control.rank + 1])
        for _ in range(10):
            run(step, cut((TOKENS[mine], (TOKENS[mine] + 1) % 7), sizes[control.rank]), 1 / 24)
        assert step.model.out.weight is step.model.table.weight
        return weights(step)

    results = LockstepWorld(len(sizes)).run(one_rank)
    for other in results[1:]:
        close(other, results[0], 0)
    close(results[0], weights(single), 1e-5)
    assert len(single.params()) == 7  # the shared matrix once


def test_buckets_leave_while_backward_still_runs():
    """The last layer's bucket is issued before the first layer's gradient is there."""
    order = []

    class Wire(TwoRanksInOne):
        def allreduce(self, flat_N, name, op="sum"):
            order.append(name)
            return super().allreduce(flat_N, name)

    model = mlp()
    step = attached(model, wire=Wire(), bucket_mb=0.0001)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: order.append("first layer"))
    order.clear()
    step.zero()
    step.forward_backward(batch(0), 1 / 32, False)
    assert order == ["first layer"]  # nothing is sent before the last micro-batch
    step.forward_backward(batch(1), 1 / 32, True)
    assert order.index("world.b0.r0") < len(order) - 1 - order[::-1].index("first layer")
    step.exchange()
    assert len(order) == len(set(order)) + 1


def test_a_step_that_was_left_in_the_middle_leaves_nothing():
    for wire in (NullCollectives, TwoRanksInOne):
        step, fresh = attached(mlp(), wire=wire()), attached(mlp(), wire=wire())
        step.zero()
        step.forward_backward(batch(9), 1 / 32, False)
        run(step, cut(batch(0), 16, 16), 1 / 32)
        run(fresh, cut(batch(0), 16, 16), 1 / 32)
        close(weights(step), weights(fresh), 0)


def test_buffers_become_their_mean_and_every_kind_travels_from_rank_0():
    class Kinds(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.w = nn.Parameter(torch.full((3, 2), float(rank)))
            self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
            self.register_buffer("mean", torch.full((4,), float(rank)))
            self.register_buffer("count", torch.tensor(rank + 5))
            self.register_buffer("mask", torch.tensor([rank == 0, True]))
            self.register_buffer("narrow", torch.full((3,), rank + 0.5, dtype=torch.bfloat16))
            self.register_buffer("nothing", torch.zeros(0))
            self.register_buffer("strided", torch.arange(6.0).reshape(2, 3).T + rank)

    def task(model, batch):
        rank = int(batch[0][0, 0])
        model.mean.fill_(rank)
        model.narrow.add_(rank)
        model.count.add_(rank)
        return model.w.sum(), len(batch[0])

    def one_rank(control, wire):
        model = Kinds(control.rank)
        step = create_step(spec(model, task=task), SGD, SimpleNamespace(rank=control.rank), 10)
        step.attach(Reducer(plan_buckets(step.params(), 1), NoCompression(), wire, Ops()))
        step.share_initial()
        first = {n: t.clone() for n, t in model.state_dict().items()}
        step.zero()
        step.forward_backward((np.full((4, 1), control.rank, np.float32),), 1.0, True)
        step.sync_buffers()
        return first, dict(model.named_buffers())

    results = LockstepWorld(3).run(one_rank)
    for first, buffers in results:
        for name, tensor in Kinds(0).state_dict().items():
            assert torch.equal(first[name], tensor), name
        assert torch.equal(buffers["mean"], torch.ones(4)) and int(buffers["count"]) == 7
        assert torch.equal(buffers["narrow"], torch.full((3,), 1.5, dtype=torch.bfloat16))
        assert torch.equal(buffers["strided"], Kinds(0).strided)


# --- what an update needs ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
def test_norm_and_clipped_length(wire):
    config = Config(optimizer=Named("sgd"), lr=1.0)
    step, free = attached(mlp(), config, wire()), attached(mlp(), config, wire())
    before = weights(step)

    def moved(one):
        return math.sqrt(sum(float(np.sum((a - before[n]) ** 2)) for n, a in weights(one).items()))

    (finite, norm), _ = run(free, [batch(0)], 1 / 32, check=True)
    assert finite and norm == pytest.approx(moved(free), rel=1e-5)
    (finite, again), _ = run(step, [batch(0)], 1 / 32, clip=norm / 4)
    assert finite and again == norm and moved(step) == pytest.approx(norm / 4, rel=1e-5)
    assert math.isnan(run(step, [batch(0)], 1 / 32)[0][1])  # not computed where nobody asks


@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_no_update_from_what_is_not_finite(clip, bad, wire):
    step = attached(mlp(), Config(lr=0.01, schedule=Schedule(warmup_steps=10)), wire())
    run(step, [batch(1)], 1 / 32)
    before, own, (x, y) = weights(step), step.state(), batch(0)
    (finite, norm), _ = run(step, [(x * np.float32(bad), y)], 1 / 32, clip, check=True)
    assert not finite and not math.isfinite(norm)
    close(weights(step), before, 0)
    assert step.state()[1] == own[1]
    for name, array in step.state()[0]["optimizer"].items():
        np.testing.assert_array_equal(array, own[0]["optimizer"][name])
    assert run(step, [batch(0)], 1 / 32, clip, check=True)[0][0]


def test_one_ranks_nan_stops_the_update_on_all():
    models = [mlp() for _ in range(3)]

    def one_rank(control, wire):
        step = attached(models[control.rank], wire=wire, rank=control.rank)
        before = weights(step)
        x, y = batch(0)
        x = x * np.float32("nan") if control.rank == 1 else x
        (finite, _), _ = run(step, [(x, y)], 1 / 96, check=True)
        close(weights(step), before, 0)
        return finite

    assert LockstepWorld(3).run(one_rank) == [False] * 3
