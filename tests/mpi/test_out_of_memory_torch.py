"""A rank of a real job runs out of memory in the middle of a backward, over every wire: all repeat the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from shortages import DATA, Injected, Setting, model_of  # noqa: E402
from small_runs import apart, bits, fitted, solo, weights  # noqa: E402

from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.engine.assemble import assemble  # noqa: E402

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120), pytest.mark.usefixtures("few_ranks")]
SHARES = {2: (3, 1), 3: (1, 3, 0)}


@pytest.mark.parametrize("wire, way", [
    ("horovod", ("replicate", 1, "none")), ("horovod", ("zero", 2, "none")), ("mpi", ("replicate", 1, "topk")),
    ("mpi", ("zero", 1, "none")), ("shared", ("replicate", 1, "none")), ("shared", ("zero", 2, "none"))])
def test_a_step_is_repeated_over_every_wire(control, tmp_path, monkeypatch, wire, way):
    if wire == "horovod" and horovod.horovod_reason("torch"):
        pytest.skip(horovod.horovod_reason("torch"))
    monkeypatch.chdir(tmp_path)
    out = control.bcast(str(tmp_path))
    setting = Setting("torch", SHARES[control.size], 2, way, "Adam")
    base = replace(setting.config(), collectives=wire)
    plain = fitted(assemble(replace(base, out=f"{out}/plain"), model_of("torch"), DATA))
    for number, fails in enumerate((range(7, 8), range(7, 9))):  # in a final micro-batch: some buckets are on the wire
        run = assemble(replace(base, out=f"{out}/{number}"), model_of("torch"), DATA)
        Injected("backward", fails).into(run, control.rank == 0)
        fitted(run)
        assert len(set(control.gather(bits(run)))) == 1 and len(run.shortages) == len(fails)
        if len(fails) == 1:
            assert bits(run) == bits(plain)
        elif way[2] == "none":
            alone = fitted(solo(replace(base, out=f"{out}/alone{control.rank}"), model_of("torch"), DATA))
            assert apart(weights(run), weights(alone)) < 1e-5 and apart(weights(run), weights(plain)) < 1e-5
