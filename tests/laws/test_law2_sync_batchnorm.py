"""Law 2 with ``sync_batchnorm``: a model with BatchNorm follows one curve, however the batch is cut.

PyTorch over the lockstep world; Keras needs Horovod's graph nodes and is tested in tests/mpi/test_sync_batchnorm.py.
"""

from __future__ import annotations

import pytest
from small_runs import CUTS, apart, config, fitted, lockstep, samples, weights
from sync_models import with_norms

from hvdtrain.config import Named

pytest.importorskip("torch", reason="PyTorch is not installed")

N, BATCH, STEPS = 106, 53, 20
"""Steps of 53 and 53 samples: no world size divides the batch."""


def settings(out, **changes):
    return config(global_batch=BATCH, max_steps=STEPS, out=str(out), optimizer=Named("SGD", {"momentum": 0.5}), lr=0.05,
                  sync_batchnorm=True, **changes)


def curve(run):
    fitted(run)
    return weights(run), run.state.loss, " ".join(run.notes)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_curve_is_one_in_float32(size, tmp_path):
    def model(rank):
        return with_norms("torch")

    ((want, loss, _),) = lockstep(1, settings(tmp_path / "1"), model, samples(N), curve)
    start = [t.numpy() for _, t in sorted(model(0).state_dict().items())]
    assert apart(want, start) > 0.1
    for shares in CUTS[size]:
        for got in lockstep(size, settings(tmp_path / str(shares), shares=shares), model, samples(N), curve):
            assert apart(got[0], want) < 1e-5
            assert got[1] == pytest.approx(loss, rel=1e-5)
            assert "BatchNorm" not in got[2]


def test_micro_batches_are_normalised_together_and_said(tmp_path):
    """Ranks with 2, 1 and 0 micro-batches of their own: all run two rounds, and the same bits come out."""
    rows = lockstep(3, settings(tmp_path, shares=[50, 3, 0], micro_batch=25), lambda rank: with_norms("torch"),
                    samples(N), curve)
    assert all("each micro-batch of all ranks" in notes for _, _, notes in rows)
    assert all(apart(rows[0][0], other) == 0 for other, _, _ in rows[1:])


def convolutional(rank):
    """(B, 12) -> (B, 5) with its convolution, behind which is a BatchNorm, in channels_last."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2, padding=1, bias=False), nn.BatchNorm2d(4),
                          nn.Tanh(), nn.Flatten(), nn.Linear(36, 5))
    return model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("sync", [True, False], ids=["synchronised", "frozen"])
@pytest.mark.parametrize("name, args", [("SGD", {}), ("SGD", {"momentum": 0.5, "foreach": True}), ("Adam", {})])
def test_the_curve_is_one_with_parameters_in_another_memory_order(name, args, sync, tmp_path):
    """Gradients lie row by row in a bucket; what an optimizer does with both must go by element."""
    def model(rank):
        made = convolutional(rank)
        made[2].train(sync)
        return made

    changes = {**vars(settings(tmp_path)), "max_steps": 6, "optimizer": Named(name, args), "lr": 0.02,
               "clip_norm": 0.5, "sync_batchnorm": sync}
    ((want, loss, _),) = lockstep(1, config(**{**changes, "out": str(tmp_path / "1")}), model, samples(N), curve)
    for got in lockstep(2, config(**changes), model, samples(N), curve):
        assert apart(got[0], want) < 1e-5
        assert got[1] == pytest.approx(loss, rel=1e-5)
