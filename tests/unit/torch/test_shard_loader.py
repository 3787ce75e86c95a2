"""`hvdtrain.torch.data.shard`: P ranks with unequal shares against one process, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset  # noqa: E402

from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.torch.data import check_step, shard  # noqa: E402

N, BATCH = 29, 12  # the last global batch holds 5
DRAW = torch.Generator().manual_seed(6)
X, Y = (torch.randn((N, k), dtype=torch.float64, generator=DRAW) for k in (3, 1))
NUMBERS = torch.arange(N)


def loaders(shares, data=(X, Y), batch=BATCH, **more):
    return [shard(data, batch, shares=shares, rank=rank, size=len(shares), **more) for rank in range(len(shares))]


def mean_gradient(batches_P, rows_P, weights):
    """Return the mean over ranks of the gradients of scaled losses, as the optimizer takes it."""
    total = 0
    for batches, (x, y) in zip(batches_P, rows_P):
        own = weights.detach().requires_grad_()
        batches.scale(((x @ own - y) ** 2).mean()).backward()
        total = total + own.grad / len(batches_P)
    return total


@pytest.mark.parametrize("shares", [[1.0, 1.0], [3.0, 1.0, 0.1], [0.0, 1.0], [1.0] * 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_train_as_one_process(shares, drop_last):
    one, ranks = loaders([1.0], drop_last=drop_last, seed=4), loaders(shares, drop_last=drop_last, seed=4)
    assert len(one[0]) == len(ranks[0]) == (2 if drop_last else 3)
    weights, seen = [torch.zeros(3, 1, dtype=torch.float64)] * 2, []
    for _ in range(2):
        for whole, *rows_P in zip(one[0], *ranks):
            seen.append(whole[0])
            weights = [w - 0.1 * mean_gradient(batches, rows, w)
                       for w, batches, rows in zip(weights, (one, ranks), ([whole], rows_P))]
            assert sum(batches.local_samples for batches in ranks) == len(whole[0])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-12, atol=1e-13)
    assert not torch.equal(seen[0], seen[len(one[0])])  # epochs differ


def test_a_rank_without_samples_adds_nothing_of_a_loss_that_is_not_finite():
    idle, _ = loaders([0.0, 1.0])
    x, _ = next(iter(idle))
    own = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    loss = idle.scale((x @ own).sum().sqrt() * math.inf)
    loss.backward()
    assert len(x) == 1 and idle.local_samples == 0 and loss.item() == 0
    assert torch.equal(own.grad, torch.zeros_like(own))


def test_sums_and_weights_of_one_rank():
    (batches,) = loaders([1.0])
    x, _ = next(iter(batches))
    loss = torch.ones((), requires_grad=True)
    assert batches.scale(loss * 12, reduction="sum").item() == 1
    assert batches.scale(loss, weight=5).item() == 1
    assert batches.scale(loss, weight=torch.tensor(4), reduction="sum").item() == 0.25
    assert batches.scale(loss * math.nan, weight=0).item() == 0


def test_an_optimizer_refuses_a_batch_whose_scale_was_not_used():
    (batches,) = loaders([1.0])
    read = iter(batches)
    loss = torch.ones((), requires_grad=True)
    check_step(True, 1)
    next(read)
    with pytest.raises(UserError, match=r"without batches.scale.*expected batches.scale\(loss\).backward\(\)"):
        check_step(True, 1)
    scaled = batches.scale(loss)
    with pytest.raises(UserError, match="without batches.scale in the backward pass"):  # the result was dropped
        check_step(True, 1)
    scaled.backward()
    for average, ranks, got in ((False, 1, "op other than"), (True, 2, "over 2 ranks")):
        with pytest.raises(UserError, match=f"DistributedOptimizer .*{got}.*expected the mean over 1 rank"):
            check_step(average, ranks)
    check_step(True, 1)
    check_step(False, 3)  # of other data, between two batches
    next(read)
    batches.skip()
    check_step(True, 1)
    next(read)
    batches.scale(loss).backward()
    check_step(True, 1)


def test_a_batch_read_ahead_is_refused():
    (batches,) = loaders([1.0])
    loss = torch.ones((), requires_grad=True)
    next(iter(batches))  # a look at the data
    read = iter(batches)
    next(read), next(read)
    with pytest.raises(UserError, match="read and not scaled before the next one"):
        batches.scale(loss)


def test_epochs_count_themselves_and_resume():
    def numbers(batches, steps=None, train=True):
        found = []
        for step, (rows,) in enumerate(batches):
            found.append(rows.tolist())
            if train:
                batches.scale(torch.ones((), requires_grad=True))
            if step + 1 == steps:
                break
        return found

    made = lambda **more: shard((NUMBERS,), BATCH, seed=2, **more)  # noqa: E731
    whole, again, other = (made(rank=0, size=1) for _ in range(3))
    first, second, third = (numbers(whole) for _ in range(3))
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == NUMBERS.tolist() and first != second
    assert numbers(again, train=False) == first == numbers(again, 1, train=False) + first[1:]  # no epoch
    assert numbers(again) == first and numbers(again, 1) == second[:1]
    state = again.state_dict()
    assert (state["epoch"], state["step"]) == (1, 1)
    assert numbers(again) == third  # an epoch that was left early counts
    other.load_state_dict(state)
    other.set_epoch(1)  # as loops do before each epoch
    assert other.state_dict() == state
    assert numbers(other) == second[1:] and numbers(other) == third
    other.set_epoch(0)
    assert numbers(other) == first and other.state_dict()["epoch"] == 1 and other.state_dict()["step"] == 0
    with pytest.raises(UserError, match="position is one of global_batch 12"):
        shard((NUMBERS,), 6, seed=2, rank=0, size=1).load_state_dict(state)


class Squares(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"number": i, "square": np.float32(i * i)}


def padded(samples):
    return torch.stack([number for number, in samples]), "own"


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_each_sample_once(workers):
    ranks = loaders([1.0, 1.0, 0.0, 1.0], Squares(), batch=13, train=False, num_workers=workers)
    found = [batch for batches in ranks for batch in batches]
    assert [len(batches) for batches in ranks] == [3, 3, 0, 3]
    assert torch.equal(torch.cat([batch["number"] for batch in found]).sort().values, NUMBERS)
    assert torch.equal(found[0]["number"], torch.arange(5)) and found[0]["square"].dtype is torch.float32
    with pytest.raises(UserError, match="train=False"):
        ranks[0].scale(torch.ones(()))


@pytest.mark.parametrize("data", [X, X.numpy(), (X, Y.numpy()), [X, Y], TensorDataset(X, Y), [(x, 1) for x in X]])
def test_batches_are_those_of_a_data_loader(data):
    (batches,) = loaders([1.0], data, shuffle=False)
    columns = TensorDataset(*map(torch.as_tensor, data)) if isinstance(data, (tuple, list)) and len(data) < 3 else data
    for got, want in zip(batches, DataLoader(columns, BATCH), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_data_loader_gives_its_dataset_order_and_collation():
    given = DataLoader(TensorDataset(NUMBERS), 4, shuffle=True, collate_fn=padded, drop_last=True)
    (batches,) = loaders([1.0], given, seed=3)
    (plain,) = loaders([1.0], NUMBERS, seed=3)
    assert len(batches) == 2
    for (numbers, own), want in zip(batches, plain):
        assert own == "own" and torch.equal(numbers, want)
    (batches,) = loaders([1.0], DataLoader([torch.full((5,), i) for i in range(BATCH)]))
    assert torch.equal(next(iter(batches))[:, 0], torch.arange(BATCH)), "a list of samples, not of columns"
    sampled = DataLoader(Squares(), sampler=DistributedSampler(Squares(), 2, 1, shuffle=False))
    (batches,) = loaders([1.0], sampled)
    assert torch.equal(next(iter(batches))["number"], torch.arange(BATCH))


def test_a_stateful_loader_of_torchdata_is_read_as_a_data_loader():
    loader = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    (batches,) = loaders([1.0], loader.StatefulDataLoader(TensorDataset(NUMBERS), 4, shuffle=True), seed=3)
    (plain,) = loaders([1.0], NUMBERS, seed=3)
    assert [row[0].tolist() for row in batches] == [row.tolist() for row in plain]
    (batches,) = loaders([1.0], loader.StatefulDataLoader(TensorDataset(NUMBERS), 4))
    assert next(iter(batches))[0].tolist() == list(range(BATCH))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize("data, more, match", [
    (Endless(), {}, r"IterableDataset \(Endless\).*hvdtrain.Trainer"),
    (DataLoader(Endless()), {}, "IterableDataset"),
    (DataLoader(X, sampler=torch.utils.data.WeightedRandomSampler(torch.ones(N), N)), {}, "WeightedRandomSampler"),
    ({"x": X}, {}, "hvd.shard of a dict"),
    (list(X), {}, "hvd.shard of a list of 29 tensors"),
    ((X, Y[1:]), {}, "differ in length"),
    ((X, np.array(["a"] * N)), {}, "strings"),
    (X[:0], {}, "0 samples"),
    (X, {"batch": 30, "drop_last": True}, "at least one whole batch"),
    (X, {"batch": 0}, "global_batch is 0"),
    (X, {"batch_size": 4}, "batch_size"),
])
def test_refusals(data, more, match):
    with pytest.raises(UserError, match=match):
        loaders([1.0], data, **more)


def test_a_loss_is_one_number_of_a_batch():
    (batches,) = loaders([1.0])
    with pytest.raises(UserError, match="before a batch was read"):
        batches.scale(torch.ones(()))
    next(iter(batches))
    for loss, got in ((torch.ones(2), r"shape \[2\]"), (1.0, "a float"), (torch.ones((), dtype=torch.int64), "int64")):
        with pytest.raises(UserError, match=f"{got}.*loss.mean"):
            batches.scale(loss)
    with pytest.raises(UserError, match="2 shares for 3 ranks"):
        shard(X, BATCH, shares=[1.0, 2.0], rank=0, size=3)
    with pytest.raises(UserError, match="weight of nan"):
        batches.scale(torch.ones(()), weight=math.nan)
