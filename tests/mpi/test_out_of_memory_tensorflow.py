"""A rank of Keras on TensorFlow that runs out of memory while others wait in the sums of its step, over each wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import apart, config, fitted, samples

from hvdtrain.cluster import horovod
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from fragile_keras import Faults, model  # noqa: E402

from hvdtrain.backends.tensorflow.graphs import Graph  # noqa: E402

SETTINGS = config(global_batch=24, max_steps=4, lr=0.01, accumulate=2, optimizer=Named("Adam"),
                  exchange=ExchangeConfig(bucket_mb=0.0005))
PLACES = [("low", "forward", 0), ("high", "backward", 0), ("low", "backward", 5), ("high", "forward", 5)]
"""In the first micro-batch of a step, and in one that exchanges. All eight places: tests/conformance."""


@pytest.fixture
def left(monkeypatch):
    """Return how many collectives of how many a graph that failed had not entered, for each time."""
    found = []

    def counted(graph, value, own=Graph.enter_rest):
        found.append((sum(each.entered() != graph.runs for each in graph._collectives), len(graph._collectives)))
        own(graph, value)

    monkeypatch.setattr(Graph, "enter_rest", counted)
    return found


def trained(control, settings, at):
    """Return a run whose last rank runs out of memory at these places, and tries again at its size each time."""
    faults = Faults(at if control.rank == control.size - 1 else ())
    run = assemble(settings, model(faults), samples(96))
    run.recovery.training.lower = lambda size: size
    fitted(run)
    assert faults.happened == len(faults.at)
    return run


def state(run):
    """Weights with statistics, and random generators, of this rank."""
    return [*run.parts.state.state()[0]["model"].values(),
            *(a for name, a in sorted(run.parts.state.rank_state().items()) if name.startswith("seed."))]


@pytest.mark.parametrize("wire, changes", [
    pytest.param("horovod", {}, marks=pytest.mark.world_size(2)),
    pytest.param("horovod", {"compression": "topk"}, marks=pytest.mark.world_size(3)),
    pytest.param("horovod", {"data_parallel": DataParallelConfig("zero", 2)}, marks=pytest.mark.world_size(2)),
    pytest.param("shared", {"data_parallel": DataParallelConfig("zero", 2)}, marks=pytest.mark.world_size(2))],
                         ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_others_get_what_they_wait_for_and_the_step_is_repeated(control, wire, changes, left, tmp_path):
    if wire == "horovod" and horovod.horovod_reason("tensorflow"):
        pytest.skip(horovod.horovod_reason("tensorflow"))
    out = control.bcast(str(tmp_path))
    settings = replace(SETTINGS, collectives=wire, out=f"{out}/plain", **changes)
    want = trained(control, settings, ())
    assert not left
    got = trained(control, replace(settings, out=f"{out}/disturbed"), PLACES)
    assert apart(state(got), state(want)) < (1e-5 if control.size > 2 else 1e-30)
    if control.rank == control.size - 1:  # of a graph that failed late a part had been summed by then
        assert any(0 < n < total for n, total in left), left
    else:
        assert not left
