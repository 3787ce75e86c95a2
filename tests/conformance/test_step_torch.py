"""The PyTorch step: against a plain PyTorch loop, against itself under other cuts, and its state."""

import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from hvdtrain.backends.torch import Ops, create_step, seed  # noqa: E402
from hvdtrain.collectives.lockstep import LockstepWorld  # noqa: E402
from hvdtrain.collectives.null import NullCollectives  # noqa: E402
from hvdtrain.config import Config, Named, Schedule  # noqa: E402
from hvdtrain.errors import UserError  # noqa: E402
from hvdtrain.exchange.buckets import plan_buckets  # noqa: E402
from hvdtrain.exchange.compressors.none import NoCompression  # noqa: E402
from hvdtrain.exchange.reducer import Reducer  # noqa: E402
from hvdtrain.protocols import AllReduce  # noqa: E402

SGD = Config(optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 12)).astype(np.float32)
Y = RNG.integers(0, 5, 64)
CUTS = [((32,),), ((20,), (12,)), ((0,), (32,)), ((7, 6), (0,), (19,)), ((1,), (30, 1), (0,))]


@pytest.fixture(autouse=True)
def one_thread():
    """Lockstep ranks are threads of this process; torch's own threads would only get in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mlp(start=3, extra=()):
    """A small perceptron on (B, 12) with 5 outputs, the same for the same ``start``."""
    torch.manual_seed(start)
    return nn.Sequential(nn.Linear(12, 16), *extra, nn.Tanh(), nn.Linear(16, 5))


def spec(model, **parts):
    return SimpleNamespace(**{"name": "m", "model": model, "task": None, "weight": None, "blocks": None, "example": None,
                              "metrics": None, **parts})


class TwoRanksInOne(NullCollectives):
    """A world of two whose other rank has no sample: the buckets and hooks of several ranks, the sums of one."""

    def __init__(self):
        super().__init__(0, 2)


def attached(model, config=SGD, wire=None, rank=0, compressor=None, bucket_mb=0.0005, **parts):
    """A step whose reducer has several small buckets."""
    step = create_step(spec(model, **parts), config, SimpleNamespace(rank=rank), 10)
    step.attach(Reducer(plan_buckets(step.params(), bucket_mb), compressor or NoCompression(), wire or NullCollectives(), Ops()))
    step.share_initial()
    return step


def run(step, micros, scale, clip=0.0, check=False):
    """One step over this rank's micro-batches."""
    step.zero()
    pairs = [step.forward_backward(m, scale, i + 1 == len(micros)) for i, m in enumerate(micros)]
    assert step.exchange() >= 0
    return step.apply(clip, check), [(float(a), float(b)) for a, b in pairs]


def batch(t, n=32):
    """Global batch t."""
    index = np.random.default_rng(t).permutation(64)[:n]
    return X[index], Y[index]


def cut(whole, *sizes):
    """The first ``sizes`` of a batch as parts; empty ones are left out."""
    ends = np.cumsum((0, *sizes))
    return [tuple(a[i:j] for a in whole) for i, j in zip(ends, ends[1:]) if j > i]


def weights(step_or_model):
    model = getattr(step_or_model, "model", step_or_model)
    return {n: t.detach().numpy().copy() for n, t in model.state_dict().items()}


def close(got, want, rtol):
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=rtol * np.abs(want[name]).max(), err_msg=name)


def plain(model, optimizer, steps=20, clip=0.0, schedule=None, rate=None, micros=1):
    """What a PyTorch user writes by hand."""
    for t in range(steps):
        optimizer.zero_grad()
        for x, y in cut(batch(t), *[32 // micros] * micros):
            (F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y), reduction="sum") / 32).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(t)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model


OPTIMIZERS = {"sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}), "adam": (torch.optim.Adam, {}),
              "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1})}


@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop_bit_for_bit(name, micros, wire):
    """Gradients as autograd leaves them and as views of buckets: the same bits as without hvdtrain."""
    make, args = OPTIMIZERS[name]
    want = mlp()
    plain(want, make(want.parameters(), lr=0.01, **args), micros=micros)
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
    """Weights of every rank after ``steps`` in lockstep; ``parts``: micro-batch sizes of each rank, rotated at every step."""
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


class Tied(nn.Module):
    """Input and output share one matrix; a part is never used, another only for some samples."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        h = torch.tanh(self.middle(self.table(x)))
        if (x == 0).any():
            h = h + self.sometimes(h) * (x == 0).unsqueeze(1)
        return self.out(h)


def tied(start=1):
    torch.manual_seed(start)
    return Tied()


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
        def allreduce(self, flat_N, name):
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

    def one_rank(control, wire):
        model = Kinds(control.rank)
        step = create_step(spec(model), SGD, SimpleNamespace(rank=control.rank), 10)
        step.attach(Reducer(plan_buckets(step.params(), 1), NoCompression(), wire, Ops()))
        step.share_initial()
        first = {n: t.clone() for n, t in model.state_dict().items()}
        model.mean.fill_(control.rank)
        model.narrow = model.narrow.float()
        step.sync_buffers()
        return first, model.mean.clone(), int(model.count)

    results = LockstepWorld(3).run(one_rank)
    for first, mean, count in results:
        for name, tensor in Kinds(0).state_dict().items():
            assert torch.equal(first[name], tensor), name
        assert torch.equal(mean, torch.ones(4)) and count == 5


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


# --- loss, metrics -------------------------------------------------------------------------------------------------

def test_sample_weights():
    model, step = mlp(), attached(mlp(), replace(SGD, optimizer=Named("sgd")))
    w = np.linspace(0, 2, 32).astype(np.float32)
    x, y = batch(0)
    per_sample = F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y), reduction="none").detach().numpy()
    step.zero()
    loss, weight = step.forward_backward((x, y, w), 1 / 32, True)
    assert weight == 32 and float(loss) == pytest.approx(float((per_sample * w).sum()), rel=1e-5)


@pytest.mark.parametrize("name, args", [("auto", {}), ("mse_loss", {}), ("MSELoss", {}), ("mseloss", {}), ("huber_loss", {"delta": 0.5}),
                                        ("HuberLoss", {"delta": 0.5}), ("l1_loss", {})])
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
    for named, said in ((Named("hubr_loss"), "did you mean 'huber_loss'"), (Named("huber_loss", {"detla": 1}), "did you mean 'delta'"),
                        (Named("HuberLoss", {"detla": 1}), "did you mean 'delta'"), (Named("relu"), "is not in torch.nn.functional"),
                        (Named("sys"), "is not in torch.nn.functional")):
        with pytest.raises(UserError, match=said):
            attached(mlp(), replace(SGD, loss=named))
    step = attached(mlp(), task=lambda m, b: (m(b[0]).mean(1), 1))
    with pytest.raises(UserError, match=r"a loss of type Tensor and shape \(32,\)"):
        step.forward_backward(batch(0), 1.0, True)


def test_squared_error_never_broadcasts():
    """(B, 1) against (B,) would give (B, B), and PyTorch only warns."""
    step = attached(nn.Sequential(nn.Linear(12, 1)))
    with warnings.catch_warnings(), pytest.raises(UserError, match=r"output has shape \(64, 1\) and the targets \(64,\)"):
        warnings.simplefilter("error")
        step.forward_backward((X, X[:, 0].copy()), 1.0, True)


@pytest.mark.parametrize("y, names", [(Y, ["accuracy", "cross_entropy"]), (X[:, :5].copy(), ["l1_loss", "mse_loss"])], ids=["classes", "values"])
def test_metrics_are_exact_over_uneven_shards(y, names):
    config = replace(SGD, metrics=names)
    shards = [attached(mlp(), config, rank=r) for r in range(3)]
    for rank, pieces in enumerate(([slice(0, 3), slice(3, 50)], [slice(50, 64)], [])):
        for piece in pieces:
            shards[rank].evaluate((X[piece], y[piece]))
    everyone = [step.eval_totals() for step in shards]
    assert everyone[2] == {} and list(everyone[0]) == ["loss", *names]
    summed = {name: everyone[0][name] + everyone[1][name] for name in everyone[0]}
    whole = attached(mlp(), config)
    whole.evaluate((X, y))
    assert shards[2].eval_results(summed) == pytest.approx(whole.eval_results(whole.eval_totals()), rel=1e-6)
    assert shards[0].eval_totals() == {} and whole.model.training
    with torch.no_grad():
        out = mlp()(torch.from_numpy(X)).numpy()
    if y is Y:
        assert summed["accuracy"].tolist() == [(out.argmax(1) == Y).sum(), 64]
    else:
        assert summed["l1_loss"][0] / 64 == pytest.approx(np.abs(out - y).mean(), rel=1e-5)


def test_metrics_of_the_users():
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        attached(mlp(), replace(SGD, metrics=["acuracy"]))
    step = attached(mlp(), task=lambda m, b: (m(b[0]).sum(), len(b[0])), metrics=lambda m, b: {"rows": (torch.tensor(len(b[0])), 1)})
    step.evaluate((X, Y))
    totals = step.eval_totals()
    assert totals["rows"].tolist() == [64, 1] and totals["loss"][1] == 64


def test_evaluation_changes_no_statistics():
    step = attached(mlp(extra=[nn.BatchNorm1d(16), nn.Dropout(0.5)]))
    before = weights(step)
    step.evaluate((X, Y))
    first = step.eval_totals()["loss"]
    step.evaluate((X, Y))
    np.testing.assert_array_equal(step.eval_totals()["loss"], first)
    close(weights(step), before, 0)
    run(step, [batch(0)], 1 / 32)
    assert not np.array_equal(weights(step)["1.running_mean"], before["1.running_mean"])
    assert len(step.caveats()) == 2 and attached(mlp()).caveats() == []


# --- optimizer, schedule -------------------------------------------------------------------------------------------

def test_schedule_warm_up_and_scaling():
    schedule = Schedule("exponentiallr", {"gamma": 0.5}, warmup_steps=4, linear_scaling_base=16)
    step = attached(mlp(), Config(optimizer=Named("sgd"), lr=0.1, schedule=schedule, global_batch=32))
    rates = []
    for t in range(20):
        rates.append(step.learning_rate())
        run(step, [batch(t)], 1 / 32)
    formula = [0.2 * 0.5**t * min(1, (t + 1) / 4) for t in range(20)]
    assert rates == pytest.approx(formula, rel=1e-6)
    want = mlp()
    plain(want, torch.optim.SGD(want.parameters(), lr=1.0), rate=lambda t: formula[t])
    close(weights(step), weights(want), 1e-6)
    assert step.describe() == {"optimizer": "SGD, lr 0.2", "schedule": "ExponentialLR per step", "warm-up": "linear over 4 steps",
                               "lr scaling": "0.1 x 32/16", "device": "cpu"}


@pytest.mark.parametrize("name, args", [("CosineAnnealingLR", {"T_max": 7}), ("OneCycleLR", {"max_lr": 0.2, "total_steps": 30}),
                                        ("MultiStepLR", {"milestones": [3, 9]}), ("CosineAnnealingWarmRestarts", {"T_0": 4})])
def test_schedules_are_torchs_own(name, args):
    want = mlp()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9)
    plain(want, optimizer, schedule=getattr(torch.optim.lr_scheduler, name)(optimizer, **args))
    step = attached(mlp(), replace(SGD, schedule=Schedule(name, args)))
    for t in range(20):
        run(step, [batch(t)], 1 / 32)
    close(weights(step), weights(want), 0)


def test_an_epoch_schedule_moves_with_epochs():
    step = attached(mlp(), Config(optimizer=Named("sgd"), lr=0.8, schedule=Schedule("steplr", {"step_size": 1, "gamma": 0.5}, "epoch")))
    rates = []
    for _ in range(3):
        for t in range(2):
            run(step, [batch(t)], 1 / 32)
            rates.append(step.learning_rate())
        step.end_epoch()
    assert rates == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]


def test_optimizers_that_cannot_be():
    for config, said in ((Config(optimizer=Named("adm")), "did you mean 'Adam'"), (Config(optimizer=Named("lbfgs")), "closure"),
                         (Config(optimizer=Named("sgd", {"momentun": 1})), "momentun"), (Config(optimizer=Named("sgd", {"lr": 1})), "lr"),
                         (Config(schedule=Schedule("cosineannealinglr")), "T_max"), (Config(schedule=Schedule("cosine")), "CosineAnnealingLR"),
                         (Config(schedule=Schedule("ReduceLROnPlateau")), "is not one of")):
        with pytest.raises(UserError, match=said):
            attached(mlp(), config)
    frozen = mlp()
    for p in frozen.parameters():
        p.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        attached(frozen)


# --- state ---------------------------------------------------------------------------------------------------------

RESUMED = {
    "sgd": SGD, "adam": Config(lr=0.01, schedule=Schedule(warmup_steps=8)),
    "cycle": Config(lr=0.01, schedule=Schedule("OneCycleLR", {"max_lr": 0.05, "total_steps": 12})),  # moves Adam's betas too
    "cosine": replace(SGD, schedule=Schedule("CosineAnnealingLR", {"T_max": 5})),
    "restarts": replace(SGD, schedule=Schedule("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 2})),
    "milestones": replace(SGD, schedule=Schedule("MultiStepLR", {"milestones": [2, 4]})),
    "amsgrad": Config(optimizer=Named("adamw", {"amsgrad": True}), lr=0.01), "adagrad": Config(optimizer=Named("adagrad"), lr=0.05),
    "rmsprop": Config(optimizer=Named("rmsprop", {"centered": True, "momentum": 0.5}), lr=0.005),
    "nadam": Config(optimizer=Named("nadam"), lr=0.01), "radam": Config(optimizer=Named("radam"), lr=0.01),
    "adafactor": Config(optimizer=Named("adafactor"), lr=0.01), "asgd": Config(optimizer=Named("asgd"), lr=0.01)}


@pytest.mark.parametrize("wire", [NullCollectives, TwoRanksInOne])
@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_equal(name, wire):
    """With dropout and BatchNorm, through JSON, into a model of other weights."""
    import json

    def build(start):
        return mlp(start, extra=[nn.BatchNorm1d(16), nn.Dropout(0.3)])

    config = RESUMED[name]
    step, other = attached(build(1), config, wire()), attached(build(2), config, wire())
    for t in range(7):
        run(step, [batch(t)], 1 / 32)
        if t == 2:
            groups, rest = step.state()
            own = step.rank_state()
    final = weights(step)
    assert set(groups) == {"model", "optimizer"} and all(isinstance(a, np.ndarray) for g in groups.values() for a in g.values())
    other.load({g: dict(sorted(arrays.items(), reverse=True)) for g, arrays in groups.items()}, json.loads(json.dumps(rest, allow_nan=False)))
    other.load_rank(own)
    for t in range(3, 7):
        run(other, [batch(t)], 1 / 32)
    close(weights(other), final, 0)
    assert other.learning_rate() == step.learning_rate()


def test_a_state_is_a_copy():
    step = attached(mlp())
    run(step, [batch(0)], 1 / 32)
    groups, _ = step.state()
    kept = {g: {n: a.copy() for n, a in arrays.items()} for g, arrays in groups.items()}
    run(step, [batch(1)], 1 / 32)
    for g in groups:
        for name in groups[g]:
            np.testing.assert_array_equal(groups[g][name], kept[g][name])


def test_bfloat16_weights_survive():
    step, other = (attached(mlp(s).to(torch.bfloat16), task=lambda m, b: (m(b[0].bfloat16()).square().sum(), len(b[0]))) for s in (1, 2))
    for _ in range(2):
        run(step, [batch(0)], 1 / 32)
    groups, rest = step.state()
    assert {a.dtype.name for a in groups["model"].values()} == {"uint16"}
    other.load(groups, rest)
    for one in (step, other):
        run(one, [batch(1)], 1 / 32)
    for a, b in zip(step.model.parameters(), other.model.parameters()):
        assert torch.equal(a, b)


def test_a_foreign_checkpoint_is_refused_and_changes_nothing():
    donor = attached(mlp())
    run(donor, [batch(0)], 1 / 32)
    groups, rest = donor.state()
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6))
    for model, config, said in ((wide, SGD, r"tensor 2.weight has shape \(5, 16\); expected \(6, 16\)"),
                                (mlp(extra=[nn.BatchNorm1d(16)]), SGD, "lacks.*has|has state for"),
                                (mlp(8), Config(), "made with SGD; expected Adam")):
        step = attached(model, config)
        before = weights(step)
        with pytest.raises(UserError, match=said):
            step.load(groups, rest)
        close(weights(step), before, 0)


class Halves:
    """A compressor with state: sends half of what is there and keeps the rest for later."""

    name = "halves"

    def init(self, ops, n):
        return {"rest": ops.zeros(n, "float32")}

    def exchange(self, ops, flat_N, state, size):
        half_N = (flat_N + state["rest"]) * 0.5
        rest_N = flat_N + state["rest"] - half_N
        total_N = yield AllReduce(half_N)
        return total_N, {"rest": rest_N}

    def wire_bytes(self, n, size):
        return 4 * n


def test_compressor_state_lives_between_steps_and_through_a_checkpoint():
    step, resumed, full = attached(mlp(), compressor=Halves()), attached(mlp(8), compressor=Halves()), attached(mlp())
    for t in range(4):
        run(step, [batch(t)], 1 / 32)
        if t == 1:
            resumed.load(*step.state())
            resumed.load_rank(step.rank_state())
        if t > 1:
            run(resumed, [batch(t)], 1 / 32)
    close(weights(resumed), weights(step), 0)
    run(full, [batch(0)], 1 / 32)
    assert not np.allclose(weights(full)["0.weight"], weights(step)["0.weight"])


def test_ranks_draw_their_own_dropout():
    def drawn(rank):
        seed(3, rank)
        return torch.rand(4)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(0), drawn(1))
    torch.manual_seed(3)
    want = torch.rand(4)
    assert torch.equal(drawn(0), want)


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
