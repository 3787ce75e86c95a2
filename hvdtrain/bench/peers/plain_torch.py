"""The plain PyTorch loop with nothing around it, in one process or on each rank by itself: what a loop costs at least.
"""

from __future__ import annotations

from hvdtrain.bench.peers import Prepared, Setup
from hvdtrain.bench.peers import torch_common as common


def prepare(setup: Setup) -> Prepared:
    """Model, loss, SGD."""
    model, loss, device = common.build(setup)
    return common.prepared(setup, model, loss, device, common.optimizer(model), "none")
