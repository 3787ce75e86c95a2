"""Losses of Keras by name that ignore a class: shares of a batch equal Keras' own mean over the whole batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
from small_runs import config, fitted, lockstep, make_model, samples, solo, weights  # noqa: E402

from hvdtrain.backends.keras.metrics import Evaluation  # noqa: E402
from hvdtrain.backends.keras.task import Task  # noqa: E402
from hvdtrain.backends.model_spec import spec_of  # noqa: E402
from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine import loop  # noqa: E402
from hvdtrain.engine.callbacks.history import History  # noqa: E402

DRAW = np.random.default_rng(3)
B, C, T = 11, 4, 6
OUT = DRAW.standard_normal((B, C)).astype(np.float32)
TOKENS = DRAW.standard_normal((B, T, C)).astype(np.float32)
LABELS, TOKEN_LABELS = DRAW.integers(0, C, B), DRAW.integers(0, C, (B, T))
LABELS[[0, 4]] = -1
for i in range(B):
    TOKEN_LABELS[i, i % T:] = -1  # 0 to 5 tokens count
SAMPLE_WEIGHTS = DRAW.uniform(0.1, 2, B).astype(np.float32)
IGNORING = {"from_logits": True, "ignore_class": -1}
SPARSE = Named("SparseCategoricalCrossentropy", IGNORING)
CASES = {
    "class": (SPARSE, OUT, LABELS), "tokens": (SPARSE, TOKENS, TOKEN_LABELS),
    "floating labels": (SPARSE, TOKENS, TOKEN_LABELS.astype(np.float32)),
    "column": (SPARSE, TOKENS, TOKEN_LABELS[..., None]),
    "function": (Named("sparse_categorical_crossentropy", IGNORING), OUT, LABELS),
    "auto": (Named("auto", {"ignore_class": -1}), TOKENS, TOKEN_LABELS),
    "real class": (Named("auto", {"ignore_class": 2, "reduction": "mean"}), TOKENS, np.abs(TOKEN_LABELS)),
}


def echo(outputs):
    """Return a model that returns its input."""
    return keras.Sequential([keras.Input(outputs.shape[1:]), keras.layers.Identity()])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("case", CASES)
def test_shares_of_a_batch_sum_to_the_mean_of_keras(case, weighted):
    named, outputs, labels = CASES[case]
    model = echo(outputs)
    task = Task(spec_of(model), config(loss=named))
    arrays = (outputs, labels, SAMPLE_WEIGHTS) if weighted else (outputs, labels)
    loss = total = by_feed = 0.0
    for rows in (slice(0, 1), slice(1, 5), slice(5, 11)):
        share = tuple(array[rows] for array in arrays)
        part, weight = task(model, tuple(map(tf.convert_to_tensor, share)), True)
        loss, total, by_feed = loss + float(part), total + float(weight), by_feed + task.batch_weight(share)
    own = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=named.args["ignore_class"])
    want = own(labels, outputs, SAMPLE_WEIGHTS.reshape(-1, *(1,) * (outputs.ndim - 2)) if weighted else None)
    assert loss / total == pytest.approx(float(want), rel=1e-6) and by_feed == pytest.approx(total, rel=1e-6)


def test_built_in_metrics_leave_ignored_labels_out():
    for names in (["accuracy"], ["SparseCategoricalAccuracy", "sparse_top_k_categorical_accuracy"]):
        model = echo(TOKENS)
        settings = config(loss=SPARSE, metrics=names)
        evaluation = Evaluation(spec_of(model), settings, Task(spec_of(model), settings))
        for rows in (slice(0, 2), slice(2, 11)):
            evaluation.count(evaluation.measure((tf.constant(TOKENS[rows]), tf.constant(TOKEN_LABELS[rows]))))
        found = evaluation.results(evaluation.take())
        counts = TOKEN_LABELS != -1
        right = (TOKENS.argmax(-1) == TOKEN_LABELS)[counts].mean()
        assert found[names[0]] == pytest.approx(right) and found.get(names[-1]) == pytest.approx(
            right if len(names) == 1 else 1.0)  # 5 of 4 classes


@pytest.mark.parametrize("name", ["SparseCategoricalCrossentropy", "auto", "MeanSquaredError"])
@pytest.mark.parametrize("reduction", ["sum", "none", "mean_with_sample_weight"])
def test_a_reduction_that_is_no_mean_over_samples_is_refused(name, reduction):
    with pytest.raises(UserError, match=f"reduction '{reduction}'"):
        model = echo(OUT)
        Task(spec_of(model), config(loss=Named(name, {"reduction": reduction})))


def test_a_mask_that_reaches_a_loss_by_name_is_refused():
    model = keras.Sequential([keras.Input((T,)), keras.layers.Embedding(C, 3, mask_zero=True), keras.layers.Dense(C)])
    task = Task(spec_of(model), config())
    with pytest.raises(UserError, match="output carries a mask"):
        task(model, (tf.constant(np.abs(TOKEN_LABELS)), tf.constant(np.abs(TOKEN_LABELS))), True)


# --- whole runs --------------------------------------------------------------------------------------------------

N, GLOBAL_BATCH = 22, 8
AUTO = Named("auto", {"ignore_class": -1})


def data(ignored=(0, 1, 5, 9, 10, 11, 12)):
    x, y = samples(N)
    y[list(ignored)] = -1
    return x, y


def settings(**changes):
    base = config(epochs=1, global_batch=GLOBAL_BATCH, loss=AUTO, **changes)
    return replace(base, data=replace(base.data, shuffle=False))


def plain(arrays, optimizer):
    """Return a loop of plain Keras over global batches in the data's order; batches without labels are left out."""
    model = make_model("tensorflow")
    loss_of = keras.losses.SparseCategoricalCrossentropy(**IGNORING)
    losses = []
    for at in range(0, N, GLOBAL_BATCH):
        x, y = (array[at:at + GLOBAL_BATCH] for array in arrays)
        if (y == -1).all():
            continue
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        losses.append((float(loss), len(x)))
    return ([np.array(v) for v in model.trainable_variables],
            np.average([loss for loss, _ in losses], weights=[n for _, n in losses]))


@pytest.mark.parametrize("size, ignored", [(1, (0, 1, 5, 9, 10, 11, 12)), (2, (0, 1, 5, 9, 10, 11, 12)), (2, range(8)),
                                           (1, range(13, 22))],
                         ids=["some", "some on two ranks", "all of the first batch", "all of the last batch"])
def test_runs_are_plain_keras_on_the_global_batch(size, ignored):
    own = {"weight_decay": 0.1}
    history = History()

    def work(run):
        run.callbacks += [history] if run.control.rank == 0 else []
        fitted(run)
        return [np.array(v) for v in run.spec.model.trainable_variables]
    found = lockstep(size, settings(optimizer=Named("AdamW", own), accumulate=2), lambda rank: make_model("tensorflow"),
                     data(ignored), work)
    want, loss = plain(data(ignored), keras.optimizers.AdamW(0.1, **own))
    for got in found:
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    assert history.history["loss"] == [pytest.approx(loss, rel=1e-5)]


def test_data_in_memory_without_ignored_labels_is_not_weighed():
    assert solo(settings(), make_model("tensorflow"), data([])).feed.weight_fn is None
    assert solo(settings(), make_model("tensorflow"), data([3])).feed.weight_fn is not None


def test_the_same_labels_give_the_same_figures_in_both_frameworks():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    arrays, found = data(), {}
    for framework, loss in (("tensorflow", AUTO), ("torch", Named("auto", {"ignore_index": -1}))):
        model = make_model(framework)
        for array, own in zip(GIVEN, model.weights if framework == "tensorflow" else model.parameters()):
            if framework == "tensorflow":
                own.assign(array)
            else:
                own.data.copy_(own.new_tensor(array.T))
        run = solo(replace(settings(), loss=loss), model, (arrays, arrays))
        found[framework] = loop.measure(run, run.eval_feed)
        assert len(weights(run)) == 4
    for name in ("loss", "accuracy"):
        assert found["tensorflow"][name] == pytest.approx(found["torch"][name], rel=1e-6)


GIVEN = [DRAW.standard_normal(shape).astype(np.float32) / 3 for shape in ((12, 16), (16,), (16, 5), (5,))]
