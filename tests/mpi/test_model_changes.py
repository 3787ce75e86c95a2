"""Freezing and unfreezing on real ranks: one model over every transport, as plain PyTorch trains it."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from small_runs import apart  # noqa: E402
from unfreezing import BASE, data, model, plain, work  # noqa: E402

from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.config import DataParallelConfig  # noqa: E402
from hvdtrain.engine.assemble import assemble  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


@pytest.mark.parametrize("way", (DataParallelConfig(), DataParallelConfig("zero", 2)), ids=("replicate", "zero 2"))
@pytest.mark.parametrize("wire", ("horovod", "mpi", "shared"))
def test_unfreezing_over_every_wire(control, tmp_path, monkeypatch, wire, way):
    if wire == "horovod" and horovod.horovod_reason("torch"):
        pytest.skip(horovod.horovod_reason("torch"))
    monkeypatch.chdir(tmp_path)
    out = control.bcast(str(tmp_path))
    run = assemble(replace(BASE, collectives=wire, out=f"{out}/{wire}", data_parallel=way), model(), data())
    assert apart(work(run)[0], plain()) < 1e-5
