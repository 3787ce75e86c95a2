"""Unlike ranks for real: plans, new plans while training, and the curve that does not notice them.

Speeds are made unlike by `emulate_speed`. How well a plan fits is a matter of time and belongs to
``benchmarks mixed``; here it is that one was made, followed by every rank, and that law 2 holds across it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import FRAMEWORKS, Recut, apart, bits, config, fitted, make_model, replans, samples, solo, weights

from hvdtrain.config import DataConfig, Named, RebalanceConfig
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.meter import Meter

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
N, BATCH = 107, 53


@pytest.fixture
def out(control, tmp_path):
    """Return a directory of rank 0's that all ranks name alike, and one of this rank's own."""
    return control.bcast(str(tmp_path / "run")), str(tmp_path / "solo")


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


def run_of(settings, framework, data, *callbacks):
    run = assemble(settings, make_model(framework), data)
    run.callbacks[:0] = callbacks
    return fitted(run)


def follows_one_process(control, run, settings, framework, out):
    assert len(set(control.gather(bits(run)))) == 1
    plain = replace(settings, out=out[1], collectives="auto", balance="off", emulate_speed=[])
    reference = fitted(solo(plain, make_model(framework), samples(N)))
    assert apart(weights(run), weights(reference)) < 1e-5
    assert run.state.loss == pytest.approx(reference.state.loss, rel=1e-5)


@pytest.mark.tensorflow_size(1, 2, 3)
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.world_size(1, 2)),
                                      pytest.param(2, marks=pytest.mark.world_size(3, 4))])
def test_law2_across_new_plans_with_a_rank_without_samples(control, framework, prefetch, out):
    settings = config(global_batch=BATCH, max_steps=20, out=out[0], data=DataConfig(prefetch=prefetch),
                      optimizer=Named("SGD", {"momentum": 0.5}))
    run = run_of(settings, framework, samples(N), Recut(replans(control.size)))
    follows_one_process(control, run, settings, framework, out)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("balance, most", [("off", 9), ("auto", 2)])
def test_new_plans_trace_a_few_graphs_or_one(control, out, balance, most):
    """Eight numbers of samples get one each and all others share one; where plans keep changing, all share one, and
    trials another."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    moves = {step: [1 + (rank + step) % 5 for rank in range(control.size)] for step in range(4, 20, 2)}
    settings = config(global_batch=BATCH, max_steps=20, out=out[0], balance=balance,
                      rebalance=RebalanceConfig(probe_s=0.1, probe_cache=False))
    run = run_of(settings, "tensorflow", samples(N), Recut(moves))
    assert 0 < len(run.parts.stage.calls._graphs) <= most


@pytest.mark.tensorflow_size(3)
def test_the_slow_rank_gets_less_and_the_curve_stays(control, framework, out):
    if control.size == 1:
        pytest.skip("one rank takes all")
    settings = config(global_batch=BATCH, max_steps=20, out=out[0], balance="auto",
                      emulate_speed=[0.2] + [1.0] * (control.size - 1), optimizer=Named("SGD", {"momentum": 0.5}),
                      rebalance=RebalanceConfig(probe_s=0.1, probe_cache=False))
    run = run_of(settings, framework, samples(N))
    assert any(note.startswith("balance auto: ") for note in run.notes)
    own = control.gather(run.timeline.totals.own_samples)
    assert sum(own) == run.timeline.totals.samples
    assert own[0] < max(own)
    reading = next(c for c in run.callbacks if isinstance(c, Meter)).reading
    assert len(reading.rows) == control.size and 0 < reading.percent and reading.sentence
    follows_one_process(control, run, settings, framework, out)
