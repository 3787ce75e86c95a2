"""Two networks with a loss each, trained by one optimizer: each gets its own gradient, in both frameworks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import torch  # noqa: E402
from small_runs import Record, apart, config, fitted, lockstep, weights  # noqa: E402
from twins import copy_torch_to_keras  # noqa: E402

import tf_models.gan  # noqa: E402
import torch_models.gan  # noqa: E402
from hvdtrain.config import Named  # noqa: E402
from hvdtrain.data.sets import ring  # noqa: E402
from hvdtrain.engine import loop  # noqa: E402

HIDDEN = (16,)
BASE = config(global_batch=30, max_steps=12, optimizer=Named("Adam"), lr=0.01)


def data():
    return ring.make("train", 100, seed=2), ring.make("test", 40, seed=2)


def twins():
    torch.manual_seed(1)
    pair = torch_models.gan.build(hidden=HIDDEN), tf_models.gan.build(hidden=HIDDEN)
    copy_torch_to_keras(*pair, torch_models.gan.blocks, tf_models.gan.blocks)
    return pair


def test_one_backward_gives_each_network_the_gradient_of_its_own_loss():
    model = twins()[0]
    batch = tuple(map(torch.from_numpy, ring.make("train", 20).fetch(np.arange(20))))
    torch_models.gan.task(model, batch)[0].backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    for part in ("generator", "discriminator"):
        model.zero_grad()
        real, noise = batch
        points = torch_models.gan.made(model, noise)
        plain = torch.nn.functional.softplus(-torch_models.gan.judged(model, points)).sum() if part == "generator" \
            else torch_models.gan.losses(model, batch)[1]
        plain.backward()
        for name, p in model.named_parameters():
            if name.startswith(part):
                torch.testing.assert_close(got[name], p.grad, msg=name)


def work(run):
    run.callbacks[:0] = [record := Record()]
    before = loop.measure(run, run.eval_feed)
    fitted(run)
    return record.losses, before, run.state.metrics, weights(run)


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Of either framework at 1 and 2 ranks."""
    found = {}
    for index, name in enumerate(("torch_models.gan", "tf_models.gan")):
        for size in (1, 2):
            models = [twins()[index] for _ in range(size)]
            out = str(tmp_path_factory.mktemp(f"{index}-{size}"))
            settings = replace(BASE, out=out, shares=[1, 2] if size == 2 else [])
            found[name, size] = lockstep(size, settings, models.__getitem__, data(), work)
    return found


@pytest.mark.parametrize("name", ["torch_models.gan", "tf_models.gan"])
def test_both_losses_move_and_two_ranks_are_one(name, curves):
    (losses, before, after, held), = curves[name, 1]
    for part in ("generator", "discriminator"):
        assert abs(after[part] - before[part]) > 0.01, part
    for other, _, metrics, weights_of_rank in curves[name, 2]:
        np.testing.assert_allclose(other, losses, rtol=1e-5)
        assert apart(weights_of_rank, held) < 1e-3
        assert metrics["generator"] == pytest.approx(after["generator"], rel=1e-4)


def test_both_frameworks_learn_alike(curves):
    np.testing.assert_allclose(curves["tf_models.gan", 1][0][0], curves["torch_models.gan", 1][0][0], rtol=1e-3)
