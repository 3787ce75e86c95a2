"""Mistakes with a PyTorch model and their messages: loss by name, targets, and what a task returns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_tools import SGD, X, Y, attached, mlp, one_thread, run, weights  # noqa: E402, F401

from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402


def step_of(loss="auto", model=None, args=None, **parts):
    return attached(model or mlp(), replace(SGD, loss=Named(loss, args or {})), **parts)


def told(step, x, y):
    """Return the words of the `UserError` that training on (x, y) ends in; evaluation must end in the same."""
    words = []
    for go in (lambda: run(step, [(x, y)], 1 / len(x)), lambda: step.evaluate((x, y))):
        with pytest.raises(UserError) as error:
            go()
        words.append(str(error.value))
    assert words[0] == words[1]
    return words[0]


@pytest.mark.parametrize("loss", ["auto", "cross_entropy", "CrossEntropyLoss"])
def test_class_numbers_out_of_range(loss):
    y = np.arange(8) % 6 + 1
    words = told(step_of(loss), X[:8], y)
    assert f"loss {loss}" in words and "int64[8]" in words and "float32[8, 5]" in words
    assert "targets run from 1 to 6" in words and "expected 0..4 for a model with 5 outputs" in words


def test_targets_to_ignore_do_not_count_as_out_of_range():
    y = np.array([255, 0, 7, 255])
    assert "targets run from 0 to 7" in told(step_of("cross_entropy", args={"ignore_index": 255}), X[:4], y)


@pytest.mark.parametrize("loss, y, words", [
    ("cross_entropy", np.zeros((8, 3), np.int64), ["loss cross_entropy refused", "int64[8, 3] from 0 to 0", "torch: "]),
    ("binary_cross_entropy_with_logits", np.zeros((8, 3), np.float32), ["float32[8, 5]", "float32[8, 3]"]),
    ("nll_loss", np.zeros(8, np.float32), ["loss nll_loss refused", "float32[8]"]),
    ("mse_loss", np.zeros((8, 4), np.float32), ["loss mse_loss refused", "float32[8, 4]"]),
])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_does_not_fit_its_inputs(loss, y, words):
    found = told(step_of(loss), X[:8], y)
    assert all(word in found for word in words), found


def test_a_column_of_class_numbers_is_taken_as_a_vector():
    column, vector = step_of(metrics=None), step_of()
    assert run(column, [(X[:8], Y[:8, None])], 1 / 8) == run(vector, [(X[:8], Y[:8])], 1 / 8)
    for name, value in weights(vector).items():
        np.testing.assert_array_equal(weights(column)[name], value)
    counted = attached(mlp(), replace(SGD, metrics=["accuracy"]))
    counted.evaluate((X[:8], Y[:8, None]))
    assert counted.eval_totals()["accuracy"][1] == 8


def test_class_numbers_for_a_single_output():
    assert "expected one output per class" in told(step_of(model=nn.Linear(12, 1)), X[:8], Y[:8])


class Several(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(12, 5), kind

    def forward(self, x):
        return self.kind([("a", self.layer(x)), ("b", self.layer(x))])


@pytest.mark.parametrize("kind", [tuple, dict])
def test_a_model_that_returns_several_things(kind):
    words = told(step_of(model=Several(kind)), X[:8], Y[:8])
    assert f"the model returns a {kind.__name__}; expected one tensor" in words


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(11, 5)

    def forward(self, x):
        return self.layer(x)


def test_an_error_of_the_model_itself_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(step_of(model=Broken()), [(X[:8], Y[:8])], 1 / 8)


@pytest.mark.parametrize("loss", ["ctc_loss", "CTCLoss", "triplet_margin_loss", "cosine_embedding_loss",
                                  "MarginRankingLoss", "gaussian_nll_loss", "GaussianNLLLoss"])
def test_a_loss_of_more_than_outputs_and_targets(loss):
    with pytest.raises(UserError, match=f"{loss} is a loss of .* expected a loss of only the model's output"):
        step_of(loss)


def test_a_metric_of_more_than_outputs_and_targets():
    with pytest.raises(UserError, match="triplet_margin_loss is a loss of"):
        attached(mlp(), replace(SGD, metrics=["triplet_margin_loss"]))


def test_every_other_loss_of_torch_is_still_taken():
    for loss in ("nll_loss", "kl_div", "huber_loss", "smooth_l1_loss", "PoissonNLLLoss", "BCELoss", "MultiMarginLoss"):
        step_of(loss)


@pytest.mark.parametrize("made, words", [
    (lambda loss: None, "task returned a NoneType; expected"),
    (lambda loss: loss.sum(), "task returned a Tensor; expected"),
    (lambda loss: (loss.sum(), 8, 1), "task returned a tuple of 3; expected"),
    (lambda loss: (loss, 8), "task returned a loss of type Tensor and shape"),
    (lambda loss: (loss.sum(), None), "task returned a weight of type NoneType"),
])
def test_a_task_that_returns_no_pair_of_scalars(made, words):
    def task(model, batch):
        return made(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    found = told(step_of(task=task), X[:8], Y[:8])
    assert words in found and "(loss_sum, weight)" in found


@pytest.mark.parametrize("made, words", [
    (None, "metrics returned a NoneType"), ({"right": 3}, "metric 'right' returned a int"),
    ({"right": (torch.ones(2), 2)}, "metric 'right' returned a sum of type Tensor and shape"),
])
def test_metrics_that_return_no_pairs(made, words):
    step = step_of(task=lambda model, batch: (model(batch[0]).sum(), 8), metrics=lambda model, batch: made)
    with pytest.raises(UserError, match=words):
        step.evaluate((X[:8], Y[:8]))


def test_sparse_adam_is_not_offered():
    with pytest.raises(UserError, match="SparseAdam' needs sparse gradients"):
        attached(mlp(), replace(SGD, optimizer=Named("SparseAdam", {})))
