"""Whether every model that a Keras script trains is one whose ``compile`` the rewrite sees.

Owns the refusals: models that come from files, ``fit`` by another name or of something unknown. Reads only.
"""

from __future__ import annotations

import libcst as cst

from hvdtrain.commands.migrate.finding import Refused
from hvdtrain.commands.migrate.rules.keras_calls import compiles, fits, models
from hvdtrain.commands.migrate.scan import Scan, name_of

WHY = "a model that is trained without the distributed optimizer becomes another on every rank"


def check(scan: Scan) -> None:
    """`Refused` at the first model that may be trained with an optimizer that was not wrapped."""
    known = models(scan)
    fitted = {scan.code(call.func.value) for call in fits(scan) if isinstance(call.func, cst.Attribute)}
    for load in _loads(scan):
        up = scan.parent[load]
        owner = scan.code(up.targets[0].target) if isinstance(up, cst.Assign) else ""
        if owner in fitted and not _compiled_behind(scan, owner, load):
            raise Refused(scan.line(load), f"{owner} can come from a file: {scan.short(load)}",
                          "it brings the plain optimizer that it was saved with; " + WHY,
                          f"load it by hvd.load_model of hvdtrain.keras, or compile {owner} anew right behind")
    for node in scan.all(cst.Attribute):
        word, owner, up = node.attr.value, scan.code(node.value), scan.parent[node]
        called = isinstance(up, cst.Call) and up.func is node
        if owner in known and word in ("train_on_batch", "fit_generator", "train_step") or (
                owner in known and word == "fit" and not called):
            raise Refused(scan.line(node), f"{scan.short(scan.statement(node))} trains beside fit",
                          "which part of the data is whose cannot be read there", "call fit itself there")
        if word == "fit" and called and owner not in known and _unknown(scan, node.value):
            raise Refused(scan.line(node), f"{scan.short(node)} is called, of something that no compile is seen of",
                          "if it is a model of Keras: " + WHY,
                          "write model.compile(...) and model.fit(...) of one name, then run migrate again")


def _loads(scan: Scan) -> list[cst.Call]:
    """Calls of load_model, and of functions of this file that return what it gives."""
    loads = [call for call in scan.all(cst.Call) if (name_of(call.func) or "").rpartition(".")[2] == "load_model"]
    makers = {scope.name.value for call in loads for scope in [scan.scope(call)] if isinstance(scope, cst.FunctionDef)
              and any(True for _ in scan.all(cst.Return, scope))}
    return loads + [call for call in scan.all(cst.Call) if name_of(call.func) in makers]


def _compiled_behind(scan: Scan, owner: str, load: cst.Call) -> bool:
    """Whether every way from ``load`` comes by a compile of the model: one in its block, or in one around it."""
    blocks = [up for up in scan.above(load) if isinstance(up, (cst.IndentedBlock, cst.Module))]
    return any(isinstance(call.func, cst.Attribute) and scan.code(call.func.value) == owner
               and scan.line(call) > scan.line(load) and scan.parent[scan.statement(call)] in blocks
               for call in compiles(scan))


def _unknown(scan: Scan, owner: cst.BaseExpression) -> bool:
    """Whether an object may be a model of Keras: it is not made by another package."""
    value = scan.value(owner)
    dotted = scan.dotted(value.func) if isinstance(value, cst.Call) else scan.dotted(value)
    return not dotted or dotted.startswith(("keras.", "tensorflow.", "tf_keras."))
