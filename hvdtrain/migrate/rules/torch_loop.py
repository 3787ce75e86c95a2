"""The standard training loop of PyTorch scripts: which statements it has, and that it has no others.

Owns the pattern ``for epoch: for batch in loader: zero_grad, forward, loss, backward, step`` with what may stand beside
it: moves to a device, ``model.train()``, ``set_epoch``, clipping, sums of losses and their printing. Reads only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.rules.torch_parts import is_move
from hvdtrain.migrate.scan import Scan, argument, name_of, starred

HARMLESS = ("item", "format", "len", "float", "int", "str", "sum", "round", "min", "max", "time", "perf_counter",
            "mean",
            "rank", "get_rank", "size", "get_world_size", "local_rank", "detach", "cpu", "flush", "get_last_lr",
            "avg")
"""Calls inside a printed text, or a sum of losses, that change nothing."""
NUMBERS = ("item", "float", "int", "len", "round", "time", "perf_counter", "tensor", "zeros")
"""Calls that return a number, or a tensor, that nothing else holds."""
PRINTS = re.compile(r"^(print|tqdm\.write|log(ger|ging)?\.(info|debug|warning)|\w+\.(print|set_postfix|set_description)"
                    r")$")
STANDARD = ("Trainer runs its own loop, and only a loop that does nothing else can be replaced by it",
            "use the code below, and move what else the loop does into the model, the dataset or a callback")


@dataclass
class Loop:
    """What a standard loop names. ``outer``: the loop over epochs. ``loss``: the call of it. ``output``, ``value``: the
    names that hold what the model, and the loss, returned. ``seen``: the steps met so far. ``logging``: statements that
    only keep books or print."""

    outer: cst.For
    inner: cst.For
    epochs: cst.BaseExpression
    loader: cst.BaseExpression
    batch: str = ""
    inputs: tuple[str, str] = ("", "")
    model: str = ""
    output: str = ""
    value: str = ""
    optimizer: str = ""
    loss: cst.Call | None = None
    clip: cst.BaseExpression | None = None
    seen: set[str] = field(default_factory=set)
    logging: list[cst.CSTNode] = field(default_factory=list)


def candidates(scan: Scan) -> list[tuple[cst.For, cst.For]]:
    """(outer, inner) loops of which the inner one runs backward."""
    found = []
    for call in scan.methods("backward"):
        loops = [up for up in scan.above(call) if isinstance(up, cst.For)]
        if len(loops) >= 2 and scan.scope(loops[0]) is scan.scope(loops[1]):
            found.append((loops[1], loops[0]))
    return found


def find(scan: Scan) -> Loop:
    """The one standard loop; `Refused`, with the line that stands against it."""
    found = candidates(scan)
    if len(found) != 1:
        calls = list(scan.methods("backward"))
        line = scan.line(calls[-1]) if calls else 1
        raise Refused(line, "there is no single loop over epochs with a loop over batches directly in it"
                      if len(found) == 0 else f"{len(found)} loops train", *STANDARD)
    outer, inner = found[0]
    around = next((up for up in scan.above(outer) if isinstance(up, (cst.With, cst.FunctionDef))), None)
    if isinstance(around, cst.With):
        raise Refused(scan.line(around), f"the loop runs inside 'with {scan.short(around.items[0])}'", *STANDARD)
    loop = Loop(outer, inner, _epochs(scan, outer), _unwrapped(scan, inner.iter, ("enumerate", "tqdm")))
    if outer.orelse is not None or inner.orelse is not None:
        raise Refused(scan.line(outer), "the loop has an else", *STANDARD)
    _targets(scan, loop)
    for statement in _body(scan, inner):
        _inner(scan, loop, statement)
    for what in ("zero_grad", "forward", "loss", "backward", "step"):
        if what not in loop.seen:
            raise Refused(scan.line(inner), f"the loop over batches has no {what} that can be read", *STANDARD)
    for statement in _body(scan, outer):
        if statement is not inner:
            _outer(scan, loop, statement)
    _books_are_not_read(scan, loop)
    _kept_inside(scan, loop)
    return loop


def _epochs(scan: Scan, outer: cst.For) -> cst.BaseExpression:
    """The number of epochs, from ``range(n)``."""
    call = _unwrapped(scan, outer.iter, ("tqdm",))
    name = name_of(call.func) if isinstance(call, cst.Call) else ""
    if isinstance(call, cst.Call) and name in ("range", "trange"):
        plain = [a.value for a in call.args if a.keyword is None]
        if len(plain) == 1 or len(plain) == 2 and scan.code(plain[0]) == "0":
            return plain[-1]
        if len(plain) == 2 and scan.code(plain[0]) == "1" and isinstance(plain[1],
                                                                         cst.BinaryOperation) and isinstance(
                plain[1].operator, cst.Add) and scan.code(plain[1].right) == "1":
            return plain[1].left  # range(1, epochs + 1)
    raise Refused(scan.line(outer), f"epochs run over {scan.short(outer.iter)}", *STANDARD)


def _unwrapped(scan: Scan, node: cst.BaseExpression, around: tuple[str, ...]) -> cst.BaseExpression:
    """``node`` without ``enumerate(...)`` and ``tqdm(...)`` around it."""
    while isinstance(node, cst.Call) and (name_of(node.func) or "").rpartition(".")[2] in around and node.args:
        node = node.args[0].value
    return node


def _targets(scan: Scan, loop: Loop) -> None:
    """Names of inputs and targets: ``x, y``, ``i, (x, y)``, or ``batch`` which a statement takes apart."""
    target: Any = loop.inner.target
    if isinstance(loop.inner.iter, cst.Call) and "enumerate(" in scan.code(loop.inner.iter):
        if not isinstance(target, cst.Tuple) or len(target.elements) != 2:
            raise Refused(scan.line(loop.inner), f"batches come as {scan.short(target)}", *STANDARD)
        target = target.elements[1].value
    loop.batch = name_of(target) or ""
    _take_apart(loop, target)


def _take_apart(loop: Loop, target: Any) -> bool:
    """Note two names of a tuple; whether they are that."""
    names = [name_of(e.value) for e in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else []
    if len(names) != 2 or not all(name and "." not in name for name in names):
        return False
    loop.inputs = (names[0] or "", names[1] or "")
    return True


def _body(scan: Scan, loop: cst.For) -> list[cst.CSTNode]:
    """Its statements; `Refused` for those that share a line."""
    if not isinstance(loop.body, cst.IndentedBlock):
        raise Refused(scan.line(loop), "the loop is written on one line", *STANDARD)
    for statement in loop.body.body:
        if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) > 1:
            raise Refused(scan.line(statement), "statements share a line", *STANDARD)
    return list(loop.body.body)


# --- statements ------------------------------------------------------------------------------------------------


def _inner(scan: Scan, loop: Loop, statement: cst.CSTNode) -> None:
    """Take note of one statement of the loop over batches."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    call = small.value if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call) else None
    if call is not None and _step(scan, loop, call):
        return
    if isinstance(small, cst.Assign) and len(small.targets) == 1 and (
            _moves(scan, loop, small) or _forward(scan, loop, small)):
        return
    if not is_logging(scan, statement):
        raise Refused(scan.line(statement), f"the loop over batches also does: {scan.short(statement)}", *STANDARD)
    loop.logging.append(statement)


def _step(scan: Scan, loop: Loop, call: cst.Call) -> bool:
    """``zero_grad``, ``backward``, clipping and ``step``."""
    if not isinstance(call.func, cst.Attribute):
        return False
    name, owner = call.func.attr.value, name_of(call.func.value) or ""
    if name in ("zero_grad", "step") and owner and (not loop.optimizer or owner == loop.optimizer):
        pending = "backward" in loop.seen and "step" not in loop.seen  # a gradient that is not applied yet
        if pending is (name == "zero_grad") or name == "step" and call.args:
            return False
        loop.optimizer = owner
        loop.seen.add(name)
        return True
    if name == "backward" and "loss" in loop.seen and "backward" not in loop.seen and (
            not call.args and owner == loop.value
            or len(call.args) == 1 and scan.code(call.args[0].value) == loop.value):
        loop.seen.add("backward")
        return True
    if name == "clip_grad_norm_" and "backward" in loop.seen and "step" not in loop.seen:
        largest, of = argument(call, "max_norm", 1), argument(call, "parameters", 0)
        whole = (f"{loop.model}.parameters()", f"{loop.model}.module.parameters()")
        if loop.clip is None and largest is not None and of is not None and len(call.args) == 2 and (
                scan.code(of.value) in whole):
            loop.clip = largest.value
            return True
    return False


def _moves(scan: Scan, loop: Loop, small: cst.Assign) -> bool:
    """``x = x.to(device)``, ``x, y = x.to(device), y.to(device)``, ``x, y = batch``."""
    target: Any = small.targets[0].target
    if isinstance(small.value, cst.Name) and small.value.value == loop.batch and loop.inputs == ("", ""):
        return _take_apart(loop, target)
    pairs = [(target, small.value)]
    if isinstance(target, cst.Tuple) and isinstance(small.value, cst.Tuple):
        if len(target.elements) != len(small.value.elements):
            return False
        pairs = [(t.value, v.value) for t, v in zip(target.elements, small.value.elements)]
    return all(isinstance(v, cst.Call) and isinstance(v.func, cst.Attribute) and is_move(scan, v)
               and name_of(v.func.value) == name_of(t) and name_of(t) in loop.inputs for t, v in pairs)


def _forward(scan: Scan, loop: Loop, small: cst.Assign) -> bool:
    """``out = model(x)`` and ``loss = criterion(out, y)``, or both in one."""
    target, value = name_of(small.targets[0].target), small.value
    if target is None or not isinstance(value, cst.Call) or starred(value) or "backward" in loop.seen:
        return False
    if "forward" not in loop.seen and _is_model_call(loop, value):
        loop.model, loop.output = name_of(value.func) or "", target
        loop.seen.add("forward")
        return True
    if len(value.args) != 2 or "loss" in loop.seen or any(a.keyword for a in value.args):
        return False
    output, targets = (a.value for a in value.args)
    if name_of(targets) != loop.inputs[1]:
        return False
    if isinstance(output, cst.Call) and "forward" not in loop.seen and _is_model_call(loop, output):
        loop.model = name_of(output.func) or ""
    elif "forward" not in loop.seen or name_of(output) != loop.output:
        return False
    loop.value, loop.loss = target, value
    loop.seen |= {"forward", "loss"}
    return True


def _is_model_call(loop: Loop, call: cst.Call) -> bool:
    return (len(call.args) == 1 and call.args[0].keyword is None and isinstance(call.func, cst.Name)
            and bool(loop.inputs[0]) and name_of(call.args[0].value) == loop.inputs[0])


def _outer(scan: Scan, loop: Loop, statement: cst.CSTNode) -> None:
    """Take note of one statement of the loop over epochs."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call) and isinstance(small.value.func,
                                                                                        cst.Attribute):
        name, owner = small.value.func.attr.value, name_of(small.value.func.value) or ""
        if name == "train" and owner == loop.model and not small.value.args:
            return
        if name == "set_epoch" and "sampler" in owner.lower():
            return
    if not is_logging(scan, statement):
        raise Refused(scan.line(statement), f"the loop over epochs also does: {scan.short(statement)}", *STANDARD)
    loop.logging.append(statement)


def is_logging(scan: Scan, node: cst.CSTNode) -> bool:
    """Whether a statement only sums losses or prints them."""
    if isinstance(node, cst.If):
        parts: list[cst.CSTNode] = [*node.body.body]
        if node.orelse is not None or not _harmless(scan, node.test):
            return False
        return all(is_logging(scan, part) for part in parts)
    if isinstance(node, cst.SimpleStatementLine):
        return all(is_logging(scan, part) for part in node.body)
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
        return bool(PRINTS.match(scan.code(node.value.func))) and all(_harmless(scan,
                                                                                a.value) for a in node.value.args)
    if isinstance(node, cst.AugAssign):  # in place: what the name stands for must be a number of its own
        return isinstance(node.target, cst.Name) and _is_number(scan, node.target.value) and _harmless(scan,
                                                                                                       node.value)
    if isinstance(node, cst.AnnAssign):
        return isinstance(node.target, cst.Name) and node.value is not None and _harmless(scan, node.value)
    if isinstance(node, cst.Assign):
        return all(isinstance(t.target, cst.Name) for t in node.targets) and _harmless(scan, node.value)
    return isinstance(node, cst.Pass)


def _is_number(scan: Scan, name: str) -> bool:
    """Whether all that a name is ever bound to are numbers of its own, not another name for a tensor."""
    for node in scan.all(cst.Name):
        if node.value != name or not scan.is_target(node):
            continue
        up = next((up for up in scan.above(node) if isinstance(up, (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.For,
                                                                    cst.CompFor, cst.With, cst.NamedExpr))), None)
        if isinstance(up, cst.AugAssign):
            continue
        value: Any = up.value if isinstance(up, (cst.Assign, cst.AnnAssign)) else None
        target = up.targets[0].target if isinstance(up, cst.Assign) else node
        if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
            value = next((v.value for t, v in zip(target.elements, value.elements) if t.value is node), None)
        if isinstance(value, cst.Call) and (name_of(value.func) or scan.code(value.func)).rpartition(".")[2] in NUMBERS:
            continue
        if not isinstance(value, (cst.Integer, cst.Float, cst.BinaryOperation)):
            return False
    return not any(param.name.value == name for param in scan.all(cst.Param))


def _harmless(scan: Scan, node: cst.BaseExpression) -> bool:
    """Whether an expression binds nothing and calls nothing but what reads a number."""
    if any(isinstance(inner, (cst.NamedExpr, cst.Await, cst.Yield, cst.Lambda)) for inner in scan.inner(node)):
        return False
    calls = [node] if isinstance(node, cst.Call) else []
    calls += [c for c in scan.all(cst.Call, node) if c is not node]
    return all((name_of(c.func) or scan.code(c.func)).rpartition(".")[2] in HARMLESS for c in calls)


def _books_are_not_read(scan: Scan, loop: Loop) -> None:
    """`Refused` where a statement that seemed to keep books binds what the training itself reads."""
    for statement in loop.logging:
        for name in sorted({n.value for n in scan.all(cst.Name, statement) if scan.is_target(n)}):
            for use in scan.uses(name):
                if scan.inside(use, loop.outer) and not any(scan.inside(use, other) for other in loop.logging):
                    raise Refused(scan.line(statement), f"the loop also does: {scan.short(statement)}, and reads "
                                  f"{name} in {scan.short(scan.statement(use), 40)}" if not isinstance(
                                      scan.statement(use), cst.For) else
                                  f"the loop also does: {scan.short(statement)}, and runs over {name}", *STANDARD)


def _kept_inside(scan: Scan, loop: Loop) -> None:
    """`Refused` where something that the loop binds is read behind it."""
    for name in sorted({n.value for n in scan.all(cst.Name, loop.outer) if scan.is_target(n)}):
        for use in scan.uses(name):
            if scan.inside(use, loop.outer):
                continue
            behind = scan.scope(use) is scan.scope(loop.outer) and scan.line(use) > scan.line(loop.outer)
            deeper = scan.reads_of(use, loop.outer)  # a function that reads it, whenever it is called
            if (behind or deeper) and name not in loop.inputs:
                raise Refused(scan.line(use), f"{name}, which the loop binds, is read behind it", *STANDARD)
