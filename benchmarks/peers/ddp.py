"""PyTorch's DistributedDataParallel with its defaults, and with the communication hooks that it brings along."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import torch_common as common

FIRST_STEP = 2
"""First step that PowerSGD compresses: the least that the hook takes with error feedback and warm start."""


def prepare(setup: Setup, hook: str = "none", compiled: bool = False) -> Prepared:
    """Use DDP. ``hook``: none, fp16 or powersgd. ``compiled``: by torch.compile, as its documentation shows it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model, loss, device = common.build(setup)
    wire = common.process_group(setup, device)
    wrapped = DistributedDataParallel(model)
    _HOOKS[hook](wrapped, setup)
    called = torch.compile(wrapped) if compiled else wrapped
    return common.prepared(setup, called, loss, device, common.optimizer(wrapped), wire)


def _none(model: Any, setup: Setup) -> None:
    """DDP's own allreduce."""


def _fp16(model: Any, setup: Setup) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _powersgd(model: Any, setup: Setup) -> None:
    """All else as the hook has it by default: warm start, error feedback, min_compression_rate 2."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=setup.powersgd_rank,
                                        start_powerSGD_iter=FIRST_STEP)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


_HOOKS = {"none": _none, "fp16": _fp16, "powersgd": _powersgd}
