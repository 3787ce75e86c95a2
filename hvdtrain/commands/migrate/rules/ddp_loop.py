"""Order of backward, gradient clipping and step in the loop of a DDP script.

DDP averages gradients during backward; ``hvd.DistributedOptimizer`` has them when ``synchronize`` or ``step`` returns.
Reports loops whose passes and steps are not one to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from hvdtrain.commands.migrate.edit import below, inside, statement
from hvdtrain.commands.migrate.finding import Refused, Rewrite
from hvdtrain.commands.migrate.scan import Scan, name_of

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
PASSES = ("DDP adds up averaged gradients of several passes; hvd.DistributedOptimizer averages once per step",
          "call step once after each backward, in the same block; or, after the diff, give hvd.DistributedOptimizer "
          "backward_passes_per_step=N")


@dataclass
class DdpModel:
    """``target``: the text that the wrapper is assigned to; ``inner``: what it wraps; ``line``: where.

    ``optimizer``: the text of the optimizer. ``whole``: it has all parameters of the model.
    """

    target: str
    inner: str
    line: int
    optimizer: str = ""
    whole: bool = True

    def of(self, text: str) -> bool:
        """Return whether ``text`` is the model: by its name, also as an attribute or a parameter."""
        names = {self.target.rpartition(".")[2], self.inner.rpartition(".")[2]}
        return bool(text) and (text in (self.target, self.inner) or text.rpartition(".")[2] in names)


def last_part(node: cst.CSTNode | None) -> str:
    """Return ``c`` of ``a.b.c``; "" for anything but names."""
    return (name_of(node) or "").rpartition(".")[2]


def rewrite(scan: Scan, made: Rewrite, model: DdpModel) -> None:
    """Plan ``synchronize`` above the first use of gradients between backward and step, in every block that has both."""
    calls = list(scan.methods("backward"))
    if not calls:
        raise Refused(model.line, "backward is not called in this file", "the order of backward and step is not "
                      "visible", "run migrate on the file of the loop as well, and check its clipping by hand")
    blocks: list[cst.CSTNode] = []
    for call in calls:
        line = scan.statement(call)
        block = scan.parent[line]
        again = sum(scan.inside(other, block) for other in calls) > 1
        if again or not isinstance(line, cst.SimpleStatementLine) or not isinstance(block, cst.IndentedBlock):
            raise Refused(scan.line(call), f"{scan.short(call)} is not the one backward of its block", *PASSES)
        _block(scan, made, model, line, block.body)
        blocks.append(block)
    reads = [node for node in scan.all(cst.Attribute) if node.attr.value == "grad" and not scan.dotted(node)]
    for node in (*scan.calls(*CLIPS), *reads):
        if not any(scan.inside(node, block) for block in blocks):
            made.tell(scan.line(node), "by hand", f"{scan.short(node)} uses gradients outside of the loop's block",
                      "between backward and step they are this rank's own until optimizer.synchronize()",
                      "move it between backward and step, then run migrate again")


def _block(scan: Scan, made: Rewrite, model: DdpModel, backward: cst.SimpleStatementLine,
           body: Sequence[cst.BaseStatement]) -> None:
    rest = body[[line is backward for line in body].index(True) + 1:]
    steps = [(line, found) for line in rest if isinstance(line, cst.SimpleStatementLine)
             and (found := _stepped(scan, line, model)) is not None]
    if len(steps) != 1 or len(steps[0][0].body) > 1 or len(backward.body) > 1:
        raise Refused(scan.line(backward), f"{scan.short(backward)} has no {model.optimizer}.step() of its own in its "
                      "block", *PASSES)
    step, (optimizer, scaled) = steps[0]
    between = rest[:[line is step for line in rest].index(True)]
    if any(_leaves(scan, line) for line in between):
        raise Refused(scan.line(backward), f"the loop may leave the block between {scan.short(backward)} and "
                      f"{scan.short(step)}", *PASSES)
    used = [line for line in between if _uses_gradients(scan, line, model)]
    if any(True for line in between for _ in scan.calls(*CLIPS, within=line)) and not model.whole:
        raise Refused(scan.line(used[0]), "gradients are clipped, and the optimizer has only parts of the model",
                      "gradients of the other parts are not averaged", "make one group of all parameters, or clip "
                      "those of the optimizer, then run migrate again")
    if not used and not scaled:
        return
    made.edits.put(step, lambda old: inside(old, f"with {optimizer}.skip_synchronize():"))
    made.edits.put(used[0] if used else step, below(statement(f"{optimizer}.synchronize()")))
    made.tell(scan.line(used[0] if used else step), "changed", f"{optimizer}.synchronize() comes before the first use "
              "of gradients", "until then they are this rank's own; step does not exchange them a second time",
              "nothing, the diff does")


def _stepped(scan: Scan, line: cst.CSTNode, model: DdpModel) -> tuple[str, bool] | None:
    """Return (the optimizer's text, whether a GradScaler steps it) of a line that steps the optimizer; else None."""
    name = last_part(cst.parse_expression(model.optimizer))
    for call in scan.methods("step", within=line):
        assert isinstance(call.func, cst.Attribute)
        if last_part(call.func.value) == name and not call.args:
            return scan.code(call.func.value), False
        if len(call.args) == 1 and last_part(call.args[0].value) == name:
            return scan.code(call.args[0].value), True
    return None


def _leaves(scan: Scan, line: cst.CSTNode) -> bool:
    """Return whether a statement has a return, or a continue or break of a loop around it."""
    for node in scan.inner(line):
        own = isinstance(node, (cst.Return, cst.Continue, cst.Break)) and any(
            up in scan.inner(line) for up in scan.above(node) if isinstance(up, cst.FunctionDef) or not isinstance(
                node, cst.Return) and isinstance(up, (cst.For, cst.While)))
        if isinstance(node, (cst.Return, cst.Continue, cst.Break)) and not own:
            return True
    return False


def _uses_gradients(scan: Scan, line: cst.CSTNode, model: DdpModel) -> bool:
    """Return whether a statement may read or change gradients: it names model, optimizer, gradients or clipping."""
    optimizer = model.optimizer.rpartition(".")[2]
    names = {node.value for node in scan.inner(line) if isinstance(node, cst.Name)}
    return any(name == optimizer or model.of(name) or "grad" in name.lower() or "clip" in name.lower()
               or "unscale" in name for name in names)
