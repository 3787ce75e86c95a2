"""Kinds of PyTorch scripts with a loop of their own: horovod.torch, Accelerate, DDP, DataParallel.

Owns what is each kind's own, and the keys of Config that stand for its options; the rest is ``torch_trainer``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate.rules import Plan, torch_parts, torch_trainer
from hvdtrain.commands.migrate.rules.torch_parts import Parts, code
from hvdtrain.commands.migrate.rules.torch_trainer import Kind
from hvdtrain.commands.migrate.scan import Scan, argument, is_true, name_of, text_of

IDLE = ("split_batches", "log_with", "project_dir", "project_config", "cpu", "device_placement", "rng_types")
PRECISION = {"no": "", "bf16": '"bf16"', "fp16": '"fp16"'}


@dataclass(frozen=True)
class TorchRule:
    """A rule, as `hvdtrain.commands.migrate.rules` has them. ``uses``: whether a script is of this kind; ``of``: its
    own."""

    TITLE: str
    uses: Callable[[Scan], bool]
    kind: Kind
    of: Callable[[Scan, Kind], Kind] = lambda scan, kind: kind
    TARGETS: tuple[str, ...] = ("trainer",)

    def recognise(self, scan: Scan) -> bool:
        """Whether a script is of this kind."""
        return self.uses(scan)

    def plan(self, scan: Scan, wish: Any) -> Plan:
        """To Trainer, by hand."""
        return torch_trainer.plan(scan, wish, self.of(scan, self.kind))


def _of_horovod(scan: Scan, parts: Parts) -> str:
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


def _of_accelerate(scan: Scan, parts: Parts) -> str:
    """Config's precision and accumulate for the arguments of Accelerator."""
    passes = "1"
    for arg in (arg for call in scan.calls("accelerate.Accelerator") for arg in call.args):
        word, value = arg.keyword.value if arg.keyword is not None else "", code(scan, arg.value)
        if word == "mixed_precision":
            said = PRECISION.get(text_of(arg.value) or "", "...")
            parts.keys |= {"precision": said} if said else {}
            if said == "...":
                parts.tell(arg, f"the Accelerator has {scan.short(arg)}",
                           'write precision="fp32" (their "no"), "bf16" or "fp16"',
                           "which is meant is only known at run time")
        elif word == "gradient_accumulation_steps" and value != "1":
            passes = parts.keys["accumulate"] = value
        elif word not in (*IDLE, "gradient_accumulation_steps"):
            parts.tell(arg, f"the Accelerator has {scan.short(arg)}", "look for it in docs/config.md")
    if any(_prepared(scan, c) for c in scan.all(cst.Call) if ".lr_scheduler." in scan.dotted(c.func)):
        call = next(c for c in scan.all(cst.Call) if ".lr_scheduler." in scan.dotted(c.func))
        parts.tell(call, f"{scan.short(call.func)} is prepared", "divide the schedule's lengths in the code below by "
                   "that number", "Accelerate moves it once for each process in every step (unless split_batches)")
    return passes


def _prepared(scan: Scan, call: cst.Call) -> bool:
    """Whether what a call makes is handed to ``prepare``, and steps with every batch."""
    up = scan.parent[call]
    name = name_of(up.targets[0].target) if isinstance(up, cst.Assign) else None
    return any(name_of(arg.value) == name for c in scan.methods("prepare") for arg in c.args) and (
        torch_parts.interval(scan, call) == "step")


def _calls(*names: str) -> Callable[[Scan], bool]:
    """Whether something of these names is called."""
    return lambda scan: any(True for _ in scan.calls(*names))


def _split(scan: Scan, kind: Kind) -> Kind:
    """An Accelerator's with the batch as its ``split_batches`` means it."""
    split = any(is_true(argument(call, "split_batches")) for call in scan.calls("accelerate.Accelerator"))
    return replace(kind, per_rank=not split)


_SAMPLER = ("torch.utils.data.distributed", "torch.utils.data.DistributedSampler", "torch.cuda.set_device")

TORCH_RULES = {
    "horovod_torch": TorchRule("a script of horovod.torch", lambda scan: scan.imports_any("horovod.torch"),
                               Kind(("horovod", *_SAMPLER), more=_of_horovod)),
    "accelerate": TorchRule("a script of Accelerate", _calls("accelerate.Accelerator"),
                            Kind(("accelerate.Accelerator",), more=_of_accelerate, handle="accelerate.Accelerator"),
                            _split),
    "ddp": TorchRule("a script of DistributedDataParallel",
                     _calls("DistributedDataParallel", "torch.distributed.init_process_group"),
                     Kind(("torch.distributed", "torch.nn.parallel", "torch.multiprocessing", *_SAMPLER),
                          ("DistributedDataParallel",))),
    "data_parallel": TorchRule("a script of DataParallel", _calls("DataParallel", "data_parallel"),
                               Kind(("torch.nn.DataParallel", "torch.nn.parallel"), ("DataParallel",),
                                    per_rank=False)),  # one process: its batch is the global one already
}
