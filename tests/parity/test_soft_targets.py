"""Shares of classes as targets (mixup, label smoothing), the same in both frameworks, for any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402
import torch  # noqa: E402
from small_runs import Record, apart, config, fitted, lockstep, solo, weights  # noqa: E402
from twins import copy_torch_to_keras  # noqa: E402

import tf_models.mlp  # noqa: E402
import torch_models.mlp  # noqa: E402
from hvdtrain.config import DataConfig, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

AUGMENT = {"crop": 1, "flip": 0.5, "cutout": 2, "mixup": 0.5}
STEPS = 4
SHAPE = {"in_features": 64, "hidden": (16,), "classes": 10}
CASES = {  # augmentation, loss in torch, loss in Keras
    "mixup-by-name": ({"mixup": 0.5}, Named("cross_entropy"), Named("CategoricalCrossentropy", {"from_logits": True})),
    "smoothing-by-name": ({}, Named("cross_entropy", {"label_smoothing": 0.1}),
                          Named("categorical_crossentropy", {"from_logits": True, "label_smoothing": 0.1})),
    "mixup-smoothing-auto": (AUGMENT, Named("auto", {"label_smoothing": 0.1}), Named("auto", {"label_smoothing": 0.1})),
}


def pictures(n, seed=0):
    draw = np.random.default_rng(seed)
    y = np.arange(n) % 10
    return (draw.normal(size=(n, 8, 8)) + y[:, None, None] / 5).astype(np.float32), y


def twins():
    torch.manual_seed(3)
    pair = torch_models.mlp.build(**SHAPE), tf_models.mlp.build(**SHAPE)
    copy_torch_to_keras(*pair, torch_models.mlp.blocks, tf_models.mlp.blocks)
    return pair


def settings(tmp_path, **changes):
    return config(global_batch=16, max_steps=STEPS, lr=0.02, out=str(tmp_path), **changes)


def curve(run):
    run.callbacks[:0] = [record := Record()]
    fitted(run)
    return record.losses, run.state.metrics, weights(run)


@pytest.mark.parametrize("case", CASES)
def test_both_frameworks_learn_alike(case, tmp_path):
    augment, *losses = CASES[case]
    got = []
    for model, loss in zip(twins(), losses):
        where = tmp_path / str(len(got))
        run = solo(settings(where, data=DataConfig(prefetch=0, augment=augment), loss=loss), model,
                   (pictures(40), pictures(20, 1)))
        got.append(curve(run))
    (torch_losses, torch_metrics, _), (keras_losses, keras_metrics, _) = got
    np.testing.assert_allclose(keras_losses, torch_losses, rtol=1e-4)
    assert 1.5 < torch_losses[0] < 6, "a cross entropy of 10 classes, not a squared error"
    assert keras_metrics["loss"] == pytest.approx(torch_metrics["loss"], rel=1e-3)
    assert keras_metrics["accuracy"] == pytest.approx(torch_metrics["accuracy"], abs=0.06)


@pytest.mark.parametrize("framework", [0, 1], ids=["torch", "keras"])
def test_two_ranks_train_on_the_pictures_of_one(framework, tmp_path):
    base = settings(tmp_path, data=DataConfig(prefetch=0, augment=AUGMENT))
    copies = [twins()[framework] for _ in range(3)]
    (alone,) = lockstep(1, replace(base, out=str(tmp_path / "1")), lambda rank: copies[2], pictures(40), curve)
    for losses, _, held in lockstep(2, replace(base, shares=[1, 3]), lambda rank: copies[rank], pictures(40), curve):
        np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
        assert apart(held, alone[2]) < 1e-4


def test_keras_refuses_mixup_with_a_loss_of_class_numbers_in_words(tmp_path):
    base = settings(tmp_path, data=DataConfig(prefetch=0, augment=AUGMENT))
    with pytest.raises(UserError, match="mixup.*sparse.*Set loss.name: CategoricalCrossentropy"):
        solo(replace(base, loss=Named("sparse_categorical_crossentropy")), twins()[1], pictures(40))
    compiled = twins()[1]
    compiled.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(UserError, match="mixup.*compiled with"):
        solo(base, compiled, pictures(40))


def test_class_numbers_out_of_range_are_not_smoothed_away(tmp_path):
    x, y = pictures(16)
    base = settings(tmp_path, loss=Named("auto", {"label_smoothing": 0.1}))
    known = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])
    for model, words in ((known, "run from 1 to 10"), (twins()[1], "not finite at step 0")):
        with pytest.raises(UserError, match=words):
            fitted(solo(base, model, (x, y + 1)))
