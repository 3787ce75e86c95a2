"""keras.applications and keras_hub in the scripts of docs/how-to/models.md, compiled as keras_hub does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
keras = pytest.importorskip("keras", reason="Keras is not installed")

import zoo  # noqa: E402
from small_runs import config, weights  # noqa: E402

from hvdtrain import Trainer  # noqa: E402
from hvdtrain.config import DataParallelConfig, Named, PipelineConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.resolve import load_callable  # noqa: E402

BASE = config(global_batch=8, max_steps=3, optimizer=Named("SGD", {"momentum": 0.9}), metrics=[],
              control_timeout_s=zoo.WAIT_S)
NAMES = ("token_ids", "segment_ids", "padding_mask")
"""What keras_hub's BERT takes."""


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    zoo.prepared(monkeypatch, tmp_path)


def application():
    args = {"name": "MobileNet", "size": 32, "classes": 4, "alpha": 0.25}
    return replace(BASE, model="keras_app.py:build", model_args=args), zoo.images()


def hub():
    zoo.wanted("keras_hub")
    return replace(BASE, model="hub_model.py:build", model_args=zoo.BERT), zoo.texts()


def preset(folder):
    """As `hub`, from a preset that lies in ``folder``; and the weights that are in it."""
    backbone = zoo.wanted("keras_hub").models.BertBackbone(**zoo.BERT)
    backbone.save_to_preset(str(folder))
    asked = replace(hub()[0], model_args={"preset": str(folder), "dropout": 0.0})
    return asked, zoo.texts(), [v.numpy() for v in backbone.weights]


def left(size, asked, data):
    """Return the weights that all ranks end with, and the first rank's run."""
    runs = zoo.runs(size, asked, data)
    assert all(a.tobytes() == b.tobytes() for run in runs for a, b in zip(weights(run), weights(runs[0])))
    return weights(runs[0]), runs[0]


def test_ranks_with_remat_and_zero_have_the_curve_of_one_process(tmp_path):
    asked, data, begin = preset(tmp_path / "preset")
    made = load_callable(asked.model, "model")(**asked.model_args)
    assert all((v.numpy() == want).all() for v, want in zip(made.backbone.weights, begin, strict=True))
    alone, run = left(1, asked, data)
    assert run.state.grad_norm > 0
    got, run = left(2, replace(asked, shares=[3, 1], data_parallel=DataParallelConfig("zero", 2), remat="every:1"),
                    data)
    assert zoo.same(got, alone) and run.parts.remat.chosen == ("transformer_layer_0", "transformer_layer_1")


def test_an_application_trains_with_blocks_that_are_recomputed():
    asked, data = application()
    asked = replace(asked, max_steps=1, remat=["conv_pw_1_bn", "conv_pw_1_relu"])
    run = left(1, asked, data)[1]
    assert run.parts.remat.chosen == ("conv_pw_1_bn", "conv_pw_1_relu") and run.state.grad_norm > 0


def test_what_is_no_chain_is_refused_where_it_is_to_be_cut():
    asked, data = hub()
    with pytest.raises(UserError, match="token_embedding/embeddings belongs to no block"):
        zoo.runs(2, replace(asked, pipeline=PipelineConfig(2)), data)


def task_of_hub(**more):
    hub = zoo.wanted("keras_hub")
    return hub.models.BertTextClassifier(hub.models.BertBackbone(**zoo.BERT), num_classes=2, **more)


def test_a_task_of_keras_hub_trains_by_what_it_was_compiled_with():
    x, y = zoo.texts(16)
    inputs = dict(zip(NAMES, (x, np.zeros_like(x), x != 0)))
    model = task_of_hub(preprocessor=None)
    history = Trainer(config(global_batch=8, epochs=1)).fit(model, (inputs, y)).history
    assert set(history) == {"loss", "sparse_categorical_accuracy"} and 0.5 < history["loss"][0] < 1


def test_a_preprocessor_which_works_in_fit_alone_is_refused():
    x, y = zoo.texts(16)
    model = task_of_hub(preprocessor=keras.layers.Identity())
    with pytest.raises(UserError, match="has a preprocessor, which keras_hub applies"):
        Trainer(config(global_batch=8, epochs=1)).fit(model, (dict.fromkeys(NAMES, x), y))
