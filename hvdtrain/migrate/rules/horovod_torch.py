"""Scripts of horovod.torch. Owns what is Horovod's own in them, and the keys of Config that stand for its options."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.rules import Plan, torch_edit
from hvdtrain.migrate.scan import Scan, argument

TITLE = "a script of horovod.torch"
TARGETS = ("trainer",)
GO = ("init", "shutdown", "broadcast_parameters", "broadcast_optimizer_state")


def recognise(scan: Scan) -> bool:
    """Whether horovod.torch is imported."""
    return scan.imports_any("horovod.torch")


def goes(scan: Scan, small: cst.CSTNode) -> bool:
    """``hvd.init()``, broadcasts of the first state, and ``opt = hvd.DistributedOptimizer(opt, ...)``."""
    value = small.value if isinstance(small, (cst.Expr, cst.Assign)) else None
    if not isinstance(value, cst.Call) or not scan.dotted(value.func).startswith("horovod.torch."):
        return False
    return scan.means(value.func, *GO) if isinstance(small, cst.Expr) else scan.means(value.func,
                                                                                      "DistributedOptimizer")


def keys(scan: Scan) -> dict[str, str]:
    """Config's compression and exchange for Horovod's; ``accumulate`` is left to the user."""
    found: dict[str, str] = {}
    for call in scan.calls("DistributedOptimizer"):
        compression, op = argument(call, "compression", 2), argument(call, "op")
        if compression is not None and "fp16" in scan.code(compression.value):
            found["compression"] = '"fp16"'
        if op is not None and scan.means(op.value, "Adasum"):
            found["exchange"] = "Exchange(adasum=True)"
        passes = argument(call, "backward_passes_per_step", 3)
        if passes is not None and scan.code(passes.value) != "1":
            found["accumulate"] = scan.code(passes.value)
    return found


def _refuse(scan: Scan) -> None:
    """`Refused` for options that change what a step is."""
    for call in scan.calls("DistributedOptimizer"):
        compression, op = argument(call, "compression", 2), argument(call, "op")
        passes = argument(call, "backward_passes_per_step", 3)
        for given, fine, do in (
                (passes, ("1",), "set accumulate, and global_batch to that of all passes"),
                (op, ("hvd.Average", "Average", "hvd.Adasum", "Adasum"),
                 "divide lr and clip_norm as the mean wants it"),
                (compression, ("hvd.Compression.none", "hvd.Compression.fp16", "Compression.none",
                               "Compression.fp16"),
                 "name one of Config's compression")):
            if given is not None and scan.code(given.value).replace("horovod.torch.", "hvd.") not in fine and not (
                    isinstance(given.value, cst.IfExp)):
                raise Refused(scan.line(given), f"DistributedOptimizer has {scan.short(given)}",
                              "it changes what a step is made of", do + ", in the code below")
            if given is not None and isinstance(given.value, cst.IfExp):
                raise Refused(scan.line(given), f"DistributedOptimizer has {scan.short(given)}",
                              "which of the two is meant is only known at run time", "choose one in the code below")


KIND = torch_edit.Kind(("horovod",), goes, (), keys=keys)


def plan(scan: Scan, wish: Any) -> Plan:
    """To Trainer where the loop is the standard one."""
    try:
        _refuse(scan)
    except Refused as refused:
        from hvdtrain.migrate.rules import torch_snippet

        return Plan(findings=[refused.finding],
                    snippet=torch_snippet.guess(scan, True, wish.ranks, keys(scan)))
    return torch_edit.plan(scan, wish, KIND)
