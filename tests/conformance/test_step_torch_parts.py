"""The PyTorch step's parts: losses, metrics, optimizers, schedules, and its state."""

import random
import warnings
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from small_runs import bits, config, fitted, samples, solo  # noqa: E402
from step_cases import goes_on  # noqa: E402
from torch import nn  # noqa: E402
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
    tied,
    weights,
)

from hvdtrain.backends.torch import seed  # noqa: E402
from hvdtrain.backends.torch.modules import check_loss  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.config import Config, Named, ScheduleConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

# --- loss, metrics -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "name, args",
    [
        ("auto", {}),
        ("mse_loss", {}),
        ("MSELoss", {}),
        ("mseloss", {}),
        ("huber_loss", {"delta": 0.5}),
        ("HuberLoss", {"delta": 0.5}),
        ("l1_loss", {}),
    ],
)
def test_losses_by_name(name, args):
    model, y = mlp(), X[:, :5].copy()
    step = attached(mlp(), replace(SGD, loss=Named(name, args)))
    step.zero()
    loss, weight = step.forward_backward((X, y), 1.0, True)
    gap = np.abs(model(torch.from_numpy(X)).detach().numpy() - y)
    kind = "mse" if name == "auto" else name.lower()[:2]
    want = {"ms": gap**2, "l1": gap, "hu": np.where(gap < 0.5, gap**2 / 2, 0.5 * gap - 0.125)}[kind[:2]].mean(1).sum()
    assert (float(loss), float(weight)) == (pytest.approx(float(want), rel=1e-5), 64)
    step.evaluate((X, y))
    assert step.eval_totals()["loss"][0] == pytest.approx(float(want), rel=1e-5)


def test_losses_that_cannot_be():
    for named, said in (
        (Named("hubr_loss"), "did you mean 'huber_loss'"),
        (Named("huber_loss", {"detla": 1}), "did you mean 'delta'"),
        (Named("HuberLoss", {"detla": 1}), "did you mean 'delta'"),
        (Named("relu"), "is not in torch.nn.functional"),
        (Named("sys"), "is not in torch.nn.functional"),
    ):
        with pytest.raises(UserError, match=said):
            attached(mlp(), replace(SGD, loss=named))
    step = attached(mlp(), task=lambda m, b: (m(b[0]).mean(1), 1))
    with pytest.raises(UserError, match=r"a loss of type Tensor and shape \(32,\)"):
        step.forward_backward(batch(0), 1.0, True)
    step = attached(mlp(), task=lambda m, b: (m(b[0]).detach().sum(), 32))
    with pytest.raises(UserError, match="a loss that depends on no parameter of the model"):
        check_loss(step.model, step.stage.loss_of(batch(0))[0])
    step.forward_backward(batch(0), 1.0, True)
    assert step.stage.unused == set(range(4)), "the rank's own samples use no parameter; another rank's may"


def test_squared_error_never_broadcasts():
    """(B, 1) against (B,) would give (B, B), and PyTorch only warns."""
    step = attached(nn.Sequential(nn.Linear(12, 1)))
    with (
        warnings.catch_warnings(),
        pytest.raises(UserError, match=r"output has shape \(64, 1\) and the targets \(64,\)"),
    ):
        warnings.simplefilter("error")
        step.forward_backward((X, X[:, 0].copy()), 1.0, True)


def test_metrics_of_values_are_means_over_elements():
    step, y = attached(mlp(), replace(SGD, metrics=["l1_loss", "mse_loss"])), X[:, :5].copy()
    for part in (slice(0, 3), slice(3, 64)):
        step.evaluate((X[part], y[part]))
    totals = step.eval_totals()
    assert list(totals) == ["loss", "l1_loss", "mse_loss"]
    out = mlp()(torch.from_numpy(X)).detach().numpy()
    got = step.eval_results(totals)
    assert got["l1_loss"] == pytest.approx(np.abs(out - y).mean(), rel=1e-5)
    assert got["mse_loss"] == got["loss"] == pytest.approx(((out - y) ** 2).mean(), rel=1e-5)


def test_metrics_of_the_users():
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        attached(mlp(), replace(SGD, metrics=["acuracy"]))
    step = attached(
        mlp(),
        task=lambda m, b: (m(b[0]).sum(), len(b[0])),
        metrics=lambda m, b: {"rows": (torch.tensor(len(b[0])), 1)},
    )
    step.evaluate((X, Y))
    totals = step.eval_totals()
    assert totals["rows"].tolist() == [64, 1] and totals["loss"][1] == 64


# --- optimizer, schedule -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "name, args",
    [
        ("CosineAnnealingLR", {"T_max": 7}),
        ("OneCycleLR", {"max_lr": 0.2, "total_steps": 30}),
        ("MultiStepLR", {"milestones": [3, 9]}),
        ("CosineAnnealingWarmRestarts", {"T_0": 4}),
    ],
)
def test_schedules_are_torchs_own(name, args):
    want = mlp()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9, fused=True)
    plain(want, optimizer, schedule=getattr(torch.optim.lr_scheduler, name)(optimizer, **args))
    step = attached(mlp(), replace(SGD, schedule=ScheduleConfig(name, args)))
    for t in range(20):
        run(step, [batch(t)], 1 / 32)
    close(weights(step), weights(want), 0)


def test_sequences_and_chains_are_torchs_own():
    space = torch.optim.lr_scheduler
    given = [("LinearLR", {"total_iters": 4}), ("ExponentialLR", {"gamma": 0.8})]
    for name, args in (("SequentialLR", {"milestones": [6]}), ("ChainedScheduler", {})):
        want = mlp()
        optimizer = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9, fused=True)
        inner = [getattr(space, one)(optimizer, **more) for one, more in given]
        own = space.SequentialLR(optimizer, inner, [6]) if args else space.ChainedScheduler(inner)
        plain(want, optimizer, schedule=own)
        args = {**args, "schedulers": [{"name": one, "args": more} for one, more in given]}
        step = attached(mlp(), replace(SGD, schedule=ScheduleConfig(name, args)))
        for t in range(20):
            run(step, [batch(t)], 1 / 32)
        close(weights(step), weights(want), 0)


def test_an_epoch_schedule_moves_with_epochs():
    step = attached(
        mlp(),
        Config(
            optimizer=Named("sgd"),
            lr=0.8,
            schedule=ScheduleConfig("steplr", {"step_size": 1, "gamma": 0.5}, "epoch"),
        ),
    )
    rates = []
    for _ in range(3):
        for t in range(2):
            run(step, [batch(t)], 1 / 32)
            rates.append(step.learning_rate())
        step.end_epoch()
    assert rates == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]


def test_optimizers_that_cannot_be():
    for settings, said in (
        (Config(optimizer=Named("adm")), "did you mean 'Adam'"),
        (Config(optimizer=Named("lbfgs")), "closure"),
        (Config(optimizer=Named("sgd", {"momentun": 1})), "momentun"),
        (Config(optimizer=Named("sgd", {"lr": 1})), "lr"),
        (Config(schedule=ScheduleConfig("cosineannealinglr")), "T_max"),
        (Config(schedule=ScheduleConfig("cosine")), "CosineAnnealingLR"),
        (Config(schedule=ScheduleConfig("SequentialLR")), "without schedule.args.schedulers"),
        (Config(schedule=ScheduleConfig("ChainedScheduler", {"schedulers": ["ReduceLROnPlateau"]})), "is not one of"),
        (Config(schedule=ScheduleConfig("SequentialLR", {"schedulers": [{"nam": "StepLR"}]})), "has the entry"),
    ):
        with pytest.raises(UserError, match=said):
            attached(mlp(), settings)
    frozen = mlp()
    for p in frozen.parameters():
        p.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        attached(frozen)


# --- state ---------------------------------------------------------------------------------------------------------

RESUMED = {
    "sgd": SGD,
    "adam": Config(lr=0.01, schedule=ScheduleConfig(warmup_steps=8)),
    "cycle": Config(
        lr=0.01, schedule=ScheduleConfig("OneCycleLR", {"max_lr": 0.05, "total_steps": 12})
    ),  # moves Adam's betas too
    "cosine": replace(SGD, schedule=ScheduleConfig("CosineAnnealingLR", {"T_max": 5})),
    "restarts": replace(SGD, schedule=ScheduleConfig("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 2})),
    "sequence": replace(SGD, schedule=ScheduleConfig("SequentialLR", {
        "schedulers": [{"name": "LinearLR", "args": {"total_iters": 2}}, {"name": "StepLR", "args": {"step_size": 2}}],
        "milestones": [3]})),
    "milestones": replace(SGD, schedule=ScheduleConfig("MultiStepLR", {"milestones": [2, 4]})),
    "amsgrad": Config(optimizer=Named("adamw", {"amsgrad": True}), lr=0.01),
    "adagrad": Config(optimizer=Named("adagrad"), lr=0.05),
    "rmsprop": Config(optimizer=Named("rmsprop", {"centered": True, "momentum": 0.5}), lr=0.005),
    "nadam": Config(optimizer=Named("nadam"), lr=0.01),
    "radam": Config(optimizer=Named("radam"), lr=0.01),
    "adafactor": Config(optimizer=Named("adafactor"), lr=0.01),
    "asgd": Config(optimizer=Named("asgd"), lr=0.01),
}


def test_bfloat16_weights_survive():
    step, other = (
        attached(mlp(s).to(torch.bfloat16), task=lambda m, b: (m(b[0].bfloat16()).square().sum(), len(b[0])))
        for s in (1, 2)
    )
    for _ in range(2):
        run(step, [batch(0)], 1 / 32)
    groups, rest = step.state()
    assert {a.dtype.name for a in groups["model"].values()} == {"uint16"}
    other.load(groups, rest)
    for one in (step, other):
        run(one, [batch(1)], 1 / 32)
    for a, b in zip(step.model.parameters(), other.model.parameters()):
        assert torch.equal(a, b)


def test_ranks_draw_their_own_dropout():
    def drawn(rank):
        seed(3, rank)
        return torch.rand(4)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(0), drawn(1))
    torch.manual_seed(3)
    want = torch.rand(4)
    assert torch.equal(drawn(0), want)


@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
@pytest.mark.parametrize("name", RESUMED)
def test_every_optimizer_and_schedule_goes_on_to_the_bit(name, wire):
    goes_on(*(attached(mlp(start, extra=[nn.BatchNorm1d(16), nn.Dropout(0.3)]), RESUMED[name], wire())
              for start in (1, 2)))


@pytest.mark.parametrize("build", [mlp, tied])
def test_export(tmp_path, build):
    from safetensors.torch import load_model

    step = attached(build())
    assert step.export(tmp_path) == ["model.safetensors", "model.pt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt", "model.safetensors"]
    first, second = build(5), build(6)
    load_model(first, str(tmp_path / "model.safetensors"))
    second.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    close(weights(first), weights(step), 0)
    close(weights(second), weights(step), 0)


def test_read_only_arrays_train_without_a_warning():
    x, y = batch(0)
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(attached(mlp()), [(x, y)], 1 / 32)


# --- what a model holds beside its buffers ------------------------------------------------------------------------

class Holds(nn.Module):
    """Reads and moves generators of its own, a number, a tensor and an array that are no buffers."""

    def __init__(self):
        super().__init__()
        self.torch, self.numpy = torch.Generator(), np.random.default_rng(1)
        self.old, self.python = np.random.RandomState(1), random.Random(1)
        self.calls, self.tensor, self.array = 0, torch.zeros(()), np.zeros(1)

    def forward(self, x):
        self.calls += 1
        self.tensor += 1
        self.array += 1
        noise = self.numpy.random() + self.old.rand() + self.python.random() + self.array[0]
        return x * (float(noise) + self.calls + self.tensor.item() + torch.rand(x.shape, generator=self.torch))


def test_what_is_tried_before_the_first_step_moves_nothing_that_a_model_holds():
    def trained(**more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), Holds(), nn.Linear(16, 5))
        return bits(fitted(solo(config(max_steps=2, global_batch=8, **more), model, samples(24))))

    want = trained()
    assert all(trained(**more) == want for more in ({"micro_batch": "auto"}, {"remat": "auto"}, {"remat": "0"}))
