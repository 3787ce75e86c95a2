"""Recomputed PyTorch blocks over real ranks: the bits of the same run without, joint BatchNorm and ZeRO among them."""

from __future__ import annotations

import pytest
from small_runs import bits, config, fitted, samples
from sync_models import with_norms

from hvdtrain.cluster import horovod
from hvdtrain.config import DataParallelConfig
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]
DATA = samples(106)


@pytest.mark.parametrize("wire", ["shared", "horovod"])
@pytest.mark.parametrize("changes", [{}, {"data_parallel": DataParallelConfig("zero", 2)}], ids=["replicated", "zero"])
def test_ranks_that_recompute_end_with_the_bits_of_those_that_do_not(control, tmp_path, wire, changes):
    if control.size > 2:
        pytest.skip("shown on two ranks")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if wire == "horovod" and (reason := horovod.horovod_reason("torch")):
        pytest.skip(reason)
    found = []
    for remat in ("off", "every:1"):
        settings = config(global_batch=53, max_steps=6, sync_batchnorm=True, shares=[2, 1], collectives=wire,
                          remat=remat, out=control.bcast(str(tmp_path / f"run-{remat}".replace(":", ""))), **changes)
        run = fitted(assemble(settings, with_norms("torch"), DATA))
        assert len(run.parts.remat.chosen) == (10 if remat != "off" else 0)
        found += control.gather(bits(run))
        run.leave()
    assert len(set(found)) == 1, found
