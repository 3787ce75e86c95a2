"""Scripts of Hugging Face Accelerate. Owns what is the Accelerator's own in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import libcst as cst

from hvdtrain.migrate.rules import Plan, torch_parts, torch_trainer
from hvdtrain.migrate.rules.torch_parts import Parts, code
from hvdtrain.migrate.scan import Scan, argument, is_true, name_of, text_of

TITLE = "a script of Accelerate"
TARGETS = ("trainer",)
IDLE = ("split_batches", "log_with", "project_dir", "project_config", "cpu", "device_placement", "rng_types")
PRECISION = {"no": "", "bf16": '"bf16"', "fp16": '"fp16"'}


def recognise(scan: Scan) -> bool:
    """Whether an Accelerator is made."""
    return any(True for _ in scan.calls("accelerate.Accelerator"))


def _more(scan: Scan, parts: Parts) -> str:
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


KIND = torch_trainer.Kind(("accelerate.Accelerator",), more=_more, handle="accelerate.Accelerator")


def plan(scan: Scan, wish: Any) -> Plan:
    """To Trainer, by hand; with the batch as ``split_batches`` means it."""
    split = any(is_true(argument(call, "split_batches")) for call in scan.calls("accelerate.Accelerator"))
    return torch_trainer.plan(scan, wish, replace(KIND, per_rank=not split))
