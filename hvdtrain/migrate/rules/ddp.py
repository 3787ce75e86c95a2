"""Scripts of torch.nn.parallel.DistributedDataParallel. Owns what is DDP's own in them."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.migrate.rules import Plan, torch_edit
from hvdtrain.migrate.scan import Scan

TITLE = "a script of DistributedDataParallel"
TARGETS = ("trainer",)


def recognise(scan: Scan) -> bool:
    """Whether DDP is used, or a process group is made."""
    return any(True for _ in scan.calls("DistributedDataParallel")) or any(
        scan.dotted(call.func) == "torch.distributed.init_process_group" for call in scan.all(cst.Call))


def goes(scan: Scan, small: cst.CSTNode) -> bool:
    """No statement beside those that go in every kind."""
    return False


KIND = torch_edit.Kind(("torch.distributed", "torch.nn.parallel", "torch.utils.data.distributed",
                        "torch.utils.data.DistributedSampler"), goes, ("DistributedDataParallel",))


def plan(scan: Scan, wish: Any) -> Plan:
    """To Trainer where the loop is the standard one."""
    return torch_edit.plan(scan, wish, KIND)
