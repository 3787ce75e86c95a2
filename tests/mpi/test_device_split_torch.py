"""Hybrid: ranks that sum gradients, each with a model partitioned over devices, here one CPU as two devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from small_runs import CUTS, apart, bits, config, fitted, samples, solo, weights  # noqa: E402
from split_models import Chain, Skips, deep  # noqa: E402

from hvdtrain.backends.torch import placement  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.config import CheckpointConfig, ExchangeConfig, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.engine.assemble import assemble  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
BASE = config(global_batch=53, max_steps=20, optimizer=Named("SGD", {"momentum": 0.5}))
DATA = samples(107)
"""Steps of 53, 53 and 1 samples: fewer than there are parts, on some ranks none."""


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    """Let the CPU stand for each of a rank's devices."""
    monkeypatch.setattr(placement, "devices", lambda n: [torch.device("cpu")] * n)


@pytest.fixture
def settings(control, tmp_path, monkeypatch):
    """Return a run's settings on all ranks, with rank 0's directory."""
    monkeypatch.chdir(tmp_path)
    return replace(BASE, model_parallel=2, out=control.bcast(str(tmp_path / "run")))


def alone(tmp_path, settings, **changes):
    """Run one rank with one device."""
    return fitted(solo(replace(settings, model_parallel=1, collectives="auto", compression="none",
                               out=str(tmp_path / "alone"), **changes), deep(), DATA))


@pytest.mark.parametrize("wire", ["horovod", "mpi", "shared"])
@pytest.mark.parametrize("cut", [0, -1], ids=["equal", "unequal"])
def test_law2_split_ranks_follow_one_rank_with_one_device(control, settings, tmp_path, wire, cut):
    if wire == "horovod" and horovod.horovod_reason("torch"):
        pytest.skip(horovod.horovod_reason("torch"))
    run = fitted(assemble(replace(settings, collectives=wire, shares=CUTS[control.size][cut]), deep(), DATA))
    assert len(run.parts.ops_of_place) == 2
    assert len(set(control.gather(run.parts.describe()["split"]))) == 1, "the same cut on every rank"
    assert {b.place for b in run.dp.reducer.buckets} == ({0, 1})
    assert len(set(control.gather(bits(run)))) == 1
    assert apart(weights(run), weights(alone(tmp_path, settings))) < 1e-5


@pytest.mark.parametrize("changes", [
    {"compression": "topk", "exchange": ExchangeConfig(topk_ratio=1.0, bucket_mb=0.0005)},
    {"clip_norm": 0.05, "accumulate": 2, "optimizer": Named("Adam"), "lr": 1e-2},
], ids=["compressed", "clipped"])
def test_unequal_shares_with(control, settings, tmp_path, changes):
    """topk that sends every entry loses nothing, so that law 2 holds to 1e-5 through a compressor with state."""
    settings = replace(settings, shares=CUTS[control.size][-1], **changes)
    run = fitted(assemble(settings, deep(), DATA))
    assert len(set(control.gather(bits(run)))) == 1
    assert apart(weights(run), weights(alone(tmp_path, settings))) < 1e-5


def test_a_checkpoint_of_split_ranks_goes_on_whole_and_back(control, settings, tmp_path):
    fitted(assemble(replace(settings, max_steps=6, checkpoint=CheckpointConfig(at_end=True)), deep(), DATA))
    middle = replace(settings, model_parallel=1, max_steps=12, checkpoint=CheckpointConfig(at_end=True), resume="auto")
    fitted(assemble(middle, deep(), DATA))
    run = fitted(assemble(replace(settings, resume="auto"), deep(), DATA))
    assert run.state.cursor.step == 20
    assert apart(weights(run), weights(alone(tmp_path, settings))) < 1e-5


def test_a_model_that_one_rank_cannot_split_is_an_error_on_all(control, settings):
    last = control.size - 1
    if not last:
        pytest.skip("needs two ranks")
    with pytest.raises(UserError, match=f"rank {last} on host .* give an output that differs from the model's"):
        assemble(settings, deep(kind=Skips if control.rank == last else Chain), DATA)


def test_unlike_blocks_are_an_error_on_all(control, settings):
    if control.size == 1:
        pytest.skip("needs two ranks")
    more = {} if control.rank else {"more": torch.nn.Linear(16, 16)}
    with pytest.raises(UserError, match="blocks that differ from rank 0's"):
        assemble(settings, deep(**more), DATA)
    assert np.isfinite(control.sum(np.ones(1))[0]), "the ranks are together"
