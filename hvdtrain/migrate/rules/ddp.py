"""Scripts of torch.nn.parallel.DistributedDataParallel. Owns what is DDP's own in them."""

from __future__ import annotations

from functools import partial

from hvdtrain.migrate.rules import torch_trainer
from hvdtrain.migrate.scan import Scan

TITLE = "a script of DistributedDataParallel"
TARGETS = ("trainer",)
KIND = torch_trainer.Kind(("torch.distributed", "torch.nn.parallel", "torch.utils.data.distributed",
                           "torch.utils.data.DistributedSampler", "torch.multiprocessing", "torch.cuda.set_device"),
                          ("DistributedDataParallel",))


def recognise(scan: Scan) -> bool:
    """Whether DDP is used, or a process group is made."""
    return any(True for _ in scan.calls("DistributedDataParallel", "torch.distributed.init_process_group"))


plan = partial(torch_trainer.plan, kind=KIND)
"""To Trainer, by hand."""
