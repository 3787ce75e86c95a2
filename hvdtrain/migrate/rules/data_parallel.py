"""Scripts of torch.nn.DataParallel: one process, several GPUs, one batch that is cut over them."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.migrate.rules import Plan, torch_edit
from hvdtrain.migrate.scan import Scan

TITLE = "a script of DataParallel"
TARGETS = ("trainer",)


def recognise(scan: Scan) -> bool:
    """Whether DataParallel is used."""
    return any(True for _ in scan.calls("DataParallel", "data_parallel"))


def goes(scan: Scan, small: cst.CSTNode) -> bool:
    """No statement beside those that go in every kind."""
    return False


KIND = torch_edit.Kind(("torch.nn.DataParallel", "torch.nn.parallel"), goes, ("DataParallel",), per_rank=False)


def plan(scan: Scan, wish: Any) -> Plan:
    """To Trainer where the loop is the standard one; the batch is the global one already."""
    return torch_edit.plan(scan, wish, KIND)
