"""Copies of a model that is partitioned over real ranks, over every wire: one model, and the curve of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, apart, config, fitted, samples, solo, weights

from hvdtrain.backends import numpy as numpy_backend
from hvdtrain.backends.numpy.model import Model
from hvdtrain.comm.collectives.shared import SharedCollectives
from hvdtrain.comm.sweep import exchange
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named, PipelineConfig
from hvdtrain.core.mesh import Group
from hvdtrain.engine.assemble import assemble
from hvdtrain.parallel.pipeline.partition import even_layout

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.timeout(120)]
SIZES = (FEATURES, 16, 14, 12, 10, CLASSES)
BASE = config(global_batch=24, max_steps=10, lr=0.05, clip_norm=0.05, optimizer=Named("SGD", {"momentum": 0.9}),
              exchange=ExchangeConfig(bucket_mb=0.001))
DATA = samples(100)


@pytest.fixture(autouse=True)
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """About as many blocks on each rank: then copies of unlike depth share blocks."""
    monkeypatch.setattr(numpy_backend, "agree", lambda measured, config, control, mesh, *_: even_layout(
        config, mesh, [block.name for block in measured.blocks]))


def whole(control: Any, run: Any) -> list[Any]:
    """Return the weights of all blocks, which every rank that holds one has alike."""
    held: dict[str, Any] = {}
    for own in control.gather(run.parts.state.state()[0]["model"]):
        for name, array in own.items():
            assert (held.setdefault(name, array) == array).all(), name
    return [held[name] for name in sorted(held)]


@pytest.mark.parametrize("pipeline, wire, way", [(PipelineConfig(2), "mpi", DataParallelConfig()),
                                                 (PipelineConfig(2), "shared", DataParallelConfig("zero", 2)),
                                                 (PipelineConfig(depths=[1, 1, 2]), "mpi",
                                                  DataParallelConfig("zero", 1)),
                                                 (PipelineConfig(depths=[1, 1, 2]), "shared", DataParallelConfig())])
def test_copies_follow_one_rank(control: Any, pipeline: PipelineConfig, wire: str, way: DataParallelConfig) -> None:
    run = fitted(assemble(replace(BASE, collectives=wire, pipeline=pipeline, data_parallel=way), Model(SIZES, 3), DATA))
    alone = fitted(solo(BASE, Model(SIZES, 3), DATA))
    assert run.collectives.name == wire and run.parts.replicas[0].wire.name == wire
    assert apart(whole(control, run), weights(alone)) < 1e-9
    assert run.state.loss == pytest.approx(alone.state.loss, rel=1e-9)


@pytest.mark.parametrize("pairs", ([(0, 1), (2, 3)], [(0, 2), (1, 3)]), ids=("across hosts", "within hosts"))
def test_memory_is_shared_within_a_group_and_a_host_alone(comm: Any, pairs: Any) -> None:
    """Ranks 0 and 2 are on one made-up host, 1 and 3 on another."""
    rank = comm.Get_rank()
    whole = SharedCollectives(comm, 30.0, host=comm.Split(rank % 2, key=rank))
    ranks = next(pair for pair in pairs if rank in pair)
    wire = whole.among(Group(ranks, rank))
    assert wire.hosts == ([[0], [1]] if ranks[1] - ranks[0] == 1 else [[0, 1]])
    for _ in range(2):
        own_N = wire.buffer(300, "float32")
        own_N[:] = rank + 1
        assert (wire.allreduce(own_N, "sum").wait() == sum(ranks) + 2).all()
        part = wire.reducescatterv(np.full(300, rank + 1, np.float32), [100, 200], "part").wait()
        assert (part == sum(ranks) + 2).all() and part.size == (100, 200)[wire.rank]
        assert (wire.allgatherv(part, [100, 200], "parts").wait() == sum(ranks) + 2).all()


def test_a_rank_that_enters_other_buckets_first_fails_by_name(control: Any) -> None:
    run = assemble(replace(BASE, collectives="mpi", pipeline=PipelineConfig(2)), Model(SIZES, 3), DATA)
    if control.rank == 3:
        run.dp.reducer.buckets = [replace(b, group="other") for b in run.dp.reducer.buckets]
    if control.rank in (1, 3):
        with pytest.raises(RuntimeError, match="'g1,3.grad.b0.r0'.*; rank 1 entered allreduce 'other"):
            exchange(run.dp.reducer, [np.ones(b.n) for b in run.dp.buckets])
