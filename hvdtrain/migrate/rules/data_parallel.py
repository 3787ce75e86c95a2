"""Scripts of torch.nn.DataParallel: one process, several GPUs, one batch that is cut over them."""

from __future__ import annotations

from functools import partial

from hvdtrain.migrate.rules import torch_trainer
from hvdtrain.migrate.scan import Scan

TITLE = "a script of DataParallel"
TARGETS = ("trainer",)
KIND = torch_trainer.Kind(("torch.nn.DataParallel", "torch.nn.parallel"), ("DataParallel",), per_rank=False)


def recognise(scan: Scan) -> bool:
    """Whether DataParallel is used."""
    return any(True for _ in scan.calls("DataParallel", "data_parallel"))


plan = partial(torch_trainer.plan, kind=KIND)
"""To Trainer, by hand; the batch is the global one already."""
