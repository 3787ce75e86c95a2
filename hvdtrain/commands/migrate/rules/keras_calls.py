"""Keras' ``compile``, ``fit`` and steps in a script: finds and reads them, and refuses models it cannot follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from hvdtrain.commands.migrate.edit import arg, in_a_row, with_args
from hvdtrain.commands.migrate.finding import Refused, Rewrite
from hvdtrain.commands.migrate.scan import Scan, argument, is_false, is_true, name_of, starred
from hvdtrain.keras.hooks import STEPS, UNPACK, taken

FIT = ("x", "y", "batch_size", "epochs", "verbose", "callbacks", "validation_split", "validation_data", "shuffle",
       "class_weight", "sample_weight", "initial_epoch", "steps_per_epoch", "validation_steps",
       "validation_batch_size",
       "validation_freq")
"""Parameters of Keras 3's ``Model.fit`` in their order."""
COMPILE = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly", "steps_per_execution",
           "jit_compile", "auto_scale_loss")
DATASET = ("a tf.data.Dataset that is more than from_tensor_slices, shuffle, batch, cache and prefetch",
           "every rank needs its own share of each global batch, in the same number of steps, and the "
           "effect of maps and filters cannot be derived from the code",
           "pass arrays to hvd.shard(x, y, global_batch=...) for hvdtrain.keras; Trainer takes the dataset as it is "
           "(its shuffle needs a seed)")


@dataclass(frozen=True)
class Chain:
    """``Dataset.from_tensor_slices((x, y)).shuffle(n).batch(b)``. ``seeded``: itself; ``drops``: a short batch."""

    shuffled: bool
    seeded: bool
    drops: bool


def compiles(scan: Scan) -> list[cst.Call]:
    """Return calls of a Keras model's ``compile``, not of a module's (``re.compile``)."""
    fitted = {scan.code(call.func.value) for call in scan.methods("fit") if isinstance(call.func, cst.Attribute)}
    return [call for call in scan.methods("compile") if isinstance(call.func, cst.Attribute)
            and not scan.dotted(call.func) and (
                len(call.args) != 1 or scan.code(call.func.value) in fitted
                or any(a.keyword is not None and a.keyword.value in COMPILE for a in call.args)
                or isinstance(call.args[0].value, cst.SimpleString))]


def models(scan: Scan) -> set[str]:
    """Return texts that stand for a compiled model: ``model``, ``self.net``, names made by compiling functions."""
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
    known = models(scan)
    return [call for call in scan.methods("fit")
            if isinstance(call.func, cst.Attribute) and scan.code(call.func.value) in known]


def argument_indices(scan: Scan, call: cst.Call, order: tuple[str, ...]) -> dict[str, int]:
    """Return the index of each given argument by its parameter's name; `Refused` for ``*args`` and ``**kwargs``."""
    if starred(call):
        raise Refused(scan.line(call), f"{scan.short(call.func)} gets *args or **kwargs",
                      "their contents cannot be derived from the code", "write the arguments explicitly, then run "
                                                                        "migrate again")
    return {arg.keyword.value if arg.keyword is not None else order[index]: index
            for index, arg in enumerate(call.args)}


def chain(scan: Scan, node: cst.BaseExpression) -> Chain | None:
    """Return ``node`` as a `Chain`; None where it is anything else."""
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
    known = models(scan)
    return [call for call in scan.methods("save", "save_weights", "export")
            if isinstance(call.func, cst.Attribute) and scan.code(call.func.value) in known]


def is_generator(scan: Scan, node: cst.BaseExpression) -> bool:
    value = scan.value(node)
    if isinstance(value, cst.GeneratorExp):
        return True
    name = name_of(value.func) if isinstance(value, cst.Call) else None
    return any(f.name.value == name and any(True for _ in scan.all(cst.Yield, f)) for f in scan.all(cst.FunctionDef))


def sole(scan: Scan, node: cst.CSTNode) -> cst.SimpleStatementLine:
    """Return the line of which ``node`` is (in) the only statement; `Refused` where there are others on it."""
    line = scan.statement(node)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        raise Refused(scan.line(node), f"{scan.short(node)} shares its line with other statements",
                      "one statement cannot be moved separately", "put it on a separate line, then run migrate again")
    return line


UNDISTRIBUTED = "a model that is trained without the distributed optimizer differs between ranks"


def check(scan: Scan) -> None:
    """Raise `Refused` at the first model that may be trained with an optimizer that was not wrapped."""
    known = models(scan)
    fitted = {scan.code(call.func.value) for call in fits(scan) if isinstance(call.func, cst.Attribute)}
    for load in _loads(scan):
        up = scan.parent[load]
        owner = scan.code(up.targets[0].target) if isinstance(up, cst.Assign) else ""
        if owner in fitted and not _compiled_behind(scan, owner, load):
            raise Refused(scan.line(load), f"{owner} can come from a file: {scan.short(load)}",
                          "it has the plain optimizer with which it was saved; " + UNDISTRIBUTED,
                          f"load it by hvd.load_model of hvdtrain.keras, or compile {owner} again directly after")
    for node in scan.all(cst.Attribute):
        word, owner, up = node.attr.value, scan.code(node.value), scan.parent[node]
        called = isinstance(up, cst.Call) and up.func is node
        if owner in known and word in ("train_on_batch", "fit_generator", "train_step") or (
                owner in known and word == "fit" and not called):
            raise Refused(scan.line(node), f"{scan.short(scan.statement(node))} trains outside of fit",
                          "the division of the data cannot be derived from the code", "call fit there directly")
        if word == "fit" and called and owner not in known and _unknown(scan, node.value):
            raise Refused(scan.line(node), f"{scan.short(node)} is called on an object without a visible compile",
                          "if it is a model of Keras: " + UNDISTRIBUTED,
                          "write model.compile(...) and model.fit(...) of one name, then run migrate again")


def _loads(scan: Scan) -> list[cst.Call]:
    loads = [call for call in scan.all(cst.Call) if (name_of(call.func) or "").rpartition(".")[2] == "load_model"]
    makers = {scope.name.value for call in loads for scope in [scan.scope(call)] if isinstance(scope, cst.FunctionDef)
              and any(True for _ in scan.all(cst.Return, scope))}
    return loads + [call for call in scan.all(cst.Call) if name_of(call.func) in makers]


def _compiled_behind(scan: Scan, owner: str, load: cst.Call) -> bool:
    """Return whether every way from ``load`` comes by a compile of the model."""
    blocks = [up for up in scan.above(load) if isinstance(up, (cst.IndentedBlock, cst.Module))]
    return any(isinstance(call.func, cst.Attribute) and scan.code(call.func.value) == owner
               and scan.line(call) > scan.line(load) and scan.parent[scan.statement(call)] in blocks
               for call in compiles(scan))


def _unknown(scan: Scan, owner: cst.BaseExpression) -> bool:
    value = scan.value(owner)
    dotted = scan.dotted(value.func) if isinstance(value, cst.Call) else scan.dotted(value)
    return not dotted or dotted.startswith(("keras.", "tensorflow.", "tf_keras."))


WEIGHT = "sample_weight"
TAKERS = {"compute_loss": 3, "compiled_loss": 2, "compute_metrics": 3}
"""Methods of a Keras model that take the weights, and how many arguments come before those."""
WEIGHTS = ("hvd.shard gives x, y and sample_weight, whose scaling makes the mean over ranks that of the global batch: "
       "without it ranks with unequal shares train on a wrong mean")
DO = (f"write x, y, {WEIGHT} = keras.utils.{UNPACK}(data), and take the loss by "
      f"self.compute_loss(x, y, y_pred, {WEIGHT})")


def methods(scan: Scan, *names: str) -> Iterator[cst.FunctionDef]:
    """Yield the methods of these names that classes of a script with a base define, such as models."""
    return (node for node in scan.all(cst.FunctionDef) if node.name.value in names
            and isinstance(owner := scan.parent.get(scan.parent[node]), cst.ClassDef) and owner.bases)


def weigh_steps(scan: Scan, made: Rewrite) -> None:
    """Plan the weights of every ``train_step``; `Refused` where a step does not leave its loss to Keras."""
    for step in methods(scan, *STEPS):
        how = taken(cst.Module([]).code_for_node(step))
        if how in ("pairs", "unweighted"):
            _weigh(scan, made, step)


def _weigh(scan: Scan, made: Rewrite, step: cst.FunctionDef) -> None:
    """Plan ``x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)``, and the weights of the calls."""
    name, data = step.name.value, step.params.params[1].name.value
    pairs = [node for node in scan.all(cst.Assign, step) if name_of(node.value) == data
             and isinstance(node.targets[0].target, cst.Tuple) and len(node.targets[0].target.elements) == 2]
    takers = [call for call in scan.methods(*TAKERS, within=step) if isinstance(call.func, cst.Attribute)
              and name_of(call.func.value) == step.params.params[0].name.value]
    losses = [call for call in takers if not (name_of(call.func) or "").endswith("_metrics")]
    own = {node.value for node in scan.all(cst.Name, step)}
    if len(pairs) != 1 or not losses or WEIGHT in own or any(starred(call) for call in takers):
        raise Refused(scan.line(step), f"{name} of a custom model takes no sample weights", WEIGHTS, DO)
    made.edits.swap(pairs[0].value, f"{_keras(scan, made)}.utils.{UNPACK}({data})")
    made.edits.put(pairs[0].targets[0].target, lambda new: new.with_changes(
        elements=in_a_row([*new.elements, cst.Element(cst.Name(WEIGHT))])))
    for call in takers:
        assert isinstance(call.func, cst.Attribute)
        if argument(call, WEIGHT, TAKERS[call.func.attr.value]) is None:
            made.edits.put(call, lambda new: with_args(new, [*new.args, arg(WEIGHT, WEIGHT)]))
    made.tell(scan.line(pairs[0]), "changed", f"{name} takes the sample weights and gives them to the loss", WEIGHTS,
              "check the diff: other means over the batch in this step also need the weights")


def _keras(scan: Scan, made: Rewrite) -> str:
    for name, means in scan.imports.items():
        if means in ("keras", "tensorflow.keras"):
            return name
    tf = next((name for name, means in scan.imports.items() if means == "tensorflow"), "")
    if tf:
        return f"{tf}.keras"
    made.edits.imports.append("import keras")
    return "keras"
