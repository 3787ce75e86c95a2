"""Horovod's API in a loop of PyTorch, as its documentation shows it: Horovod itself, and `hvdtrain.torch`.

Owns the one loop of both: they differ in the module that is imported, as in a user's script.
"""

from __future__ import annotations

import importlib

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import torch_common as common


def prepare(setup: Setup, module: str = "horovod.torch") -> Prepared:
    """Use DistributedOptimizer and the two broadcasts of ``module``, all settings by default."""
    hvd = importlib.import_module(module)
    model, loss, device = common.build(setup)
    hvd.init()
    assert hvd.size() == setup.control.size, f"{module} did not find the ranks"
    opt = hvd.DistributedOptimizer(common.optimizer(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    return common.prepared(setup, model, loss, device, opt, "horovod" if module == "horovod.torch" else _transport())


def _transport() -> str:
    """Return what carries the gradients of `hvdtrain.torch`; collective."""
    from hvdtrain.torch.basics import global_process_set, shared_wire

    return "shared" if shared_wire(global_process_set) else "horovod"
