"""Scripts of horovod.torch. Owns what is Horovod's own in them, and the keys of Config that stand for its options."""

from __future__ import annotations

from functools import partial
from typing import Any

from hvdtrain.migrate.rules import torch_trainer
from hvdtrain.migrate.rules.torch_parts import Parts, code
from hvdtrain.migrate.scan import Scan, argument

TITLE = "a script of horovod.torch"
TARGETS = ("trainer",)


def recognise(scan: Scan) -> bool:
    """Whether horovod.torch is imported."""
    return scan.imports_any("horovod.torch")


def _more(scan: Scan, parts: Parts) -> str:
    """Config's compression, exchange and accumulate for the arguments of DistributedOptimizer."""
    passes = "1"
    for call in scan.calls("DistributedOptimizer"):
        compression, op = argument(call, "compression", 2), argument(call, "op")
        given = argument(call, "backward_passes_per_step", 3)
        if compression is not None and not _is(scan, compression, "Compression.none"):
            parts.keys["compression"] = '"fp16"' if _is(scan, compression, "Compression.fp16") else "..."
            if parts.keys["compression"] == "...":
                parts.tell(compression, f"DistributedOptimizer has {scan.short(compression)}",
                           'write "none", "fp16", or another of Config\'s', "which is meant is only known at run time")
        if op is not None and not _is(scan, op, "Average"):
            parts.keys["exchange"] = "Exchange(adasum=True)"
            if not _is(scan, op, "Adasum"):
                del parts.keys["exchange"]
                parts.tell(op, f"DistributedOptimizer has {scan.short(op)}", "where it may be Sum, multiply lr by the "
                           "number of processes; where Adasum, add exchange=Exchange(adasum=True)",
                           "Trainer takes the mean over the samples of a global batch")
        if given is not None and code(scan, given.value) != "1":
            passes = parts.keys["accumulate"] = code(scan, given.value)
            parts.tell(given, f"an update has {passes} passes", "take them out of global_batch where the loader's "
                       "batch is that of all passes already", "global_batch in the code below is times the passes")
    return passes


def _is(scan: Scan, given: Any, name: str) -> bool:
    return bool(scan.dotted(given.value).endswith("." + name))


KIND = torch_trainer.Kind(("horovod", "torch.utils.data.distributed", "torch.utils.data.DistributedSampler",
                           "torch.cuda.set_device"), more=_more)


plan = partial(torch_trainer.plan, kind=KIND)
"""To Trainer, by hand."""
