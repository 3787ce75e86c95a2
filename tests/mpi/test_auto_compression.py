"""The sweep over real wires: the same numbers on all ranks, sane ones, and a run whose ranks decide alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, config, samples

from hvdtrain.cluster import horovod
from hvdtrain.comm import compressors, sweep
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.config import Config
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.engine import loop
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.auto_compression import WARM_STEPS, WINDOW_STEPS, AutoCompression

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from hvdtrain.backends.torch.ops import Ops  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

PARAMS = [ParamSpec(name, shape, "float32") for name, shape in [("w", (256, 384)), ("b", (384,)), ("v", (384, 64))]]


@pytest.fixture
def wire(comm):
    return MpiCollectives(comm, timeout_s=60)


def test_the_sweep_is_the_same_everywhere_and_sane(control, wire):
    buckets = plan_buckets(PARAMS, 0.25)
    found = sweep.measure(wire, Ops(), control, buckets, Config())
    assert all(other == found for other in control.gather(found))
    assert [cost.name for cost in found.costs] == list(compressors.choices())
    assert not found.refused and 0 < found.seconds < 60
    for cost in found.costs:
        assert cost.codec_s > 0 or cost.name == "none"
        assert cost.wire_bytes == sum(compressors.create(cost.name, Config()).wire_bytes(b, control.size)
                                      for b in buckets)
        assert cost.traffic and all(t.calls > 0 and t.wire_bytes > 0 for t in cost.traffic)
    for link in found.links.values():
        assert link.alpha_s >= 0 and link.beta_s_per_byte >= 0 and 0 < link.seconds(1e6) < math.inf


def test_buckets_are_picked_alike(control, wire):
    params = [ParamSpec(f"w{i}", (256, 256), "float32") for i in range(12)]
    picked = sweep.pick_bucket_mb(wire, Ops(), control, params)
    assert all(other == picked for other in control.gather(picked))
    assert picked[0] in (1.0, 2.0, 4.0) and picked[1].startswith("an exchange, ")


@pytest.mark.parametrize("kind", ["mpi", "shared", "horovod"])
def test_a_run_decides_alike_on_all_ranks(control, kind, tmp_path):
    reason = horovod.horovod_reason("torch") if kind == "horovod" else None
    if reason:
        pytest.skip(reason)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
    setting = config(global_batch=24, max_steps=2 * (WARM_STEPS + WINDOW_STEPS) + 1, collectives=kind,
                     compression="auto", out=control.bcast(str(tmp_path / "run")))
    run = assemble(setting, model, samples(48))
    auto = next((c for c in run.callbacks if isinstance(c, AutoCompression)), None)
    if auto is None:
        auto = AutoCompression()
        run.callbacks.insert(0, auto)
    loop.fit(run)
    mine = auto.choice, auto.settled, run.dp.reducer.compressor.name, [n for n in run.notes if "auto" in n]
    assert auto.settled and auto.choice == mine[2] and mine[3]
    assert all(other == mine for other in control.gather(mine))
    weights = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
    assert all(np.array_equal(other, weights) for other in control.gather(weights))
