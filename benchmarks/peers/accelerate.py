"""Hugging Face Accelerate with its defaults: ``prepare`` around model and optimizer, ``backward`` for the loss."""

from __future__ import annotations

import os

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import torch_common as common


def prepare(setup: Setup) -> Prepared:
    """Accelerate starts the process group by itself, from the variables that its launcher would set."""
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs

    model, loss, device = common.build(setup)
    if setup.control.size > 1:
        common.rendezvous(setup)
    on_cpu = device.type == "cpu"
    os.environ["ACCELERATE_USE_CPU"] = str(on_cpu)
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=common.TIMEOUT)
    accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[group] if setup.control.size > 1 else [])
    assert accelerator.num_processes == setup.control.size, "Accelerate did not find the ranks"
    torch.set_num_threads(setup.threads)  # it sets a number of its own
    wrapped, opt = accelerator.prepare(model, common.optimizer(model))
    wire = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    return common.prepared(setup, wrapped, loss, accelerator.device, opt, wire, accelerator.backward)
