"""The habit of a learning rate that is multiplied by the number of processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate import names
from hvdtrain.commands.migrate.finding import Finding
from hvdtrain.commands.migrate.scan import Scan, name_of

WORDS = re.compile(r"(^|_)(lr|learning_rate|rate)(_?\d+|_scaler?)?$|^lr_", re.IGNORECASE)


def rate_times_size(scan: Scan, context: Any) -> Iterator[Finding]:
    """``lr * size``: right for equal batches that grow with the ranks, and for nothing else."""
    for node in scan.all(cst.BinaryOperation):
        if not isinstance(node.operator, cst.Multiply) or not any(
                names.is_size(scan, side) or isinstance(side, cst.Name) and names.sized(scan, side)
                for side in (node.left, node.right)):
            continue
        if _is_rate(scan, node):
            yield Finding(scan.line(node), "unsafe", f"the learning rate is {scan.short(node)}", *_advice(context))
    for grown in scan.all(cst.AugAssign):
        if isinstance(grown.operator, cst.MultiplyAssign) and _word(grown.target) and any(
                names.is_size(scan, n) for n in scan.inner(grown.value) if isinstance(n, cst.BaseExpression)):
            yield Finding(scan.line(grown), "unsafe", f"the learning rate is grown by {scan.short(grown)}",
                          *_advice(context))


def _advice(context: Any) -> tuple[str, str]:
    if context.target == "trainer":
        return ("Trainer keeps the global batch, whatever the number of ranks, so the rate must not grow with them",
                "give the rate of the global batch (Schedule(linear_scaling_base=...) scales it by the batch, "
                "if it is to be scaled)")
    return ("it fits where the global batch grows with the ranks in equal parts; with unequal parts, or a "
            "global batch that stays, the rate is too large (hvdtrain.keras keeps Horovod's meaning of the "
            "mean)",
            "keep it only if each rank's batch is the same and does not depend on the number of ranks")


def _is_rate(scan: Scan, node: cst.BinaryOperation) -> bool:
    """Whether the product is called a rate, where it is made or by one of its factors."""
    for up in scan.above(node):
        if isinstance(up, cst.Arg):
            call = scan.parent[up]
            optimizer = isinstance(call, cst.Call) and ("optim" in scan.dotted(call.func).lower())
            first = isinstance(call, cst.Call) and call.args and call.args[0] is up
            return bool(WORDS.search(up.keyword.value)) if up.keyword is not None else bool(
                optimizer and first) or _factor(node)
        if isinstance(up, (cst.Assign, cst.AnnAssign)):
            targets = [t.target for t in up.targets] if isinstance(up, cst.Assign) else [up.target]
            return any(_word(t) for t in targets) or _factor(node)
        if isinstance(up, cst.BaseStatement):
            break
    return _factor(node)


def _factor(node: cst.BinaryOperation) -> bool:
    return _word(node.left) or _word(node.right)


def _word(node: cst.CSTNode) -> bool:
    """Whether a name is one of rates."""
    return bool(WORDS.search((name_of(node) or "").rpartition(".")[2]))


HABITS = (rate_times_size,)
