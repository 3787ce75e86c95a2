"""The PyTorch step: the cases of every backend, a plain PyTorch loop to the bit, and when its buckets leave."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from step_cases import *  # noqa: E402,F401,F403
from torch import nn  # noqa: E402
from torch_tools import (  # noqa: E402,F401
    SGD,
    TorchKit,
    TwoRanksInOne,
    attached,
    batch,
    close,
    cut,
    mlp,
    one_thread,
    plain,
    run,
    tied,
    weights,
)

from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.config import Config, Named  # noqa: E402


@pytest.fixture(name="kit")
def torch_kit():
    return TorchKit()


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


def test_auto_is_adam_with_torchs_defaults():
    want = mlp()
    plain(want, torch.optim.Adam(want.parameters(), lr=0.01), steps=5)
    step = attached(mlp(), Config(lr=0.01))
    for t in range(5):
        run(step, [batch(t)], 1 / 32)
    close(weights(step), weights(want), 0)
    assert step.describe() == {"optimizer": "Adam, lr 0.01", "device": "cpu"}


# --- ranks ---------------------------------------------------------------------------------------------------------

TOKENS = np.sort(np.random.default_rng(5).integers(0, 7, 24))  # the zeros come first: only rank 0 sees them


@pytest.mark.parametrize("name, args", [("sgd", {"momentum": 0.9}), ("adamw", {"weight_decay": 0.3})])
@pytest.mark.parametrize("sizes", [(12, 12), (4, 20), (24, 0), (8, 8, 8)], ids=str)
def test_tied_unused_and_sometimes_used_parameters(sizes, name, args):
    """A parameter that some ranks use has a zero gradient on the others; one that none uses has no gradient (law 2)."""
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


def test_a_model_of_one_bucket_runs_backward_without_a_hook():
    """The last bucket is full when backward ends, so that nobody has to watch it."""
    def hooks(model):
        return [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]

    one, several = mlp(), mlp()
    attached(one, wire=TwoRanksInOne(), bucket_mb=16.0)
    step = attached(several, wire=TwoRanksInOne(), bucket_mb=0.0001)
    assert hooks(one) == [0] * 4
    assert sorted(hooks(several)) == [0, 1, 1, 1] and hooks(several)[0] == 0
    step.leave()
    assert hooks(several) == [0] * 4


def test_a_poisoned_rank_keeps_all_from_updating():
    """Also where a part of its backward was handed over before it failed."""
    model = mlp()
    step, before = attached(model, wire=TwoRanksInOne()), weights(model)
    for half_done in (False, True):
        step.zero()
        if half_done:
            def fail(grad):
                raise RuntimeError("no memory")

            hook = model[0].weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="no memory"):
                step.forward_backward(batch(0), 1 / 32, True)
            hook.remove()
        step.stage.nothing(step.dp, poison=True)
        step.grads = step.dp.collect()
        assert not all(bool(g.isfinite().all()) for g in step.grads) and not math.isfinite(step.squares())
        assert step.apply(check=True)[0] is False
        step.discard()
        close(weights(model), before, 0)


def test_every_kind_of_buffer_travels_from_rank_0_and_stays_its_own():
    class Kinds(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.w = nn.Parameter(torch.full((3, 2), float(rank)))
            self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
            self.register_buffer("mean", torch.full((4,), float(rank)))
            self.register_buffer("count", torch.tensor(rank + 5))
            self.register_buffer("mask", torch.tensor([rank == 0, True]))
            self.register_buffer("turns", torch.tensor([1j * rank]))
            self.register_buffer("narrow", torch.full((3,), rank + 0.5, dtype=torch.bfloat16))
            self.register_buffer("nothing", torch.zeros(0))
            self.register_buffer("strided", torch.arange(6.0).reshape(2, 3).T + rank)

    def task(model, batch):
        rank = int(batch[0][0, 0])
        model.mean.fill_(rank)
        model.narrow.add_(rank)
        model.count.add_(rank)
        model.mask[1] = rank == 1
        model.turns.add_(rank + 1)
        return model.w.sum(), len(batch[0])

    def one_rank(control, wire):
        model = Kinds(control.rank)
        step = attached(model, SGD, wire, control.rank, task=task)
        first = {n: t.clone() for n, t in model.state_dict().items()}
        step.zero()
        step.forward_backward((np.full((4, 1), control.rank, np.float32),), 1.0, True)
        step.sync_buffers()
        return first, dict(model.named_buffers())

    results = LockstepWorld(3).run(one_rank)
    for first, buffers in results:
        for name, tensor in Kinds(0).state_dict().items():
            assert torch.equal(first[name], tensor), name
        assert torch.equal(buffers["mean"], torch.zeros(4)) and int(buffers["count"]) == 5
        assert torch.equal(buffers["narrow"], torch.full((3,), 0.5, dtype=torch.bfloat16))
        assert buffers["mask"].tolist() == [True, False] and buffers["turns"].tolist() == [1]
        assert torch.equal(buffers["strided"], Kinds(0).strided)


# --- what an update needs ------------------------------------------------------------------------------------------
