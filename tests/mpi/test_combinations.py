"""Settings train together over every transport as one rank alone does: `combinations.JOBS`, in PyTorch."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from combinations import DATA, JOBS, distance, held, settings, tolerance, words  # noqa: E402
from small_runs import fitted  # noqa: E402
from torch_tools import TorchKit  # noqa: E402

from hvdtrain.backends.torch import placement  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.engine.assemble import assemble  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
MODEL = TorchKit().chain


@pytest.mark.parametrize("wire", ["shared", "mpi", "horovod"])
@pytest.mark.parametrize("run", JOBS["torch"])
def test_settings_train_together_as_one_rank_alone(control, tmp_path, monkeypatch, run, wire):
    if control.size > 2:
        pytest.skip("tried on 2 ranks")
    if wire == "horovod" and horovod.horovod_reason("torch"):
        pytest.skip(horovod.horovod_reason("torch"))
    monkeypatch.setattr(placement, "devices", lambda n: [torch.device("cpu")] * n)
    names = [*words(run), f"transport {wire}"]
    out = control.bcast(str(tmp_path / "run"))
    job = fitted(assemble(settings(names, out=out), MODEL(), DATA))
    assert job.collectives.name == wire
    assert distance(MODEL, held([job])) < tolerance(names)
