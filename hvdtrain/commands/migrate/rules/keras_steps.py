"""Rewrite ``train_step`` and ``test_step`` of a script's own models for batches of `hvd.shard`, which have weights.

Owns ``x, y = data`` and the calls that take the weights. How a step takes its batch is `hvdtrain.keras.own_steps`'.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hvdtrain.commands.migrate.edit import arg, in_a_row, with_args
from hvdtrain.commands.migrate.finding import Refused
from hvdtrain.commands.migrate.rules import Plan
from hvdtrain.commands.migrate.scan import Scan, argument, name_of, starred
from hvdtrain.keras.own_steps import STEPS, UNPACK, taken

WEIGHT = "sample_weight"
TAKERS = {"compute_loss": 3, "compiled_loss": 2, "compute_metrics": 3}
"""Methods of a Keras model that take the weights, and how many arguments come before those."""
WHY = ("hvd.shard gives x, y and sample_weight, whose scaling makes the mean over ranks that of the global batch: "
       "without it ranks with unequal shares train on a wrong mean")
DO = (f"write x, y, {WEIGHT} = keras.utils.{UNPACK}(data), and take the loss by "
      f"self.compute_loss(x, y, y_pred, {WEIGHT})")


def methods(scan: Scan, *names: str) -> Iterator[cst.FunctionDef]:
    """Yield the methods of these names that classes of a script with a base define, such as models."""
    return (node for node in scan.all(cst.FunctionDef) if node.name.value in names
            and isinstance(owner := scan.parent.get(scan.parent[node]), cst.ClassDef) and owner.bases)


def rewrite(scan: Scan, made: Plan) -> None:
    """Plan the weights of every step; `Refused` where a step does not leave its loss to Keras."""
    for step in methods(scan, *STEPS):
        how = taken(cst.Module([]).code_for_node(step))
        if how in ("pairs", "unweighted"):
            _weigh(scan, made, step)


def _weigh(scan: Scan, made: Plan, step: cst.FunctionDef) -> None:
    """Plan ``x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)``, and the weights of the calls."""
    name, data = step.name.value, step.params.params[1].name.value
    pairs = [node for node in scan.all(cst.Assign, step) if name_of(node.value) == data
             and isinstance(node.targets[0].target, cst.Tuple) and len(node.targets[0].target.elements) == 2]
    takers = [call for call in scan.methods(*TAKERS, within=step) if isinstance(call.func, cst.Attribute)
              and name_of(call.func.value) == step.params.params[0].name.value]
    losses = [call for call in takers if not (name_of(call.func) or "").endswith("_metrics")]
    own = {node.value for node in scan.all(cst.Name, step)}
    if len(pairs) != 1 or not losses or WEIGHT in own or any(starred(call) for call in takers):
        raise Refused(scan.line(step), f"{name} of a model of your own takes no sample weights", WHY, DO)
    made.edits.swap(pairs[0].value, f"{_keras(scan, made)}.utils.{UNPACK}({data})")
    made.edits.put(pairs[0].targets[0].target, lambda new: new.with_changes(
        elements=in_a_row([*new.elements, cst.Element(cst.Name(WEIGHT))])))
    for call in takers:
        assert isinstance(call.func, cst.Attribute)
        if argument(call, WEIGHT, TAKERS[call.func.attr.value]) is None:
            made.edits.put(call, lambda new: with_args(new, [*new.args, arg(WEIGHT, WEIGHT)]))
    made.tell(scan.line(pairs[0]), "changed", f"{name} takes the sample weights and gives them to the loss", WHY,
              "look at the diff: what else the step computes as a mean over the batch needs the weights, too")


def _keras(scan: Scan, made: Plan) -> str:
    """Code of the module keras, imported where the script has it under no name."""
    for name, means in scan.imports.items():
        if means in ("keras", "tensorflow.keras"):
            return name
    tf = next((name for name, means in scan.imports.items() if means == "tensorflow"), "")
    if tf:
        return f"{tf}.keras"
    made.edits.imports.append("import keras")
    return "keras"
