"""Twins through the trainer: one model, one data order, one rate, two frameworks, one loss curve.

tests/parity/test_loss_curves.py shows the same of the models alone; here everything between the configuration and the
update is hvdtrain's: the sampler, the loss by name or by the model file, the weighting, the optimizer by name.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import torch  # noqa: E402
from small_runs import Record, config, solo  # noqa: E402
from twins import copy_torch_to_keras  # noqa: E402

import tf_models.cnn  # noqa: E402
import tf_models.gpt  # noqa: E402
import tf_models.mlp  # noqa: E402
import tf_models.resnet  # noqa: E402
import torch_models.cnn  # noqa: E402
import torch_models.gpt  # noqa: E402
import torch_models.mlp  # noqa: E402
import torch_models.resnet  # noqa: E402
from hvdtrain.config import Named, ScheduleConfig  # noqa: E402
from hvdtrain.engine import loop  # noqa: E402

STEPS, BATCH, N = 20, 16, 37
"""Steps of 16, 16 and 5 samples."""
CASES = {
    "mlp": (torch_models.mlp, tf_models.mlp, {}, 0.01),
    "cnn-group": (torch_models.cnn, tf_models.cnn, {"norm": "group"}, 0.005),
    "cnn-none": (torch_models.cnn, tf_models.cnn, {"norm": "none"}, 0.005),
    "resnet": (torch_models.resnet, tf_models.resnet, {"width": 8, "depth": 1}, 0.01),
    "gpt": (torch_models.gpt, tf_models.gpt, {"width": 64, "depth": 2}, 0.01),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def twins(torch_file, tf_file, args):
    torch.manual_seed(7)
    pair = torch_file.build(**args), tf_file.build(**args)
    copy_torch_to_keras(*pair, torch_file.blocks, tf_file.blocks)
    return pair


def curve(model, data, settings):
    """Return the global loss of every step, and the metrics at the end."""
    run = solo(settings, model, data)
    run.callbacks[:0] = [record := Record()]
    loop.fit(run)
    assert len(record.losses) == STEPS
    return record.losses, run.state.metrics


@pytest.mark.parametrize("case", CASES)
def test_twins_learn_alike_through_the_trainer(case, tmp_path):
    torch_file, tf_file, args, lr = CASES[case]
    data = torch_file.example(N), torch_file.example(9)
    settings = config(global_batch=BATCH, max_steps=STEPS, lr=lr, optimizer=Named("SGD", {"momentum": 0.9}))
    (losses, metrics), (keras_losses, keras_metrics) = [
        curve(model, data, replace(settings, out=str(tmp_path / str(i))))
        for i, model in enumerate(twins(torch_file, tf_file, args))]
    assert max(losses) - min(losses) > 0.01 * losses[0], f"nothing was learned: {losses}"
    np.testing.assert_allclose(keras_losses, losses, rtol=1e-4)
    assert set(keras_metrics) == set(metrics) and "loss" in metrics
    assert keras_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-3)


@pytest.mark.parametrize("changes", [
    {"accumulate": 3, "clip_norm": 0.5, "optimizer": Named("SGD", {"momentum": 0.9})},
    {"schedule": ScheduleConfig(warmup_steps=8, linear_scaling_base=2)},
], ids=["accumulate-clip", "warmup-scaling"])
def test_what_is_done_to_the_gradient_and_the_rate_is_the_same(changes, tmp_path):
    """Momentum only at a fixed rate: torch scales the velocity by the newest rate, Keras each gradient by its own."""
    torch_file, tf_file, args, lr = CASES["mlp"]
    data = torch_file.example(N)
    settings = config(global_batch=BATCH, max_steps=STEPS, lr=lr, **changes)
    (losses, _), (keras_losses, _) = [curve(model, data, replace(settings, out=str(tmp_path / str(i))))
                                      for i, model in enumerate(twins(torch_file, tf_file, args))]
    assert max(losses) - min(losses) > 0.005 * losses[0], f"nothing was learned: {losses}"
    np.testing.assert_allclose(keras_losses, losses, rtol=1e-4)
    unchanged = config(global_batch=BATCH, max_steps=STEPS, lr=lr, out=str(tmp_path / "plain"))
    plain, _ = curve(twins(torch_file, tf_file, args)[0], data, unchanged)
    assert abs(plain[-1] - losses[-1]) > 1e-3, "the setting changed nothing"
