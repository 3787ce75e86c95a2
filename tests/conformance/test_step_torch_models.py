"""The PyTorch step where a model is not a plain perceptron: buffers, modes, shapes, half precision, what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from small_runs import config, samples  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_tools import (  # noqa: E402,F401
    SGD,
    TwoRanksInOne,
    X,
    Y,
    attached,
    batch,
    close,
    mlp,
    one_thread,
    plain,
    run,
    weights,
)

from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.comm.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.config import Config, Named, ScheduleConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.trainer import Trainer  # noqa: E402

# --- buffers -------------------------------------------------------------------------------------------------------

class Means(nn.Module):
    """Its statistics are the mean of the last forward's samples, and the number of forwards; some buffers never change.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.norm = nn.BatchNorm1d(12, momentum=1.0, affine=False).to(dtype)
        self.norm.running_mean.fill_(0.1)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), -0.0, 0.1]))
        self.register_buffer("wide", torch.ones(1).expand(4), persistent=False)

    def forward(self, x):
        if self.training:
            self.norm(x.to(self.norm.running_mean.dtype))
        return self.linear(x)


@pytest.mark.parametrize("sizes", [(0, 8, 24), (32, 0), (5, 27), (0, 0), (32,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_are_averaged_by_the_samples_a_rank_saw(sizes, dtype):
    models, ends = [Means(dtype) for _ in sizes], np.cumsum((0, *sizes))

    def one_rank(control, wire):
        step, mine = attached(models[control.rank], SGD, wire, control.rank), slice(*ends[control.rank:][:2])
        run(step, [tuple(a[mine] for a in batch(0))] if sizes[control.rank] else [], 1 / 32)
        step.sync_buffers()
        step.sync_buffers()  # nothing new was seen
        return dict(step.model.named_buffers())

    results = LockstepWorld(len(sizes)).run(one_rank)
    want = batch(0)[0].mean(0) if sum(sizes) else np.full(12, 0.1)
    for buffers in results:
        mean = buffers["norm.running_mean"]
        np.testing.assert_allclose(mean.float(), want, atol=1e-6 if dtype is torch.float32 else 0.01)
        assert torch.equal(mean, results[0]["norm.running_mean"])
        assert int(buffers["norm.num_batches_tracked"]) == (1 if sum(sizes) else 0)
        assert torch.equal(buffers["mask"].view(torch.int32), Means().mask.view(torch.int32))  # -0.0 and -inf too


def test_buffers_outside_the_state_dict_come_from_rank_0_and_may_grow_apart():
    class Cache(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.linear = nn.Linear(12, 5)
            self.register_buffer("noise", torch.full((3,), float(rank)), persistent=False)

        def forward(self, x):
            self.noise = torch.zeros(len(x))  # as long as the longest it has met
            return self.linear(x)

    models = [Cache(r) for r in range(2)]

    def one_rank(control, wire):
        step = attached(models[control.rank], SGD, wire, control.rank)
        first = step.model.noise.clone()
        run(step, [batch(0, 8 + control.rank)], 1 / 17)
        step.sync_buffers()
        return first, len(step.model.noise)

    for rank, (first, length) in enumerate(LockstepWorld(2).run(one_rank)):
        assert first.tolist() == [0, 0, 0] and length == 8 + rank


def test_batch_norm_of_one_sample_is_told_in_words():
    step = attached(mlp(extra=[nn.BatchNorm1d(16)]), rank=3)
    step.zero()
    with pytest.raises(UserError, match="a micro-batch of 1 sample on rank 3 with BatchNorm"):
        step.forward_backward(batch(0, 1), 1.0, True)
    other = attached(mlp(), task=lambda m, b: (int("x"), 1))
    with pytest.raises(ValueError, match="invalid literal"):
        other.forward_backward(batch(0), 1.0, True)


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode])
def test_a_fit_without_gradients_records_them_or_is_refused(within, tmp_path):
    settings = config(max_steps=2, global_batch=8, out=str(tmp_path / "run"))
    plain, model = mlp(), mlp()
    Trainer(replace(settings, out=str(tmp_path / "plain"))).fit(plain, samples(16))
    with within():
        if within is torch.no_grad:
            Trainer(settings).fit(model, samples(16))
            assert not torch.is_grad_enabled()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
            return
        with pytest.raises(UserError, match=r"fit inside torch.inference_mode\(\)"):
            Trainer(settings).fit(model, samples(16))
        inside = mlp()
    with pytest.raises(UserError, match=r"built inside torch.inference_mode\(\)"):
        Trainer(settings).fit(inside, samples(16))


# --- modes ---------------------------------------------------------------------------------------------------------

class OwnTrain(nn.Sequential):
    """Freezes its BatchNorm in the usual way."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def test_frozen_modules_stay_frozen():
    frozen, own, whole = mlp(extra=[nn.BatchNorm1d(16)]), OwnTrain(*mlp(extra=[nn.BatchNorm1d(16)])), mlp(
        extra=[nn.BatchNorm1d(16)])
    frozen[1].eval()
    whole.eval()
    for model, still in ((frozen, True), (own, True), (whole, False)):
        step = attached(model)
        run(step, [batch(0)], 1 / 32)
        step.evaluate((X, Y))
        run(step, [batch(0)], 1 / 32)
        assert model.training and model[1].training is not still
        assert bool((model[1].running_mean == 0).all()) is still
        assert bool(step.caveats()) is not still


# --- gradients -----------------------------------------------------------------------------------------------------

class Reentrant(nn.Module):
    """A layer under two checkpoints."""

    def __init__(self, reentrant):
        super().__init__()
        self.a, self.h, self.reentrant = nn.Linear(12, 12), nn.Linear(12, 5), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=self.reentrant)
        return self.h(x)


def test_a_gradient_that_comes_twice_is_refused():
    step = attached(Reentrant(True), wire=TwoRanksInOne())
    step.zero()
    step.forward_backward(batch(0), 1.0, False)
    with pytest.raises(UserError, match="parameter a.* received its gradient twice.*[Gg]ive .*use_reentrant=False"):
        step.forward_backward(batch(0), 1.0, True)
    torch.manual_seed(0)
    single = attached(Reentrant(False))
    torch.manual_seed(0)
    several = attached(Reentrant(False), wire=TwoRanksInOne())
    for one in (single, several):
        run(one, [batch(0)], 1 / 32)
    close(weights(several), weights(single), 0)


def test_models_that_cannot_be():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"n": 1}

        def set_extra_state(self, state):
            raise AssertionError(state)

    for module, said in ((nn.Embedding(3, 4, sparse=True), "Embedding '1' gives sparse gradients"),
                         (nn.EmbeddingBag(3, 4, sparse=True), "sparse=False"),
                         (Extra(2, 2), "module '1' has extra state of type dict")):
        with pytest.raises(UserError, match=said):
            attached(nn.Sequential(nn.Linear(2, 2), module))


@pytest.mark.parametrize("module, found", [
    (nn.MultiheadAttention(4, 2, dropout=0.1), 1), (nn.MultiheadAttention(4, 2), 0), (nn.LSTM(4, 4, 2, dropout=0.5), 1),
    (nn.Dropout(0.0), 0), (nn.Dropout(0.2), 1), (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 0)])
def test_dropout_within_layers_is_named(module, found):
    assert len(attached(nn.Sequential(module, nn.Linear(4, 4))).caveats()) == found


# --- shapes --------------------------------------------------------------------------------------------------------

@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", ["mse_loss", "L1Loss", "huber_loss", "smooth_l1_loss", "poisson_nll_loss"])
def test_no_loss_broadcasts(loss):
    step = attached(nn.Linear(12, 1), replace(SGD, loss=Named(loss)))
    for y in (X[:, 0].copy(), X[:, :5].copy()):
        said = r"output has shape \(64, 1\) and the targets \(64, ?5?\), which gives a loss"
        with pytest.raises(UserError, match=said):
            step.forward_backward((X, y), 1.0, True)
        with pytest.raises(UserError, match="one loss for each of the 64 samples"):
            step.evaluate((X, y))
    step.forward_backward((X, X[:, :1].copy()), 1.0, True)
    square = attached(nn.Linear(12, 5), replace(SGD, loss=Named("cross_entropy")))
    square.forward_backward(batch(0, 5), 1.0, True)  # 5 samples of 5 classes are no broadcast
    square.forward_backward((X, np.full((64, 5), 0.2, np.float32)), 1.0, True)


def test_sample_weights_are_one_per_sample():
    step, w = attached(mlp()), np.linspace(0, 2, 32).astype(np.float32)
    flat, column = (float(step.forward_backward((*batch(0), a), 1.0, True)[0]) for a in (w, w[:, None].copy()))
    assert flat == column
    with pytest.raises(UserError, match=r"third array has shape \(32, 2\); expected one weight for each of the 32"):
        step.forward_backward((*batch(0), np.ones((32, 2), np.float32)), 1.0, True)
    for call in (lambda b: step.forward_backward(b, 1.0, True), step.evaluate):
        with pytest.raises(UserError, match="a sample has 4 arrays"):
            call((*batch(0), w, w))


@pytest.mark.parametrize("loss, outputs, targets, right", [
    ("cross_entropy", [[3.0, 1], [2, 1]], [[1.0, 0], [0, 1]], (1, 2)),  # one-hot: per sample, not per element
    ("auto", [[3.0, 1], [2, 1]], [[0.7, 0.3], [0.9, 0.1]], (2, 2)),
    ("binary_cross_entropy_with_logits", [[3.0, -1], [2, 1]], [[1.0, 0], [0, 1]], (3, 4)),
    ("BCELoss", [[0.9, 0.1], [0.8, 0.7]], [[1.0, 0], [0, 1]], (3, 4)),
    ("multilabel_soft_margin_loss", [[3.0, -1], [2, 1]], [[1.0, 0], [0, 1]], (3, 4)),
    ("mse_loss", [[3.0], [-2], [2]], [[1.0], [0], [0]], (2, 3)),
])
def test_accuracy_of_floating_targets(loss, outputs, targets, right):
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.w

    step = attached(Same(), replace(SGD, loss=Named(loss), metrics=["accuracy"]))
    step.evaluate((np.array(outputs, np.float32), np.array(targets, np.float32)))
    assert tuple(step.eval_totals()["accuracy"]) == right


# --- state ---------------------------------------------------------------------------------------------------------

class Narrow(nn.Module):
    """bfloat16 weights, one of them without a dimension, and one in float32 of the shape of another's state."""

    def __init__(self, start):
        super().__init__()
        torch.manual_seed(start)
        self.linear = nn.Linear(12, 5).bfloat16()
        self.scale = nn.Parameter(torch.tensor(1.0 + start, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return (self.linear(x.bfloat16()) * self.scale).float() + self.shift


@pytest.mark.parametrize("name, args", [("adam", {}), ("adafactor", {}), ("sgd", {"momentum": 0.9}), ("asgd", {}),
                                        ("nadam", {}), ("adagrad", {})])
def test_half_precision_state_returns_to_the_bit(name, args):
    config = Config(optimizer=Named(name, args), lr=0.05)
    step, other = attached(Narrow(1), config), attached(Narrow(2), config)
    for t in range(3):
        run(step, [batch(t)], 1 / 32)
    groups, rest = step.state()
    assert groups["model"]["scale#bfloat16"].dtype == np.uint16 and groups["model"]["shift"].dtype == np.float32
    other.load(groups, json.loads(json.dumps(rest)))
    for mine, theirs in zip(step.optimizer.tensors, other.optimizer.tensors):
        for key, value in step.optimizer.optimizer.state[mine].items():
            copy = other.optimizer.optimizer.state[theirs][key]
            if isinstance(value, torch.Tensor):
                assert copy.dtype == value.dtype and torch.equal(copy, value), key
    for one in (step, other):
        run(one, [batch(9)], 1 / 32)
    for a, b in zip(step.optimizer.tensors, other.optimizer.tensors):
        assert torch.equal(a, b)


def last(seed):
    """Return a convolution in channels_last behind a dense layer whose weight is another's transpose in memory."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 12), nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 7, 2), nn.Tanh(), nn.Flatten(),
                          nn.Linear(7, 5)).to(memory_format=torch.channels_last)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert not (model[0].weight.is_contiguous() or model[2].weight.is_contiguous())
    return model


@pytest.mark.parametrize("args", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
def test_another_memory_order_is_trained_as_by_hand_and_returns_to_the_bit(name, args, wire):
    """Parameters, gradients in buckets and momentum from a checkpoint lie in memory each in its own way."""
    own = {"momentum": 0.9, **args} if name == "sgd" else args
    config = Config(optimizer=Named(name, own), lr=0.05)
    step, other = attached(last(1), config, wire()), attached(last(2), config, wire())
    for t in range(3):
        run(step, [batch(t)], 1 / 32, clip=0.5)
    other.load(*step.state())
    for t in range(3, 8):
        for one in (step, other):
            run(one, [batch(t)], 1 / 32, clip=0.5)
    close(weights(other), weights(step), 0)
    model = last(1)
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    close(weights(step), weights(plain(model, made(model.parameters(), lr=0.05, **own), steps=8, clip=0.5)), 1e-5)


def test_fused_is_for_parameters_whose_gradients_lie_as_they_do():
    for name in ("sgd", "adam"):
        with pytest.raises(UserError, match="optimizer.args.fused with parameters that are not contiguous"):
            attached(last(1), Config(optimizer=Named(name, {"fused": True})))
    assert attached(mlp(), SGD).optimizer.optimizer.defaults["fused"]  # what lies row by row keeps the quick kernel
    assert attached(mlp(), Config(optimizer=Named("adam", {"fused": True}))).optimizer.optimizer.defaults["fused"]


def test_the_kernel_is_chosen_for_the_memory_order_of_this_run():
    """Not by the checkpoint of a run whose parameters lay row by row, nor before the model was put into another."""
    def rows(seed):
        model = last(seed)
        model[0].weight.data, model[2].weight.data = (model[i].weight.data.contiguous() for i in (0, 2))
        return model

    step, other, moved = attached(rows(1), SGD), attached(last(2), SGD, TwoRanksInOne()), attached(rows(3), SGD)
    run(step, [batch(0)], 1 / 32)
    for late in (other, moved):
        late.load(*step.state())
        late.model.to(memory_format=torch.channels_last)
        late.join()
    for t in range(1, 4):
        for one in (step, other, moved):
            run(one, [batch(t)], 1 / 32)
    for late in (other, moved):
        close(weights(late), weights(step), 1e-5)
    asked = attached(rows(1), Config(optimizer=Named("adam", {"fused": True})))
    asked.model.to(memory_format=torch.channels_last)
    with pytest.raises(UserError, match="optimizer.args.fused with parameters that are not contiguous"):
        run(asked, [batch(0)], 1 / 32)


@pytest.mark.parametrize("name, args", [("none", {}), ("StepLR", {"step_size": 2, "gamma": 0.5}),
                                        ("CosineAnnealingLR", {"T_max": 9}), ("LinearLR", {"total_iters": 6}),
                                        ("OneCycleLR", {"max_lr": 0.3, "total_steps": 30})])
def test_a_rate_changed_on_resume_takes_effect(name, args):
    def build(lr, start=3):
        return attached(mlp(start), Config(optimizer=Named("sgd"), lr=lr, schedule=ScheduleConfig(name, args)))

    old, resumed, fresh, kept = build(0.1), build(0.4, 8), build(0.4), build(0.4)
    for t in range(3):
        run(old, [batch(t)], 1 / 32)
        run(fresh, [batch(t)], 1 / 32)
    groups, rest = old.state()
    resumed.load(groups, json.loads(json.dumps(rest)))
    del rest["base_lr"]  # as in a checkpoint that does not tell
    kept.load(groups, rest)
    assert kept.learning_rate() == old.learning_rate()
    for t in range(4):
        assert resumed.learning_rate() == pytest.approx(fresh.learning_rate(), rel=1e-6)
        run(resumed, [batch(t)], 1 / 32)
        run(fresh, [batch(t)], 1 / 32)
