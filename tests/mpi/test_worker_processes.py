"""Training whose samples worker processes read follows the curve of one process that reads arrays itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from files_of_samples import Files
from small_runs import FRAMEWORKS, apart, config, fitted, make_model, samples, solo, weights

from hvdtrain.assemble import assemble
from hvdtrain.config import Data
from hvdtrain.errors import UserError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]
N, BATCH = 107, 53


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_law2_holds_with_workers(control, few_ranks, framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    out = control.bcast(str(tmp_path / "run"))
    settings = config(global_batch=BATCH, max_steps=8, out=out, data=Data(prefetch=2, workers=2), collectives="mpi")
    run = assemble(settings, make_model(framework), (Files(N), Files(31)))
    pools = {run.feed.data.pool, run.eval_feed.data.pool}
    assert len(pools) == 1 and len(pools.pop().workers) == 2
    assert "data.workers: 2 processes read the data of rank 0" in run.notes
    fitted(run)
    reference = fitted(solo(replace(settings, out=str(tmp_path / "solo"), collectives="auto", data=Data(prefetch=0)),
                            make_model(framework), (samples(N), samples(31))))
    assert apart(weights(run), weights(reference)) < 1e-5
    assert run.state.metrics == pytest.approx(reference.state.metrics, abs=1e-5)
    run.feed.data.pool.close()


def test_law1_holds_where_samples_cannot_be_read(control, few_ranks, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    out = control.bcast(str(tmp_path / "run"))
    settings = config(global_batch=40, epochs=2, max_steps=0, out=out, collectives="mpi", on_bad_sample="skip",
                      data=Data(prefetch=2, workers=2, shuffle=False))
    # The third batch is one sample, which cannot be read: no step is made of it.
    run = fitted(assemble(settings, make_model("torch"), (Files(81, bad=(2, 80)), Files(31, bad=(4,)))))
    said = [note for note in run.notes if "cannot be read" in note]
    assert said == ["sample 2 cannot be read and is left out: train/2.png: broken",
                    "sample 80 cannot be read and is left out: train/80.png: broken",
                    "sample 4 of the evaluation data cannot be read and is left out: train/4.png: broken"]
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


def test_too_many_samples_that_cannot_be_read_end_the_run_on_all_ranks(control, few_ranks, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    settings = config(global_batch=40, epochs=1, out=control.bcast(str(tmp_path / "run")), collectives="mpi",
                      on_bad_sample="skip")
    with pytest.raises(UserError, match="4 of 81 samples cannot be read"):
        fitted(assemble(settings, make_model("torch"), (Files(81, bad=(2, 3, 4, 70)), Files(31))))
