"""Accuracy is measured where nobody set metrics and the targets are integer class labels; else where it is set."""

from types import SimpleNamespace

import numpy as np
import pytest
from feed_ranks import on_ranks

from hvdtrain import Config
from hvdtrain.cluster.control import SoloControl
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.config import EarlyStopConfig
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import ArraySource
from hvdtrain.engine import build_model, loop
from hvdtrain.engine.assemble import assemble

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

X = np.ones((4, 3), np.float32)
CLASSES, NUMBERS = np.arange(4) % 2, np.ones((4, 2), np.float32)
MSE = {"loss": "mse_loss"}


class Rows(torch.utils.data.Dataset):
    """Samples that are no arrays in memory."""

    def __init__(self, y):
        self._y = y

    def __len__(self):
        return len(self._y)

    def __getitem__(self, i):
        return X[i], self._y[i]


@pytest.mark.parametrize("data, more, measured", [
    ((X, CLASSES), {}, True), ((X, NUMBERS), {}, False), ((X, NUMBERS, X[:, 0]), {}, False),
    ((X, NUMBERS), {"metrics": ["accuracy"]}, True), ((X, NUMBERS), {"early_stop": EarlyStopConfig("accuracy")}, True),
    (Rows(CLASSES), {}, True), (Rows(NUMBERS), {}, False), ((X, NUMBERS.astype(int)), MSE, False)])
def test_accuracy_is_assumed_of_class_labels(data, more, measured):
    run = assemble(Config(global_batch=4, progress="off", **more), torch.nn.Linear(3, 2), (data, data),
                   SoloControl(), NullCollectives(0, 1))
    loop.evaluate(run)
    assert ("accuracy" in run.state.metrics) is measured
    kind = "of loss mse_loss" if "loss" in more else "float32"
    assert any(f"integer class labels only, and the targets are {kind}" in note for note in run.notes) is not measured


def test_ranks_decide_alike_where_one_alone_has_set_the_default():
    def work(rank, control):
        config = Config(metrics=["accuracy"]) if rank else Config()
        feed = Feed(ArraySource((X, NUMBERS)), 4)
        return build_model.measured(config, SimpleNamespace(task=None), feed, control, [])

    assert on_ranks(2, work) == [[], []]
