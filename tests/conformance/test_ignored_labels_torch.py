"""Losses of PyTorch by name in shares of a batch equal torch's own mean over the whole batch, also with ignored labels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from small_runs import CLASSES, Record, config, fitted, lockstep, make_model, samples, solo, weights  # noqa: E402
from torch.nn import functional  # noqa: E402

from hvdtrain.backends.model_spec import spec_of  # noqa: E402
from hvdtrain.backends.torch.losses import Loss, names, refuse_other_inputs  # noqa: E402
from hvdtrain.backends.torch.task import ByName, Metrics  # noqa: E402
from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine import loop  # noqa: E402
from hvdtrain.engine.callbacks.base import Callback  # noqa: E402
from hvdtrain.engine.callbacks.history import History  # noqa: E402

DRAW = np.random.default_rng(3)
B, C, T = 11, 4, 6
CLASS_WEIGHTS = [0.5, 2.0, 0.0, 1.25]


def drawn(*shape):
    return torch.from_numpy(DRAW.standard_normal(shape))


OUT, TOKENS, VECTOR = drawn(B, C), drawn(B, C, T), drawn(B)
LABELS, TOKEN_LABELS = (torch.from_numpy(DRAW.integers(0, C, shape)) for shape in ((B,), (B, T)))
LABELS[[0, 4]] = -100
for i in range(B):
    TOKEN_LABELS[i, i % T:] = -100  # 0 to 5 tokens count
PADDED = torch.where(TOKEN_LABELS == -100, 3, TOKEN_LABELS)
SHARES = drawn(B, C).softmax(1)
BITS = (drawn(B, C) > 0).double()
SIGNS = BITS * 2 - 1
SETS = torch.from_numpy(DRAW.integers(0, C, (B, C)))
LOG, TOKEN_LOG = OUT.log_softmax(1), TOKENS.log_softmax(1)

LABEL_CASES = [({}, 0), ({"ignore_index": 3}, 1), ({"weight": CLASS_WEIGHTS}, 0), ({"weight": CLASS_WEIGHTS}, 1),
               ({"weight": CLASS_WEIGHTS, "ignore_index": 3, "reduction": "mean"}, 1)]
CASES = [
    *[(name, args, *((OUT, LABELS), (TOKENS, PADDED if "ignore_index" in args else TOKEN_LABELS))[tokens])
      for name in ("auto", "cross_entropy", "CrossEntropyLoss") for args, tokens in LABEL_CASES],
    *[(name, args, *((LOG, LABELS), (TOKEN_LOG, PADDED if "ignore_index" in args else TOKEN_LABELS))[tokens])
      for name in ("nll_loss", "NLLLoss") for args, tokens in LABEL_CASES],
    *[("cross_entropy", {"label_smoothing": 0.1, **args}, TOKENS, TOKEN_LABELS) for args in ({}, LABEL_CASES[2][0])],
    ("cross_entropy", {}, OUT, SHARES), ("cross_entropy", {"weight": CLASS_WEIGHTS}, OUT, SHARES),
    ("auto", {}, OUT, BITS), ("cross_entropy", {"ignore_index": 3}, OUT, SETS[:, 0].to(torch.uint8)),
    *[(name, args, OUT.sigmoid(), BITS) for name in ("binary_cross_entropy", "BCELoss")
      for args in ({}, {"weight": CLASS_WEIGHTS})],
    *[(name, args, OUT, BITS) for name in ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss")
      for args in ({}, {"weight": CLASS_WEIGHTS}, {"pos_weight": CLASS_WEIGHTS, "weight": CLASS_WEIGHTS})],
    ("BCEWithLogitsLoss", {"pos_weight": [3.0]}, VECTOR, BITS[:, 0]),
    *[(name, args, LOG, SHARES) for name in ("kl_div", "KLDivLoss")
      for args in ({}, {"reduction": "batchmean"}, {"reduction": "mean", "log_target": True})],
    ("kl_div", {"reduction": "batchmean"}, TOKEN_LOG, TOKENS.softmax(1)),
    *[(name, {}, TOKENS, TOKENS.flip(0)) for name in (
        "mse_loss", "MSELoss", "l1_loss", "L1Loss", "huber_loss", "HuberLoss", "smooth_l1_loss", "SmoothL1Loss",
        "poisson_nll_loss", "PoissonNLLLoss")],
    *[(name, {}, OUT, SIGNS) for name in (
        "hinge_embedding_loss", "HingeEmbeddingLoss", "soft_margin_loss", "SoftMarginLoss")],
    *[(name, {}, OUT, SETS) for name in ("multilabel_margin_loss", "MultiLabelMarginLoss")],
    *[(name, args, OUT, BITS) for name in ("multilabel_soft_margin_loss", "MultiLabelSoftMarginLoss")
      for args in ({}, {"weight": CLASS_WEIGHTS})],
    *[(name, args, OUT, SETS[:, 0]) for name in ("multi_margin_loss", "MultiMarginLoss")
      for args in ({}, {"weight": CLASS_WEIGHTS, "p": 2})],
]


def torchs_own(name, args, outputs, targets):
    """Return the loss of the whole batch as torch itself reduces it."""
    functions, classes = names()
    if name == "auto":
        name = "mse_loss" if targets.is_floating_point() else "cross_entropy"
    tensors = {k: torch.tensor(v, dtype=outputs.dtype) if isinstance(v, list) else v for k, v in args.items()}
    if name in classes:
        return classes[name](**tensors)(outputs, targets)
    return functions[name](outputs, targets, **tensors)


@pytest.mark.parametrize("name, args, outputs, targets", CASES,
                         ids=[f"{n}-{'-'.join(a)}-{o.dim()}d" for n, a, o, _ in CASES])
def test_shares_of_a_batch_sum_to_the_mean_of_torch(name, args, outputs, targets):
    task = ByName(config(loss=Named(name, args)))
    shares = [slice(0, 1), slice(1, 5), slice(5, 11)]
    pairs = [task.pair(outputs[s], targets[s], ()) for s in shares]
    loss, weight = (sum(float(pair[i]) for pair in pairs) for i in (0, 1))
    assert loss / weight == pytest.approx(float(torchs_own(name, args, outputs, targets)), rel=1e-12)
    by_feed = [len(targets[s]) if task.batch_weight is None else
               task.batch_weight((outputs[s].numpy(), targets[s].numpy())) for s in shares]
    assert by_feed == pytest.approx([float(pair[1]) for pair in pairs], rel=1e-12)


def test_no_loss_by_name_is_without_a_case():
    taken = set()
    for group in names():
        for name, loss in group.items():
            try:
                refuse_other_inputs(loss, Named(name))
                taken.add(name)
            except UserError:
                pass
    assert taken == {name for name, *_ in CASES} - {"auto"}


def test_a_batch_whose_labels_all_count_weighs_its_samples():
    labels = TOKEN_LABELS.clamp(min=0)
    task = ByName(config())
    assert float(task.pair(TOKENS, labels, ())[1]) == B == task.batch_weight((TOKENS.numpy(), labels.numpy()))


@pytest.mark.parametrize("name, args, words", [
    ("cross_entropy", {"reduction": "sum"}, "reduction 'sum'; expected reduction mean"),
    ("mse_loss", {"reduction": "batchmean"}, "reduction 'batchmean'"),
    ("kl_div", {"reduction": "none"}, "expected reduction mean or batchmean"),
    ("MSELoss", {"size_average": False}, "MSELoss with size_average"),
    ("mse_loss", {"weight": [1.0]}, "one number for each element of a batch"),
    ("huber_loss", {"weight": [1.0]}, "one number for each element of a batch"),
    ("cross_entropy", {"weight": "1,2"}, "expected a list of numbers of 0 or more"),
    ("cross_entropy", {"weight": [1.0, -1.0]}, "expected a list of numbers of 0 or more"),
    ("auto", {"weight": 2.0}, "expected a list with a number for each class"),
    ("nll_loss", {"ignore_index": "x"}, "loss.args.ignore_index is 'x'"),
])
def test_arguments_that_are_no_mean_over_the_batch(name, args, words):
    with pytest.raises(UserError, match=words):
        Loss(Named(name, args))


@pytest.mark.parametrize("name, args, outputs, targets, words", [
    ("BCEWithLogitsLoss", {"weight": [1.0, 2.0]}, VECTOR[:2], BITS[:2, 0], "expected weights within a sample"),
    ("cross_entropy", {"weight": [1.0, 2.0]}, OUT, LABELS, "weight tensor should be defined"),
    ("auto", {"weight": CLASS_WEIGHTS}, OUT, BITS, "mse_loss with loss.args.weight"),
])
def test_weights_that_do_not_fit_the_outputs(name, args, outputs, targets, words):
    with pytest.raises(UserError, match=words):
        ByName(config(loss=Named(name, args))).pair(outputs, targets, ())


def test_sample_weights_are_in_the_sum_alone():
    sample_weights = torch.rand(B, dtype=torch.float64)
    loss, weight = ByName(config()).pair(TOKENS, TOKEN_LABELS, (sample_weights,))
    values = functional.cross_entropy(TOKENS, TOKEN_LABELS, reduction="none")
    want = (values * sample_weights[:, None]).sum() / (TOKEN_LABELS != -100).sum()
    assert float(loss / weight) == pytest.approx(float(want), rel=1e-12)


def test_metrics_leave_ignored_labels_out():
    settings = config(metrics=["accuracy", "cross_entropy"], loss=Named("cross_entropy", {"ignore_index": 3}))
    metrics = Metrics(spec_of(torch.nn.Identity()), settings, lambda *_: None)
    for share in (slice(0, 2), slice(2, 11)):
        metrics.add(torch.nn.Identity(), (TOKENS[share], PADDED[share]))
    counts = PADDED != 3
    right = ((TOKENS.argmax(1) == PADDED) & counts).sum() / counts.sum()
    found = {name: s / w for name, (s, w) in metrics.take().items()}
    assert found["accuracy"] == pytest.approx(float(right))
    assert found["cross_entropy"] == pytest.approx(found["loss"], rel=1e-12)
    assert found["loss"] == pytest.approx(float(functional.cross_entropy(TOKENS, PADDED, ignore_index=3)), rel=1e-12)


# --- whole runs --------------------------------------------------------------------------------------------------

N, GLOBAL_BATCH = 22, 8


def data(ignored=(0, 1, 5, 9, 10, 11, 12)):
    x, y = samples(N)
    y[list(ignored)] = -100
    return x, y


def plain(arrays, optimizer=torch.optim.SGD, **args):
    """Return a loop of plain PyTorch over global batches in the data's order; batches without labels are left out."""
    model = make_model("torch")
    made = optimizer(model.parameters(), lr=0.1)
    x, y = map(torch.from_numpy, arrays)
    losses = []
    for at in range(0, len(x), GLOBAL_BATCH):
        rows = slice(at, at + GLOBAL_BATCH)
        if (y[rows] == -100).all():
            continue
        made.zero_grad()
        loss = functional.cross_entropy(model(x[rows]), y[rows], **args)
        loss.backward()
        made.step()
        losses.append((float(loss.detach()), len(x[rows])))
    mean = np.average([loss for loss, _ in losses], weights=[n for _, n in losses])
    return [p.detach().numpy() for _, p in sorted(model.named_parameters())], mean


def settings(**changes):
    base = config(epochs=1, global_batch=GLOBAL_BATCH, **changes)
    return replace(base, data=replace(base.data, shuffle=False))


class Samples(torch.utils.data.Dataset):
    """Samples that are not in memory, so that every step is weighed."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = data()
        return x[i], y[i]


@pytest.mark.parametrize("changes, size", [
    ({}, 1), ({}, 3), ({"accumulate": 3}, 2), ({"shares": [0, 1]}, 2),
    ({"loss": Named("CrossEntropyLoss", {"weight": [1.0, 0.0, 3.0, 0.25, 2.0]})}, 3),
    ({"data_parallel": "zero"}, 2),
], ids=str)
@pytest.mark.parametrize("source", ["arrays", "dataset"])
def test_runs_are_plain_torch_on_the_global_batch(changes, size, source):
    if "data_parallel" in changes:
        changes = {"data_parallel": replace(config().data_parallel, name="zero")}
    args = {k: torch.tensor(v) for k, v in changes["loss"].args.items()} if "loss" in changes else {}
    given = data() if source == "arrays" else Samples()
    history = [History() for _ in range(size)]

    def work(run):
        run.callbacks.append(history[run.control.rank])
        return weights(fitted(run))
    found = lockstep(size, settings(**changes), lambda rank: make_model("torch"), given, work)
    want, loss = plain(data(), **args)
    for got in found:
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert [each.history["loss"] for each in history] == [[pytest.approx(loss, rel=1e-5)]] * size


@pytest.mark.parametrize("ignored", [range(8), range(8, 16), range(13, 22)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_global_batch_without_labels_changes_nothing(size, ignored):
    optimizer = Named("AdamW", {"weight_decay": 0.1})
    history = History()

    def work(run):
        run.callbacks += [history] if run.control.rank == 0 else []
        return weights(fitted(run))
    found = lockstep(size, settings(optimizer=optimizer, nan_guard="stop"), lambda rank: make_model("torch"),
                     data(ignored), work)
    want, loss = plain(data(ignored), optimizer=lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0.1))
    for got in found:
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert history.history["loss"] == [pytest.approx(loss, rel=1e-5)]


def test_a_wish_to_stop_or_save_is_heard_in_a_step_without_labels(tmp_path):
    class Wish(Callback):
        def step_start(self, run):
            if run.state.cursor.step == 1:
                run.want_stop("enough")
                run.want_save()

    def work(run):
        record = Record()
        run.callbacks[:0] = [Wish(), record]
        fitted(run)
        return run.state.cursor.step, run.state.stop, record.saved_at

    found = lockstep(2, settings(out=str(tmp_path)), lambda rank: make_model("torch"), data(range(8, 16)), work)
    assert found == [(2, "enough", [2])] * 2


def test_data_in_memory_without_ignored_labels_is_not_weighed():
    """No sum over ranks in each step, and the bits that runs had before."""
    assert solo(settings(), make_model("torch"), data([])).feed.weight_fn is None
    assert solo(settings(), make_model("torch"), data([21])).feed.weight_fn is not None
    x, y = samples(N)
    regression = settings(metrics=[])
    assert solo(regression, make_model("torch"), (x, np.eye(CLASSES, dtype=np.float32)[y])).feed.weight_fn is None


def test_evaluation_over_ranks_counts_labels():
    x, y = data()
    measured = lockstep(2, settings(), lambda rank: make_model("torch"), ((x, y), (x, y)),
                        lambda run: loop.measure(run, run.eval_feed))
    with torch.no_grad():
        outputs = make_model("torch")(torch.from_numpy(x))
    counts = y != -100
    want = functional.cross_entropy(outputs, torch.from_numpy(y))
    for found in measured:
        assert found["loss"] == pytest.approx(float(want), rel=1e-6)
        assert found["accuracy"] == pytest.approx((outputs.argmax(1).numpy() == y)[counts].mean())
