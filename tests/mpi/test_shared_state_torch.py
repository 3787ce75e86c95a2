"""State that ranks of a PyTorch model share beside its parameters: buffers, in a state_dict or not."""

from __future__ import annotations

import numpy as np
import pytest
from small_runs import CUTS, FEATURES, config, samples

from hvdtrain.cluster import horovod
from hvdtrain.engine import loop
from hvdtrain.engine.assemble import assemble

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120), pytest.mark.usefixtures("few_ranks")]


@pytest.fixture(params=["horovod", "mpi"])
def wire(request):
    reason = horovod.horovod_reason("torch") if request.param == "horovod" else None
    if reason:
        pytest.skip(reason)
    return request.param


class Statistics(nn.Module):
    """The mean of the last forward's samples, also in half precision, their number, and noise that no checkpoint holds.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 5)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("narrow", torch.zeros(FEATURES, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.register_buffer("last", torch.zeros(FEATURES))

    def buffer_reduction(self):
        return {"mean": "mean", "narrow": "mean", "count": "sum"}

    def forward(self, x):
        self.mean.copy_(x.mean(0))
        self.narrow.copy_(x.mean(0))
        self.count.add_(len(x))
        self.last = x[0].clone()
        return self.linear(x)


@pytest.mark.parametrize("cut", [0, -1], ids=["equal", "unequal"])
def test_statistics_are_those_of_the_whole_batch(control, wire, cut, tmp_path):
    torch.manual_seed(control.rank)
    x, y = samples(24)
    shares = CUTS[control.size][cut]
    run = assemble(config(global_batch=24, max_steps=1, collectives=wire, shares=shares,
                          out=control.bcast(str(tmp_path / "run"))), Statistics(), (x, y))
    noise = control.gather(run.spec.model.noise.tolist())
    assert all(other == noise[0] for other in noise)
    loop.fit(run)
    model = run.spec.model
    np.testing.assert_allclose(model.mean, x.mean(0), atol=1e-6)
    np.testing.assert_allclose(model.narrow.float(), x.mean(0), atol=0.01)
    assert int(model.count) == 24 and any(np.array_equal(model.last, one) for one in x)
    found = control.gather([b.float().tolist() for b in model.buffers()])
    assert all(other == found[0] for other in found)
