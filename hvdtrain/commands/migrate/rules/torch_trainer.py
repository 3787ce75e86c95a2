"""PyTorch scripts with a loop of their own to Trainer: what goes, what has to be decided, and the code that comes.

Owns findings and the snippet. A loop can do anything, so none is rewritten: its numbers are read (``torch_parts``), and
what cannot be read is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import libcst as cst

from hvdtrain.commands.migrate.names import is_rank
from hvdtrain.commands.migrate.rules import Plan, Wish, own, torch_parts
from hvdtrain.commands.migrate.rules.torch_parts import Parts
from hvdtrain.commands.migrate.scan import Scan, argument, name_of

CUTS = ("range", "arange", "Subset", "shard", "islice", "array_split", "split", "chunk", "random_split",
        "split_dataset_by_node")
"""Calls that choose samples by a number."""
HELD = "set accumulate to their number, and global_batch to the samples of all of them"
SPLITS = ("FullyShardedDataParallel", "fully_shard", "ZeroRedundancyOptimizer", "DistributedOptimizer", "Pipe")


@dataclass(frozen=True)
class Kind:
    """What is a kind's own. ``gone``: beginnings of the dotted names whose statements go. ``wrappers``: what is put
    around a model. ``per_rank``: whether a loader's batch is one process's. ``more(scan, parts)``: keys of its own,
    and how many passes an update has, as code. ``handle``: what makes the object whose methods go, too."""

    gone: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    per_rank: bool = True
    more: Callable[[Scan, Parts], str] = lambda scan, parts: "1"
    handle: str = ""


def plan(scan: Scan, wish: Wish, kind: Kind) -> Plan:
    """Findings and a snippet; no edit."""
    parts, made, loop = Parts(), Plan(), torch_parts.epochs_loop(scan)
    passes = kind.more(scan, parts)
    more, parts.keys = parts.keys, {"epochs": torch_parts.epochs(scan, loop)}
    torch_parts.loader(scan, parts, kind.per_rank, wish.ranks, passes)
    torch_parts.optimizer(scan, parts, wish.ranks)
    torch_parts.loss(scan, parts)
    torch_parts.schedule(scan, parts, wish.ranks)
    _step(scan, parts)
    _model(scan, parts, kind.wrappers)
    parts.keys |= more
    made.snippet = _snippet(scan, parts)
    at = loop or next(scan.methods("backward"), None) or scan.module
    made.tell(scan.line(at), "by hand", f"Trainer runs the loop over {scan.short(loop.iter)}" if loop else
              "no loop over epochs is seen that trains", "a loop can do anything: its numbers alone are read here",
              "put the code below in its place; what else the loop does goes into the data's test part, a callback, or "
              "a task(model, batch) -> (loss_sum, weight) in the model's file")
    if wish.ranks == 1 and (parts.scaled or "global_batch" in parts.said):
        both = "global_batch and lr are" if parts.scaled else "global_batch is"
        made.tell(scan.line(at), "by hand", f"{both} one process's in the code below",
                  "Trainer's are those of all ranks together, however many they are",
                  "run migrate with --ranks N, the number of processes of the old job")
    if gone := _gone(scan, kind, loop):
        made.tell(gone[0][0], "by hand", "these go: " + ", ".join(f"{what} (line {line})" for line, what in gone),
                  "Trainer starts the exchange, cuts each global batch, and puts the bare model on this rank's device",
                  "take them out, with .module and the like around the model; where a rank is read, take "
                  "launch_facts(os.environ).rank of hvdtrain.core.launcher")
    for word in parts.words:
        made.tell(scan.line(word.node), "by hand", word.what, word.why, word.do)
    return made


def _snippet(scan: Scan, parts: Parts) -> str:
    """``trainer = Trainer(Config(...))`` and its fit, a key a line."""
    names = own.Names(scan)
    lines = [f"    {key}={text}," + (f"  # {parts.said[key]}" if key in parts.said else "")
             for key, text in parts.keys.items()]
    text = "\n".join([f"{names.trainer} = Trainer(Config(", *lines, "))",
                      f"{names.trainer}.fit({parts.model}, {parts.data})"])
    for name in own.HOMES:
        text = text.replace(f"{name}(", f"{names[name]}(")
    return "\n".join([*names.imports(text), "", text])


def _gone(scan: Scan, kind: Kind, loop: cst.For | None) -> list[tuple[int, str]]:
    """(line, text) of the calls that go; of a handle's methods, those outside the loop."""
    handles = {name_of(node.targets[0].target) for node in scan.all(cst.Assign) if kind.handle
               and any(True for _ in scan.calls(kind.handle, within=node))}
    asked = ("rank", "get_rank", "size", "get_world_size", "local_rank", "local_size")
    return [(scan.line(call), scan.short(call.func)) for call in scan.all(cst.Call)
            if scan.dotted(call.func).startswith(kind.gone) and scan.dotted(call.func).rpartition(".")[2] not in asked
            or isinstance(call.func, cst.Attribute) and name_of(call.func.value) in handles
            and not (loop is not None and scan.inside(call, loop))]


# --- what a step is made of ------------------------------------------------------------------------------------


def _step(scan: Scan, parts: Parts) -> None:
    """Clipping, compute types, synchronised BatchNorm, and gradients of several passes."""
    clips = ("clip_grad_norm_", "clip_grad_norm")
    for call in dict.fromkeys([*scan.calls(*clips), *scan.methods(*clips)]):  # methods: an Accelerator's
        largest = argument(call, "max_norm", 1)
        if largest is not None:
            parts.keys["clip_norm"] = torch_parts.code(scan, largest.value)
    for call in scan.calls("clip_grad_value_"):
        parts.tell(call, f"gradients are clipped by value: {scan.short(call)}", "set clip_norm, the largest norm")
    if any(True for _ in scan.calls("convert_sync_batchnorm")):
        parts.keys["sync_batchnorm"] = "True"
    casts = [*scan.calls("autocast"), *scan.calls("GradScaler")]
    if casts:
        half = any("bfloat16" in scan.code(call) for call in casts)
        parts.keys["precision"] = '"bf16"' if half else '"fp16"'
    if any(isinstance(up, (cst.If, cst.IfExp)) for call in casts for up in scan.above(call)) or any(
            argument(call, "enabled") for call in casts):
        parts.keys["precision"] = "..."
        parts.tell(casts[0], f"{scan.short(casts[0])} rules the compute type",
                   'write precision="fp32", "bf16" or "fp16"', "which is meant is only known at run time")
    for call in scan.methods("step"):
        under = next((up for up in scan.above(call) if isinstance(up, cst.If)), None)
        if under is not None and _counts_batches(scan, under):
            parts.tell(under, f"{scan.short(call)} waits for several passes: if {scan.short(under.test)}", HELD)
            break
    for call in scan.methods("no_sync"):
        parts.tell(call, f"{scan.short(call)} holds gradients back over several passes", HELD)


def _counts_batches(scan: Scan, under: cst.If) -> bool:
    """Whether an update is made at every n-th batch: under a remainder, in a loop that goes backward outside of it."""
    if not any(scan.all(cst.Modulo, under.test)) or not any(scan.methods("zero_grad", within=under)):
        return False
    batches = next((up for up in scan.above(under) if isinstance(up, (cst.For, cst.While))), None)
    return batches is not None and any(
        next((up for up in scan.above(call) if isinstance(up, (cst.For, cst.While))), None) is batches
        for call in scan.methods("backward", within=batches) if not scan.inside(call, under))


def _model(scan: Scan, parts: Parts, wrappers: tuple[str, ...]) -> None:
    """What means something else of a bare model, or of a whole dataset."""
    wrapped = {name_of(t.target) for node in scan.all(cst.Assign) for t in node.targets
               if any(True for _ in scan.calls(*wrappers, within=node))} if wrappers else set()
    for call in scan.methods("load_state_dict", "state_dict"):
        assert isinstance(call.func, cst.Attribute)
        if name_of(call.func.value) in wrapped:
            parts.tell(call, f"{scan.short(call)} is of the model in its wrapper", "strip module. from the "
                       "names of such files before you load them", "a bare model's names do not begin with module.")
    for call in scan.calls(*SPLITS):
        if scan.dotted(call.func).startswith(("torch.", "accelerate.")):
            parts.tell(call, f"{scan.short(call.func)} cuts the model or its state over the ranks", "stay, where one "
                       "device cannot hold it; model_parallel splits over the devices of a rank",
                       "hvdtrain's ranks hold whole models and add their gradients")
    for node in _cut_by_rank(scan):
        parts.tell(node, f"the data are cut by rank by hand: {scan.short(scan.statement(node))}",
                   "give fit the whole dataset", "Trainer cuts each global batch itself: it would train on a part of a "
                   "part")


def _cut_by_rank(scan: Scan) -> Iterator[cst.CSTNode]:
    """Ranks inside an index or a slice, or handed to what chooses samples."""
    for node in scan.nodes:
        if not (isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) and is_rank(scan, node)):
            continue
        if isinstance(node, cst.Name) and (scan.is_target(node) or node not in scan.uses(node.value)):
            continue
        inner: cst.CSTNode = node
        for up in scan.above(node):
            if isinstance(up, cst.Subscript) and inner is not up.value:
                text = scan.code(up.value).lower()
                if not any(word in text for word in ("device", "gpu", "environ")):
                    yield node
                break
            called = (name_of(up.func) or scan.code(up.func)).rpartition(".")[2] if isinstance(up, cst.Call) else ""
            if isinstance(up, cst.Call) and inner is not up.func and called in CUTS:
                yield node
                break
            if isinstance(up, (cst.BaseStatement, cst.BaseSmallStatement)):
                break
            inner = up
