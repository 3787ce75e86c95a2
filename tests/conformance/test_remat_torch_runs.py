"""Whole runs with recomputed PyTorch blocks over lockstep ranks: the bits of the same run without."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from small_runs import config, fitted, lockstep, samples, solo, weights  # noqa: E402
from split_models import deep  # noqa: E402
from split_torch_tools import all_cpu  # noqa: E402, F401
from sync_models import with_norms  # noqa: E402
from torch import nn  # noqa: E402
from torch_tools import one_thread  # noqa: E402, F401

from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

DATA = samples(107)
BASE = config(global_batch=32, max_steps=6, optimizer=Named("SGD", {"momentum": 0.5}),
              exchange=ExchangeConfig(bucket_mb=0.0005))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def left(size, settings, models):
    """(weights, losses) of each rank at the end, its model given back."""
    def work(run):
        assert bool(run.parts.remat.chosen) == (settings.remat != "off")
        loss = (fitted(run).state.loss, run.state.metrics)
        run.leave()
        assert not any("forward" in vars(m) for m in run.parts.model.modules()) or settings.model_parallel > 1
        return [a.tobytes() for a in weights(run)], loss

    return lockstep(size, settings, models, DATA, work)


@pytest.mark.parametrize("changes, make", [
    ({"sync_batchnorm": True, "shares": [3, 1]}, with_norms),
    ({"sync_batchnorm": True, "shares": [1, 0], "micro_batch": 8}, with_norms),
    ({"sync_batchnorm": True, "audit": 2}, with_norms),
    ({"accumulate": 2, "clip_norm": 0.1, "audit": 2, "eval_every": 3, "check_every": 2}, with_norms),
    ({"precision": "fp16", "shares": [2, 1]}, lambda _: deep()),
    ({"data_parallel": DataParallelConfig("zero", 2), "clip_norm": 0.1, "accumulate": 2}, lambda _: deep()),
    ({"data_parallel": DataParallelConfig("zero", 2), "sync_batchnorm": True}, with_norms),
    ({"compression": "topk"}, lambda _: deep()), ({"compression": "int8"}, lambda _: deep()),
], ids=str)
def test_ranks_that_recompute_end_with_the_bits_of_those_that_do_not(changes, make):
    settings = replace(BASE, **changes)
    plain = left(2, settings, lambda rank: make("torch"))
    assert left(2, replace(settings, remat="every:1"), lambda rank: make("torch")) == plain


@pytest.mark.parametrize("size, changes", [
    (2, {"split_micro_batches": 4}), (2, {"split_micro_batches": 1, "sync_batchnorm": True}),
    (1, {"split_micro_batches": 4, "precision": "bf16"})], ids=str)
def test_split_models(cpus, size, changes):
    # The parts of a micro-batch are given, as BatchNorm takes its statistics over each.
    settings = replace(BASE, model_parallel=2, **changes)

    def build(rank):
        torch.manual_seed(1)
        act = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True))
        return deep(norm=nn.BatchNorm1d(16), act=act)

    assert left(size, replace(settings, remat="every:1"), build) == left(size, settings, build)


def test_blocks_are_named_and_one_that_is_not_exact_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.own = nn.Linear(16, 16), torch.Generator()

        def forward(self, x):
            return self.line(x) * torch.rand(x.shape, generator=self.own)

    run = solo(replace(BASE, remat="first, third"), deep(own=Own()), DATA)
    assert run.parts.remat.chosen == ("first", "third")
    assert run.parts.describe()["recomputed"] == "first, third"
    run.leave()
    with pytest.raises(UserError, match="remat: block own cannot be recomputed exactly"):
        solo(replace(BASE, remat="every:1"), deep(own=Own()), DATA)
