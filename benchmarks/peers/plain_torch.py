"""The plain PyTorch loop with nothing around it, in one process or on each rank by itself: what a loop costs at least.
"""

from __future__ import annotations

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import torch_common as common


def prepare(setup: Setup, compiled: bool = False) -> Prepared:
    """Model, loss, SGD. ``compiled``: the whole model by torch.compile."""
    import torch

    model, loss, device = common.build(setup)
    called = torch.compile(model) if compiled else model
    return common.prepared(setup, called, loss, device, common.optimizer(model), "none")
