"""Scripts of Hugging Face Accelerate. Owns what is the Accelerator's own in them."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.rules import Plan, torch_edit, torch_loop, torch_snippet
from hvdtrain.migrate.scan import Scan, argument, is_true, name_of, text_of

TITLE = "a script of Accelerate"
TARGETS = ("trainer",)
ROOTS = ("is_main_process", "is_local_main_process")


def recognise(scan: Scan) -> bool:
    """Whether an Accelerator is made."""
    return any(True for _ in scan.calls("accelerate.Accelerator"))


def _name(scan: Scan) -> str:
    """The name that holds the Accelerator."""
    for call in scan.calls("accelerate.Accelerator"):
        up = scan.parent[call]
        if isinstance(up, cst.Assign) and len(up.targets) == 1:
            return name_of(up.targets[0].target) or ""
    return ""


def goes(scan: Scan, small: cst.CSTNode) -> bool:
    """Its making, ``prepare`` and ``wait_for_everyone``."""
    value = small.value if isinstance(small, (cst.Expr, cst.Assign)) else None
    if not isinstance(value, cst.Call):
        return False
    if scan.means(value.func, "accelerate.Accelerator"):
        return True
    name = _name(scan)
    return name_of(value.func) in (f"{name}.prepare", f"{name}.wait_for_everyone", f"{name}.end_training")


def root(scan: Scan, node: cst.CSTNode) -> bool:
    """``accelerator.is_main_process``."""
    name = _name(scan)
    return bool(name) and name_of(node) in [f"{name}.{word}" for word in ROOTS]


def keys(scan: Scan) -> dict[str, str]:
    """Config's precision for its mixed_precision."""
    for call in scan.calls("accelerate.Accelerator"):
        mixed = argument(call, "mixed_precision")
        if mixed is not None and text_of(mixed.value) in ("bf16", "fp16"):
            return {"precision": f'"{text_of(mixed.value)}"'}
    return {}


def _kind(scan: Scan) -> torch_edit.Kind:
    """With the batch as ``split_batches`` means it; `Refused` for options that change what a step is."""
    split = False
    for call in scan.calls("accelerate.Accelerator"):
        split = is_true(argument(call, "split_batches"))
        for arg in call.args:
            word = arg.keyword.value if arg.keyword is not None else ""
            fine = word in ("split_batches", "log_with", "project_dir", "cpu", "device_placement") or (
                word == "mixed_precision" and text_of(arg.value) in ("no", "bf16", "fp16")) or (
                word == "gradient_accumulation_steps" and scan.code(arg.value) == "1")
            if not fine:
                raise Refused(scan.line(arg), f"the Accelerator has {scan.short(arg)}",
                              "it changes what a step is made of",
                              "set accumulate (and global_batch to that of all its passes), or another key of "
                              "Config, in the code below")
    return torch_edit.Kind(("accelerate",), goes, (), not split, keys, root, ("unwrap_model",), _name)


def _only_the_loops(scan: Scan, name: str) -> None:
    """`Refused` where something is prepared that is read apart from the training loop, such as a loader of tests:
    prepared, it puts batches on the device and cuts them over the ranks."""
    loops = [outer for outer, _ in torch_loop.candidates(scan)]
    for call in scan.methods("prepare"):
        assert isinstance(call.func, cst.Attribute)
        if name_of(call.func.value) != name:
            continue
        for arg in call.args:
            made = scan.binders(arg.value.value, call) if isinstance(arg.value, cst.Name) else []
            loader = any(scan.means(c.func, "DataLoader") for one in made
                         for c in scan.all(cst.Call, scan.statement(one)))
            for use in scan.uses(arg.value.value) if loader and isinstance(arg.value, cst.Name) else ():
                if not scan.inside(use, call) and not any(scan.inside(use, loop) for loop in loops):
                    raise Refused(scan.line(use), f"{use.value} is prepared, and read apart from the training loop",
                                  "prepare puts its batches on the device and cuts them over the ranks",
                                  "give Trainer (train, test) for its test metrics, or evaluate on rank 0 by hand")


def plan(scan: Scan, wish: Any) -> Plan:
    """To Trainer where the loop is the standard one."""
    try:
        kind = _kind(scan)
        name = _name(scan)
        if not name:
            raise Refused(scan.line(next(scan.calls("accelerate.Accelerator"))),
                          "the Accelerator is not kept by a name",
                          "what it is used for cannot be read here", "use the code below")
        _only_the_loops(scan, name)
    except Refused as refused:
        return Plan(findings=[refused.finding], snippet=torch_snippet.guess(scan, True, wish.ranks, keys(scan)))
    return torch_edit.plan(scan, wish, kind)
