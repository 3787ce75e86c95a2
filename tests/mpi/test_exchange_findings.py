"""Mistakes that a review found in the exchange, each with the test that saw it fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import FRAMEWORKS, apart, bits, config, fitted, make_model, samples, solo, weights

from hvdtrain.assemble import assemble
from hvdtrain.cluster import boot
from hvdtrain.config import Checkpoint, Exchange

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


@pytest.fixture
def out(control, tmp_path):
    return control.bcast(str(tmp_path / "run"))


@pytest.mark.parametrize("wire", ["horovod", "shared"])
def test_a_task_that_throws_gradients_away_trains_like_one_process(control, wire, out, monkeypatch):
    """``zero_grad()`` sets ``.grad`` to None: the new one must find its way into the bucket."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if wire == "horovod" and boot.horovod_reason("torch"):
        pytest.skip(boot.horovod_reason("torch"))
    from torch.nn import functional as F

    import torch_models.mlp

    def task(model, batch):
        model.zero_grad()
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    monkeypatch.setattr(torch_models.mlp, "task", task, raising=False)
    args = {"in_features": 12, "hidden": [16], "classes": 5}
    settings = config(model="torch_models.mlp:build", model_args=args, global_batch=23, max_steps=5)
    run = fitted(assemble(replace(settings, collectives=wire, out=out), None, samples(60)))
    assert set(control.gather(bits(run))) == {bits(run)}
    alone = fitted(solo(replace(settings, out=out + f"-solo{control.rank}"), None, samples(60)))
    assert apart(weights(run), weights(alone)) < 1e-5


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_checkpoint_without_state_clears_the_state(control, framework, out):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    options = {"global_batch": 12, "max_steps": 3}
    fitted(assemble(config(out=out, checkpoint=Checkpoint(every_steps=3), **options), make_model(framework),
                    samples(60)))
    run = fitted(assemble(config(out=out + "-topk", compression="topk", **options), make_model(framework), samples(60)))
    owed = sum(float(np.abs(np.array(run.reducer.ops.to_host(s["residual"]))).sum()) for s in run.reducer.states)
    assert control.agree(owed > 0)
    assert "starts anew" in run.step.load_rank({k: v for k, v in run.step.rank_state().items()
                                                if not k.startswith("compressor.")})
    assert run.reducer.steps == 0
    assert all(not np.array(run.reducer.ops.to_host(s["residual"])).any() for s in run.reducer.states)


def test_adasum_of_a_short_batch_has_the_gradients_own_size(control, out):
    """One sample, the other ranks have none: what comes out is that sample's gradient, not P times it."""
    if control.size not in (2, 4):
        pytest.skip("Adasum takes 2, 4, 8, ... ranks")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if boot.horovod_reason("torch"):
        pytest.skip(boot.horovod_reason("torch"))
    settings = {"global_batch": 4 * control.size, "max_steps": 1, "exchange": Exchange(adasum=True)}
    run = fitted(assemble(config(out=out, **settings), make_model("torch"), samples(1)))
    assert run.collectives.name == "horovod" and run.reducer.compressor.name == "adasum"
    alone = fitted(solo(config(global_batch=4, max_steps=1, out=out + f"-solo{control.rank}"), make_model("torch"),
                        samples(1)))
    assert apart(weights(run), weights(alone)) < 1e-6


@pytest.mark.parametrize("name", ["none", "int8", "topk", "powersgd", "bf16"])
def test_a_parameter_without_elements_is_carried_along(control, name, out):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(12, 5)
            self.empty = torch.nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return self.linear(x) + self.empty.sum()

    torch.manual_seed(0)
    run = fitted(assemble(config(global_batch=12, max_steps=2, compression=name, out=out,
                                 exchange=Exchange(bucket_mb=1e-5)), Model(), samples(60)))
    assert 0 in [b.n for b in run.reducer.buckets]
    assert set(control.gather(bits(run))) == {bits(run)}
