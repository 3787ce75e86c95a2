"""Loops over `hvdtrain.torch.shard` with uneven ranks: the weights of one process in float64, and refusals on all."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch.nn import functional  # noqa: E402

from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.torch.data import check_step, shard  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)

N, BATCH = 25, 12  # the last global batch holds 1: all ranks but one are without samples
DRAW = torch.Generator().manual_seed(6)
X = torch.randn((N, 5), dtype=torch.float64, generator=DRAW)
Y = torch.randint(0, 3, (N,), generator=DRAW)


def made():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    return model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


def train(batches, step, model, optimizer, passes=1, scaled=lambda batches, out, y: batches.scale(
        functional.cross_entropy(out, y))):
    """Train two epochs as a loop written by hand; ``step`` exchanges and updates. Return the sum of the losses."""
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        for number, (x, y) in enumerate(batches, 1):
            loss = scaled(batches, model(x), y)
            loss.backward()
            total += loss.detach()
            if number % passes == 0 or number == len(batches):
                step(optimizer)
                optimizer.zero_grad()
    return total


def broken_without_samples(batches, out, y):
    """Return the scaled loss; on a rank without samples one whose gradient would be NaN."""
    return batches.scale(functional.cross_entropy(out, y) * (1.0 if batches.local_samples else torch.nan))


def alone(optimizer):
    check_step(True, 1)
    optimizer.step()


def averaged(control):
    """Return an update by the mean of the gradients over ranks, as `DistributedOptimizer` makes it."""
    def step(optimizer):
        check_step(True, control.size)
        params = optimizer.param_groups[0]["params"]
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        mean = control.sum(torch.nn.utils.parameters_to_vector(own).detach().numpy()) / control.size
        for param, grad in zip(params, torch.from_numpy(mean).split([p.numel() for p in params])):
            param.grad = grad.view_as(param)
        optimizer.step()
    return step


def check_equal(got, want):
    for a, b in zip(got.parameters(), want.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shares, passes", [(None, 1), (None, 2), ([3.0, 1.0, 0.1, 2.0], 1), ([0.0, 1.0, 2.0, 0.5], 2)])
def test_a_loop_trains_as_one_process(control, shares, passes):
    model, optimizer = made()
    shares = shares and shares[:control.size]
    total = train(shard((X, Y), BATCH, seed=3, shares=shares), averaged(control), model, optimizer, passes)
    single, plain = made()
    want = train(shard((X, Y), BATCH, seed=3, rank=0, size=1), alone, single, plain, passes)
    check_equal(model, single)
    assert control.sum(np.array([total.item()]))[0] / control.size == pytest.approx(want.item(), rel=1e-12)


@pytest.fixture(scope="module")
def hvd(control):
    import hvdtrain.torch

    hvdtrain.torch.shutdown()
    hvdtrain.torch.init()
    yield hvdtrain.torch
    hvdtrain.torch.shutdown()


@pytest.mark.parametrize("wire, passes", [("shared", 1), ("shared", 2), ("horovod", 1), ("horovod", 2)])
def test_a_distributed_optimizer_trains_as_one_process_and_refuses_a_forgotten_scale(hvd, control, monkeypatch, wire,
                                                                                    passes):
    if wire == "horovod":
        if horovod.horovod_reason("torch"):
            pytest.skip("Horovod is not built")
        monkeypatch.setattr("hvdtrain.torch.basics.shared_wire", lambda process_set: None)
    model, plain = made()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=passes)
    batches = hvd.shard((X, Y), BATCH, seed=3)
    train(batches, lambda optimizer: optimizer.step(), model, optimizer, passes, broken_without_samples)
    single, alone_plain = made()
    train(shard((X, Y), BATCH, seed=3, rank=0, size=1), alone, single, alone_plain, passes)
    check_equal(model, single)
    x, y = next(iter(batches))
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(UserError, match="without batches.scale in the backward pass"):
        optimizer.step()
    check_equal(model, single)


def test_batch_statistics_leave_out_a_rank_without_samples(hvd):
    models, loops = [], []
    for norm, place in ((hvd.SyncBatchNorm, {"shares": [0.0, *[1.0] * (hvd.size() - 1)]}),
                        (torch.nn.BatchNorm1d, {"rank": 0, "size": 1})):
        torch.manual_seed(8)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), norm(4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        if norm is hvd.SyncBatchNorm:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        batches = shard((X[:24], Y[:24]), BATCH, seed=3, **place)
        train(batches, lambda optimizer: optimizer.step(), model, optimizer)
        models.append(model)
        loops.append(batches)
    check_equal(*models)
    torch.testing.assert_close(models[0][1].running_var, models[1][1].running_var)
    x, _ = next(iter(loops[0]))
    loss = loops[0].scale(models[0](x).sum() * torch.inf)
    if hvd.rank() == 0:  # the others would wait for it in the layer
        with pytest.raises(UserError, match="not finite, through SyncBatchNorm"):
            loss.backward()
    loops[0].skip()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_over_weights(control, reduction):
    """Rank 0 has no label that counts in its first batch, where the mean of its own is NaN."""
    labels = torch.where(Y == 0, -100, Y)
    labels[:BATCH // control.size] = -100

    def scaled(batches, out, y):
        loss = functional.cross_entropy(out, y, reduction=reduction)
        return batches.scale(loss, weight=(y != -100).sum(), reduction=reduction)

    model, optimizer = made()
    train(shard((X, labels), BATCH, shuffle=False), averaged(control), model, optimizer, scaled=scaled)
    single, plain = made()
    train(shard((X, labels), BATCH, shuffle=False, rank=0, size=1), alone, single, plain, scaled=scaled)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    check_equal(model, single)


def test_a_metric_over_all_samples(control):
    test = shard((X, Y), 8, train=False, shares=[2.0, *[1.0] * (control.size - 1)])
    seen, numbers = 0, []
    for x, _ in test:
        seen += len(x)
        numbers += x[:, 0].tolist()
    assert control.sum(np.array([seen]))[0] == N
    assert sorted(sum(control.gather(numbers), [])) == sorted(X[:, 0].tolist())


@pytest.mark.parametrize("data, more, match", [
    (lambda rank, size: X[rank::size], {}, "with samples .*Give all samples to every rank"),
    (lambda rank, size: X[rank:N - size + rank], {}, "ranks hold different samples"),
    (lambda rank, size: X, {"seed": lambda rank: rank}, "with seed 0, 1"),
])
def test_different_data_or_arguments_are_refused_on_every_rank(control, data, more, match):
    with pytest.raises(UserError, match=match):
        shard(data(control.rank, control.size), 8, **{name: of(control.rank) for name, of in more.items()})


def test_different_positions_weights_and_a_forgotten_scale_are_refused_on_every_rank(control):
    batches, loss = shard((X, Y), BATCH), torch.ones((), requires_grad=True)
    if control.rank == 0:
        next(iter(batches))  # a look at the data moves nothing
    next(iter(batches))
    with pytest.raises(UserError, match="without batches.scale in the backward pass"):
        check_step(True, control.size)
    with pytest.raises(UserError, match="a weight of .* nan in all"):
        batches.scale(loss, weight=-1 if control.rank == control.size - 1 else 1)
    batches.scale(loss).backward()
    batches.set_epoch(control.rank)
    next(iter(batches))
    with pytest.raises(UserError, match=r"\(epoch, batch\) \(0, 1\), \(1, 1\)"):
        batches.scale(loss)
