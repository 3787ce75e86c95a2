"""Horovod alone, as its own documentation shows it for PyTorch: DistributedOptimizer and two broadcasts."""

from __future__ import annotations

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import torch_common as common


def prepare(setup: Setup) -> Prepared:
    """All settings as Horovod has them by default."""
    import horovod.torch as hvd

    model, loss, device = common.build(setup)
    hvd.init()
    assert hvd.size() == setup.control.size, "Horovod did not find the ranks"
    opt = hvd.DistributedOptimizer(common.optimizer(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    return common.prepared(setup, model, loss, device, opt, "horovod")
