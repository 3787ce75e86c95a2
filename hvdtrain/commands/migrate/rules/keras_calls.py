"""Keras' ``compile`` and ``fit`` in a script: which calls they are, and what is given to them.

Owns finding and reading. Rewrites nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from hvdtrain.commands.migrate.finding import Refused
from hvdtrain.commands.migrate.scan import Scan, argument, is_false, is_true, name_of, starred

FIT = ("x", "y", "batch_size", "epochs", "verbose", "callbacks", "validation_split", "validation_data", "shuffle",
       "class_weight", "sample_weight", "initial_epoch", "steps_per_epoch", "validation_steps",
       "validation_batch_size",
       "validation_freq")
"""Parameters of Keras 3's ``Model.fit`` in their order."""
COMPILE = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly", "steps_per_execution",
           "jit_compile", "auto_scale_loss")
DATASET = ("a tf.data.Dataset that is more than from_tensor_slices, shuffle, batch, cache and prefetch",
           "every rank has to get its own part of each global batch, in as many steps as the others, and what "
           "maps and filters do to that cannot be read here",
           "hand arrays to hvd.shard(x, y, global_batch=...) for hvdtrain.keras; Trainer takes the dataset as it is "
           "(its shuffle needs a seed)")


@dataclass(frozen=True)
class Chain:
    """``Dataset.from_tensor_slices((x, y)).shuffle(n).batch(b)``: whether it is shuffled, with a seed of its own, and
    drops a short last batch."""

    shuffled: bool
    seeded: bool
    drops: bool


def compiles(scan: Scan) -> list[cst.Call]:
    """Calls of a Keras model's ``compile``, not of a module's (``re.compile``)."""
    fitted = {scan.code(call.func.value) for call in scan.methods("fit") if isinstance(call.func, cst.Attribute)}
    return [call for call in scan.methods("compile") if isinstance(call.func, cst.Attribute)
            and not scan.dotted(call.func) and (
                len(call.args) != 1 or scan.code(call.func.value) in fitted
                or any(a.keyword is not None and a.keyword.value in COMPILE for a in call.args)
                or isinstance(call.args[0].value, cst.SimpleString))]


def models(scan: Scan) -> set[str]:
    """Texts that stand for a compiled model: ``model``, ``self.net``, and names made by functions that compile one."""
    assert isinstance(scan, Scan)
    found: set[str] = set()
    makers: set[str] = set()
    for call in compiles(scan):
        assert isinstance(call.func, cst.Attribute)
        owner = scan.code(call.func.value)
        found.add(owner)
        scope = scan.scope(call)
        if isinstance(scope, cst.FunctionDef) and any(
                r.value is not None and scan.code(r.value) == owner for r in scan.all(cst.Return, scope)):
            makers.add(scope.name.value)
    for node in scan.all(cst.Assign):
        if isinstance(node.value, cst.Call) and name_of(node.value.func) in makers and len(node.targets) == 1:
            found.add(scan.code(node.targets[0].target))
    return found


def fits(scan: Scan) -> list[cst.Call]:
    """Calls of a compiled model's ``fit``."""
    known = models(scan)
    return [call for call in scan.methods("fit")
            if isinstance(call.func, cst.Attribute) and scan.code(call.func.value) in known]


def given(scan: Scan, call: cst.Call, order: tuple[str, ...]) -> dict[str, int]:
    """Index of each given argument by its parameter's name; `Refused` for ``*args`` and ``**kwargs``."""
    if starred(call):
        raise Refused(scan.line(call), f"{scan.short(call.func)} gets *args or **kwargs",
                      "what is in them cannot be read here", "write the arguments out, then run migrate again")
    return {arg.keyword.value if arg.keyword is not None else order[index]: index
            for index, arg in enumerate(call.args)}


def chain(scan: Scan, node: cst.BaseExpression) -> Chain | None:
    """``node`` as a `Chain`; None where it is anything else."""
    links: list[tuple[str, cst.Call]] = []
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and not scan.means(
            node.func, "from_tensor_slices"):
        links.insert(0, (node.func.attr.value, node))
        node = node.func.value
    if not isinstance(node, cst.Call) or not scan.means(node.func, "from_tensor_slices"):
        return None
    names = [name for name, _ in links]
    tensors = argument(node, "tensors", 0)
    if (names.count("batch") != 1 or names.count("shuffle") > 1 or set(names) - {"shuffle", "batch", "prefetch",
                                                                                 "cache"}
            or tensors is None or "shuffle" in names and names.index("shuffle") > names.index("batch")
            or not isinstance(tensors.value, cst.Tuple) or not 2 <= len(tensors.value.elements) <= 3):
        return None
    nested = any(isinstance(element.value, (cst.Tuple, cst.Dict, cst.List)) for element in tensors.value.elements)
    calls = dict(links)
    shuffle = calls.get("shuffle")
    if argument(calls["batch"], "batch_size", 0) is None or nested or (
            shuffle is not None and is_false(argument(shuffle, "reshuffle_each_iteration", 2))):
        return None
    return Chain(shuffle is not None, shuffle is not None and argument(shuffle, "seed", 1) is not None,
                 is_true(argument(calls["batch"], "drop_remainder", 1)))


def saves(scan: Scan) -> list[cst.Call]:
    """Calls that write a compiled model to a file."""
    known = models(scan)
    return [call for call in scan.methods("save", "save_weights", "export")
            if isinstance(call.func, cst.Attribute) and scan.code(call.func.value) in known]


def is_generator(scan: Scan, node: cst.BaseExpression) -> bool:
    """Whether an expression is, or calls, a generator of this file."""
    value = scan.value(node)
    if isinstance(value, cst.GeneratorExp):
        return True
    name = name_of(value.func) if isinstance(value, cst.Call) else None
    return any(f.name.value == name and any(True for _ in scan.all(cst.Yield, f)) for f in scan.all(cst.FunctionDef))


def sole(scan: Scan, node: cst.CSTNode) -> cst.SimpleStatementLine:
    """The line of which ``node`` is (in) the only statement; `Refused` where there are others on it."""
    line = scan.statement(node)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        raise Refused(scan.line(node), f"{scan.short(node)} shares its line with other statements",
                      "one of them cannot be moved alone", "put it on a line of its own, then run migrate again")
    return line
