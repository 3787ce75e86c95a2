"""Lightning Fabric with its DDP strategy and defaults: ``setup`` around model and optimizer, ``backward``."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import torch_common as common


def prepare(setup: Setup) -> Prepared:
    """Return the ranks are there already, so Fabric is told its environment and launches nothing."""
    import torch
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    model, loss, device = common.build(setup)
    control = setup.control
    strategy: Any = "auto"
    if control.size > 1:
        common.rendezvous(setup)
        strategy = DDPStrategy(cluster_environment=LightningEnvironment(), timeout=common.TIMEOUT)
    fabric = Fabric(accelerator="cpu" if device.type == "cpu" else "cuda", devices=control.local_size,
                    num_nodes=max(1, control.size // max(1, control.local_size)), strategy=strategy)
    fabric.launch()
    assert fabric.world_size == control.size, "Fabric did not find the ranks"
    torch.set_num_threads(setup.threads)
    wrapped, opt = fabric.setup(model, common.optimizer(model))
    wire = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    return common.prepared(setup, wrapped, loss, fabric.device, opt, wire, fabric.backward)
