"""compile auto on several ranks: they choose alike, exchange while a compiled backward continues, and stay one model.

The compiler is PyTorch's without code generation.
"""

import numpy as np
import pytest
from small_runs import apart, bits, config, fitted, samples, solo, weights

from hvdtrain.config import DataParallelConfig
from hvdtrain.engine.assemble import assemble

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402


class Part(nn.Module):
    """Linear, tanh."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def make():
    torch.manual_seed(3)
    return nn.Sequential(Part(12, 16), Part(16, 16), Part(16, 5))


@pytest.mark.parametrize("zero, remat", [pytest.param("", "off", marks=pytest.mark.world_size(3)),
                                         pytest.param("zero", "every:2", marks=pytest.mark.world_size(2))])
def test_ranks_compile_alike_and_stay_one_model(control, monkeypatch, tmp_path, zero, remat):
    from hvdtrain.backends.torch.transforms import compile as transform
    from hvdtrain.engine.callbacks import auto_compile as timing

    torch._dynamo.reset()
    monkeypatch.setattr(transform, "compiled", lambda function: torch.compile(function, backend="aot_eager"))
    monkeypatch.setattr(transform, "missing", lambda kind: "")
    slower = control.rank == control.size - 1

    def turns(base, option, work):  # the last rank gains least: it decides
        work()
        return (1.0,) * 3, ((0.9 if slower else 0.2),) * 3

    monkeypatch.setattr(timing, "_turns", turns)
    divided = DataParallelConfig("zero", 2) if zero else DataParallelConfig()
    settings = config(global_batch=21, max_steps=4, compile="auto", remat=remat, data_parallel=divided, check_every=2,
                      audit=0 if zero else 2,
                      out=control.bcast(str(tmp_path / "run")))
    run = fitted(assemble(settings, make(), samples(60), control))
    assert any("compiled is used: a micro-batch takes 1e+03 ms without and 900 ms with it" in n for n in run.notes)
    assert len(set(control.gather(bits(run)))) == 1
    alone = fitted(solo(config(global_batch=21, max_steps=4), make(), samples(60)))
    assert apart(weights(run), weights(alone)) < 1e-5
    assert np.isfinite(run.state.loss)
    torch._dynamo.reset()
