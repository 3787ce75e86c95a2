"""ZeRO in PyTorch on real ranks: one model over every wire, also with devices of its own for each part of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from small_runs import CUTS, apart, bits, config, fitted, make_model, samples, solo, weights  # noqa: E402
from split_models import deep  # noqa: E402

from hvdtrain.backends.torch import placement  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.comm.collectives.shared import SharedCollectives  # noqa: E402
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named  # noqa: E402
from hvdtrain.engine.assemble import assemble  # noqa: E402
from hvdtrain.parallel.data_parallel.zero import Zero  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
BASE = config(global_batch=53, max_steps=12, optimizer=Named("Adam"), lr=0.01,
              exchange=ExchangeConfig(bucket_mb=0.0005))
DATA = samples(107)
"""Steps of 53, 53 and 1 samples: some ranks have none."""


@pytest.fixture
def out(control, tmp_path, monkeypatch):
    """Rank 0's directory."""
    monkeypatch.chdir(tmp_path)
    return control.bcast(str(tmp_path))


def usable(wire):
    if wire == "horovod" and horovod.horovod_reason("torch"):
        pytest.skip(horovod.horovod_reason("torch"))


@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("wire", ("horovod", "mpi", "shared"))
def test_ranks_follow_one_rank(control, out, wire, stage):
    usable(wire)
    shards = [0, *range(1, control.size)]
    run = fitted(assemble(replace(BASE, collectives=wire, shares=CUTS[control.size][1], out=f"{out}/zero",
                                  data_parallel=DataParallelConfig("zero", stage, shards)), make_model("torch"), DATA))
    assert isinstance(run.dp, Zero) and len(set(control.gather(bits(run)))) == 1
    held = control.gather(sum(x.numel() for _, _, x in run.parts.optimizer.slots()))
    assert held[0] == 0 and sum(held) == 2 * sum(p.numel() for p in run.parts.params.tensors)
    alone = fitted(solo(replace(BASE, out=f"{out}/alone{control.rank}"), make_model("torch"), DATA))
    assert apart(weights(run), weights(alone)) < 1e-5


def test_shared_memory_keeps_the_bits_of_the_unsharded_run(control, out):
    found = [fitted(assemble(replace(BASE, collectives="shared", out=f"{out}/{way.name}", data_parallel=way),
                             make_model("torch"), DATA))
             for way in (DataParallelConfig(), DataParallelConfig("zero", 2))]
    assert len({text for run in found for text in control.gather(bits(run))}) == 1


@pytest.mark.usefixtures("few_ranks")
@pytest.mark.parametrize("wire, stage, name", [("horovod", 2, "topk"), ("mpi", 1, "topk"), ("mpi", 2, "int8"),
                                               ("shared", 2, "bf16")])
def test_shards_of_compressed_gradients_have_the_bits_of_the_whole(control, out, wire, stage, name):
    usable(wire)
    settings = replace(BASE, collectives=wire, compression=name, max_steps=3,
                       exchange=ExchangeConfig(bucket_mb=0.0005, topk_ratio=0.2))
    ways = (DataParallelConfig(), DataParallelConfig("zero", stage, [0, *range(1, control.size)]))
    found = [fitted(assemble(replace(settings, out=f"{out}/{i}", data_parallel=way), make_model("torch"), DATA))
             for i, way in enumerate(ways)]
    assert len({text for run in found for text in control.gather(bits(run))}) == 1


@pytest.mark.parametrize("stage", (1, 2))
def test_over_memory_of_several_hosts(control, comm, out, stage):
    """Buckets share one vector of the transport's there: one at a time, while others may continue beside backward."""
    wire = SharedCollectives(comm, 30.0, host=comm.Split(control.rank % 2, key=control.rank))
    settings = replace(BASE, exchange=ExchangeConfig(bucket_mb=1e-5), data_parallel=DataParallelConfig("zero", stage))
    run = fitted(assemble(replace(settings, shares=CUTS[control.size][1], out=f"{out}/zero"), make_model("torch"), DATA,
                          collectives=wire))
    assert isinstance(run.dp, Zero) and len(run.dp.buckets) > 2 and len(set(control.gather(bits(run)))) == 1
    alone = fitted(solo(replace(BASE, out=f"{out}/alone{control.rank}"), make_model("torch"), DATA))
    assert apart(weights(run), weights(alone)) < 1e-5


@pytest.mark.usefixtures("few_ranks")
@pytest.mark.parametrize("wire", ("horovod", "mpi", "shared"))
def test_a_model_that_is_split_over_devices(control, out, wire, monkeypatch):
    usable(wire)
    monkeypatch.setattr(placement, "devices", lambda n: [torch.device("cpu")] * n)
    split = replace(BASE, model_parallel=2, collectives=wire, optimizer=Named("SGD", {"momentum": 0.5}), lr=0.1)
    run = fitted(assemble(replace(split, data_parallel=DataParallelConfig("zero", 2), out=f"{out}/zero"), deep(), DATA))
    whole = fitted(assemble(replace(split, out=f"{out}/whole"), deep(), DATA))
    assert isinstance(run.dp, Zero) and len(set(control.gather(bits(run)))) == 1
    assert apart(weights(run), weights(whole)) < 1e-5
