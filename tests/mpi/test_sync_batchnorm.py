"""BatchNorm over the samples of all ranks, for real: law 2 in both frameworks, compared with one process alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import CUTS, apart, bits, config, fitted, samples, solo, weights
from sync_models import with_norms

from hvdtrain.cluster import horovod
from hvdtrain.config import Named
from hvdtrain.core.errors import UserError
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
N, BATCH = 106, 53
"""Steps of 53 and 53 samples: no world size divides the batch."""


@pytest.fixture
def out(control, tmp_path):
    """Return a directory of rank 0's that all ranks name alike, and one of this rank's own."""
    return control.bcast(str(tmp_path / "run")), str(tmp_path / "solo")


def usable(control, framework, wire):
    if control.size > 3:
        pytest.skip("shown on two and three ranks")
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    reason = horovod.horovod_reason(framework) if wire == "horovod" else None
    if reason:
        pytest.skip(reason)


def settings(**changes):
    return config(global_batch=BATCH, optimizer=Named("SGD", {"momentum": 0.5}), lr=0.05, sync_batchnorm=True,
                  **{"max_steps": 20, **changes})


def same_bits(control, run):
    found = control.gather(bits(run))
    assert len(set(found)) == 1, found


@pytest.mark.tensorflow_size(2)
@pytest.mark.parametrize("framework, wire", [("torch", "horovod"), ("torch", "mpi"), ("torch", "shared"),
                                             ("tensorflow", "horovod")])
def test_law2_batchnorm_over_all_ranks_follows_one_process(control, framework, wire, out):
    """Equal parts, and parts of which one is empty: values, running statistics and the loss after 20 steps."""
    usable(control, framework, wire)
    reference = fitted(solo(settings(out=out[1]), with_norms(framework), samples(N)))
    for i, shares in enumerate((CUTS[control.size][0], [0] + [1 + r for r in range(control.size - 1)])):
        run = assemble(settings(out=f"{out[0]}-{i}", collectives=wire, shares=shares), with_norms(framework),
                       samples(N))
        assert run.collectives.name == wire and not any("BatchNorm" in note for note in run.notes)
        fitted(run)
        assert run.state.cursor.step == 20
        same_bits(control, run)
        assert apart(weights(run), weights(reference)) < 1e-5
        assert run.state.loss == pytest.approx(reference.state.loss, rel=1e-5)


@pytest.mark.tensorflow_size(3)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_ranks_with_fewer_micro_batches_run_empty_ones(control, framework, out):
    """Rounds of 2, 1 and 0 micro-batches of a rank's own: every graph is entered by all, and no rank waits forever."""
    usable(control, framework, "horovod")
    shares = [40, 13] + [0] * (control.size - 2)
    run = assemble(settings(out=out[0], collectives="horovod", shares=shares, micro_batch=20, max_steps=4),
                   with_norms(framework), samples(N))
    assert any("each micro-batch of all ranks" in note for note in run.notes)
    batch = next(run.feed.epoch(run.state.cursor))
    assert [len(micro[0]) for micro in batch.micros] == ([20, 20], [13, 0], [0, 0], [0, 0])[control.rank]
    fitted(run)
    same_bits(control, run)
    names = ("running_mean", "running_var", "moving_mean", "moving_variance")
    found = {n: a.tobytes() for n, a in run.parts.state.state()[0]["model"].items() if n.endswith(names)}
    assert len(found) == 4 and all(other == found for other in control.gather(found))


def test_keras_over_a_wire_outside_its_graphs_is_refused(control, out):
    usable(control, "tensorflow", "mpi")
    with pytest.raises(UserError, match="sync_batchnorm with Keras over mpi, which graphs cannot call"):
        assemble(replace(settings(out=out[0]), collectives="mpi"), with_norms("tensorflow"), samples(N))
