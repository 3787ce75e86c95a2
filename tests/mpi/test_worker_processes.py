"""Training whose samples worker processes read follows the curve of one process that reads arrays itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from files_of_samples import Files
from small_runs import CUTS, Recut, apart, config, fitted, make_model, replans, samples, solo, weights
from sync_models import with_norms

from hvdtrain.cluster import horovod
from hvdtrain.config import CheckpointConfig, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop, summary
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.build_model import eval_feed

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
N, BATCH = 107, 53


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.world_size(3)),
                                       pytest.param("tensorflow", marks=pytest.mark.world_size(2))])
def test_law2_holds_with_workers(control, few_ranks, framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    out = control.bcast(str(tmp_path / "run"))
    settings = config(global_batch=BATCH, max_steps=8, out=out, data=DataConfig(prefetch=2, workers=2),
                      collectives="mpi")
    run = assemble(settings, make_model(framework), (Files(N), Files(31)))
    pools = {run.feed.data.pool, run.eval_feed.data.pool}
    assert len(pools) == 1 and len(pools.pop().workers) == 2
    assert "data.workers: 2 processes read the data of rank 0" in run.notes
    fitted(run)
    reference = fitted(solo(replace(settings, out=str(tmp_path / "solo"), collectives="auto",
                                    data=DataConfig(prefetch=0)),
                            make_model(framework), (samples(N), samples(31))))
    assert apart(weights(run), weights(reference)) < 1e-5
    assert run.state.metrics == pytest.approx(reference.state.metrics, abs=1e-5)
    later = eval_feed(run, Files(31))  # as `Trainer.evaluate` does with data of its own
    workers = later.data.pool.workers
    assert len(workers) == 2 and later.data.pool is not run.feed.data.pool
    assert loop.measure(run, later) == run.state.metrics
    del later
    assert all(worker.channel.closed for worker in workers)  # they end with what they were for
    run.feed.data.pool.close()


def test_law1_holds_where_samples_cannot_be_read(control, few_ranks, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    out = control.bcast(str(tmp_path / "run"))
    settings = config(global_batch=40, epochs=2, max_steps=0, out=out, collectives="mpi", on_bad_sample="skip",
                      data=DataConfig(prefetch=2, workers=2, shuffle=False))
    # The third batch is one sample, which cannot be read: no step is made of it.
    run = fitted(assemble(settings, make_model("torch"), (Files(81, bad=(2, 80)), Files(31, bad=(4,)))))
    said = [note for note in run.notes if "cannot be read" in note]
    assert said == ["sample 2 cannot be read and is skipped: train/2.png: broken",
                    "sample 80 cannot be read and is skipped: train/80.png: broken",
                    "sample 4 of the evaluation data cannot be read and is skipped: train/4.png: broken"]
    assert run.ledger["epochs"] == 2 and run.ledger["unread"] == 4
    # Two batches of 39 and 40 samples: the mean over those that are there, by hand in one process.
    import torch

    model = make_model("torch")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    x, y = (torch.from_numpy(each) for each in samples(81))
    for _ in range(2):
        for numbers in ([i for i in range(40) if i != 2], list(range(40, 80))):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(model(x[numbers]), y[numbers]).backward()
            sgd.step()
    assert apart(weights(run), [p.detach().numpy() for _, p in sorted(model.named_parameters())]) < 1e-5
    run.feed.data.pool.close()


@pytest.mark.parametrize("framework, wire", [
    pytest.param("torch", "mpi", marks=pytest.mark.world_size(3)),
    pytest.param("tensorflow", "horovod", marks=pytest.mark.world_size(2))])
def test_law2_holds_where_samples_cannot_be_read(control, few_ranks, framework, wire, tmp_path):
    """Unequal ranks that are replanned, statistics over all of them, resumed between two samples that are left out."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    if wire == "horovod" and horovod.horovod_reason(framework):
        pytest.skip(horovod.horovod_reason(framework))
    root = Path(control.bcast(str(tmp_path)))
    data = Files(83, bad=(0, 41, 82)), Files(31, bad=(0, 15, 30))  # those that are looked at first among them
    settings = config(global_batch=40, epochs=3, eval_every=1, out=str(root / "half"), sync_batchnorm=True,
                      collectives=wire, on_bad_sample="skip", checkpoint=CheckpointConfig(),
                      data=DataConfig(workers=2, prefetch=2))

    def train(settings):
        run = assemble(settings, with_norms(framework), data)
        run.callbacks[:0] = [Recut(replans(control.size))]
        fitted(run).feed.data.pool.close()
        return run

    train(replace(settings, shares=CUTS[control.size][-1], max_steps=4))
    if control.rank == 0:
        shutil.copytree(root / "half", root / "on")
    control.barrier("copied")
    run = train(replace(settings, out=str(root / "on"), resume="auto", data=DataConfig(workers=1)))
    want = fitted(solo(replace(settings, out=str(tmp_path / "solo"), collectives="auto", data=DataConfig(prefetch=0)),
                       with_norms(framework), data))
    assert apart(weights(run), weights(want)) < 1e-5
    assert run.state.metrics == pytest.approx(want.state.metrics, abs=1e-5)
    assert run.ledger.pop("compared") > 0  # one rank alone has nothing to compare
    assert run.ledger == want.ledger and run.ledger["epochs"] == 3 and run.ledger["unread"] == 9
    told = [sorted(note for note in each.notes if "cannot be read" in note) for each in (run, want)]
    assert told[0] == told[1] and len(told[0]) == 6
    if control.rank == 0:
        records = [json.loads(line) for line in (root / "on" / "log.jsonl").read_text().splitlines()]
        assert [r["unread"] for r in records if r["event"] == "eval"] == [3, 3, 3, 3]
        assert dict(summary.rows(run))["test samples"] == "3 unreadable, skipped"


def test_too_many_samples_that_cannot_be_read_end_the_run_on_all_ranks(control, few_ranks, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    settings = config(global_batch=40, epochs=1, out=control.bcast(str(tmp_path / "run")), collectives="mpi",
                      on_bad_sample="skip")
    with pytest.raises(UserError, match="4 of 81 samples cannot be read"):
        fitted(assemble(settings, make_model("torch"), (Files(81, bad=(2, 3, 4, 70)), Files(31))))
