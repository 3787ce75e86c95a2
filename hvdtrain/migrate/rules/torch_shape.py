"""What a PyTorch script does with its model and its data beside the loop that would mean something else afterwards.

Owns the refusals: keys of a wrapped model's state, attributes that only a wrapper has, data that were cut by rank.
Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import libcst as cst

from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.habits.names import is_rank
from hvdtrain.migrate.rules.torch_loop import Loop
from hvdtrain.migrate.scan import Scan, name_of

OF_WRAPPERS = ("module", "device_ids", "output_device", "no_sync", "join", "require_backward_grad_sync", "reducer",
               "process_group", "register_comm_hook")
"""Attributes of DataParallel and DistributedDataParallel that the model in them lacks."""
CUTS = ("range", "arange", "Subset", "shard", "islice", "array_split", "split", "chunk", "random_split",
        "split_dataset_by_node")
"""Calls that choose samples by a number."""


def check(scan: Scan, loop: Loop, wrappers: tuple[str, ...], models: set[str],
          left: Callable[[cst.CSTNode], bool]) -> None:
    """`Refused` at the first such place. ``left(node)``: whether a node will still be there."""
    for node in scan.all(cst.Attribute):
        word, owner = node.attr.value, name_of(node.value) or ""
        if word in OF_WRAPPERS and left(node) and (owner in models and word != "module" or word == "module" and (
                owner not in models and not scan.dotted(node))):
            raise Refused(scan.line(node), f"{scan.short(node)} is read, which a bare model does not have",
                          "the wrapper around the model is taken off", "take it out, then run migrate again")
    for call in scan.methods("load_state_dict", "state_dict"):
        assert isinstance(call.func, cst.Attribute)
        owner = name_of(call.func.value) or ""
        if owner in models and left(call) and _wrapped(scan, owner, wrappers, call):
            raise Refused(scan.line(call), f"{scan.short(call)} is of the model in its wrapper",
                          "its keys begin with module., and those of the bare model do not: files of before and "
                          "after would not fit each other",
                          f"write {owner}.module.{call.func.attr.value}(...), with files of such keys, then run "
                          "migrate again")
    for at in _cut_by_rank(scan):
        if left(scan.statement(at)):  # the rank itself may be a launcher's by now
            raise Refused(scan.line(at), f"the data are cut by rank by hand: {scan.short(scan.statement(at))}",
                          "Trainer cuts each global batch itself: it would train on a part of a part, another on "
                          "every rank", "use the code below, with the whole dataset")


def _wrapped(scan: Scan, name: str, wrappers: tuple[str, ...], at: cst.CSTNode) -> bool:
    """Whether a wrapper may be around what ``name`` stands for at ``at``: it is put there in an earlier line."""
    return any(scan.line(call) < scan.line(at) or scan.scope(call) is not scan.scope(at)
               for assign in scan.assigned(name) for call in scan.all(cst.Call, assign)
               if wrappers and scan.means(call.func, *wrappers))


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
