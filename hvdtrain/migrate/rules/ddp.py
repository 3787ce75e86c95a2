"""Scripts of torch.nn.parallel.DistributedDataParallel. Owns what is DDP's own in them."""

from __future__ import annotations

from typing import Any

from hvdtrain.migrate.rules import Plan, torch_trainer
from hvdtrain.migrate.scan import Scan

TITLE = "a script of DistributedDataParallel"
TARGETS = ("trainer",)
KIND = torch_trainer.Kind(("torch.distributed", "torch.nn.parallel", "torch.utils.data.distributed",
                           "torch.utils.data.DistributedSampler", "torch.multiprocessing", "torch.cuda.set_device"),
                          ("DistributedDataParallel",))


def recognise(scan: Scan) -> bool:
    """Whether DDP is used, or a process group is made."""
    return any(True for _ in scan.calls("DistributedDataParallel", "torch.distributed.init_process_group"))


def plan(scan: Scan, wish: Any) -> Plan:
    """To Trainer, by hand."""
    return torch_trainer.plan(scan, wish, KIND)
