"""Plain Keras: ``compile`` and ``fit`` on one device. Owns where ``hvd.init()`` goes; the rest is ``keras_hvd``'s."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.commands.migrate.edit import statement
from hvdtrain.commands.migrate.rules import Plan, keras2, keras_hvd, keras_trainer
from hvdtrain.commands.migrate.rules.keras_calls import compiles, fits
from hvdtrain.commands.migrate.scan import Scan

TITLE = "a script of Keras on one device"
TARGETS = ("hvdtrain.keras", "trainer")


snippet = keras_trainer.snippet


def recognise(scan: Scan) -> bool:
    """Whether Keras is imported and a model fitted, or trained by a tape."""
    return scan.imports_any("keras",
                            "tensorflow") and (bool(fits(scan)) or any(True for _ in scan.calls("GradientTape")))


def plan(scan: Scan, wish: Any) -> Plan:
    """The rewrite; only findings for a loop of the user's own."""
    made = Plan()
    found = fits(scan)
    if not found:
        tape = next(scan.calls("GradientTape"))
        made.tell(scan.line(tape), "by hand", "the model is trained by a loop of its own, with a GradientTape",
                  "where its batches come from and what its loss is divided by cannot be read here",
                  "import hvdtrain.tensorflow as hvd; hvd.init(); tape = hvd.DistributedGradientTape(tape); "
                  "hvd.broadcast_variables(model.variables, root_rank=0) after the first step; "
                  "x[hvd.rank()::hvd.size()]")
        return made
    if wish.target == "trainer":
        keras_trainer.rewrite(scan, made)
        keras2.rewrite(scan, made)
        return made
    _begin(scan, made, keras_hvd.rewrite(scan, made))
    keras2.rewrite(scan, made)
    made.tell(scan.line(found[0]), "note", "one process trained this model; now every rank runs the whole script",
              "ranks are processes, one for each GPU", keras_hvd.START)
    return made


def _begin(scan: Scan, made: Plan, texts: list[str]) -> None:
    """Put them first in ``if __name__ == "__main__":`` where fit is in a function; else behind the imports."""
    calls = [*compiles(scan), *fits(scan)]
    at_top = any(isinstance(scan.scope(call), cst.Module) for call in calls)
    guards = [node for node in scan.module.body if isinstance(node, cst.If) and "__name__" in scan.code(node.test)]
    inside = bool(guards) and all(scan.inside(call, guards[0]) for call in calls)
    if guards and (inside or not at_top) and isinstance(guards[0].body, cst.IndentedBlock):
        made.edits.put(guards[0].body, lambda new: new.with_changes(
            body=[*(statement(text) for text in texts), *new.body]))
    else:
        made.edits.first += texts
