"""Keras' ``compile`` and ``fit`` rewritten to hvdtrain.keras: the optimizer, the data, the callbacks, the files."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.commands.migrate.edit import (
    arg,
    comments,
    expression,
    guarded,
    in_a_row,
    keyword,
    statement,
    with_args,
    with_elements,
)
from hvdtrain.commands.migrate.finding import MigrateOptions, Refused, Rewrite
from hvdtrain.commands.migrate.rules import keras2, keras_calls, keras_trainer
from hvdtrain.commands.migrate.rules.keras_calls import (
    COMPILE,
    DATASET,
    FIT,
    Chain,
    argument_indices,
    chain,
    compiles,
    fits,
    is_generator,
    saves,
    sole,
)
from hvdtrain.commands.migrate.scan import Scan, argument, is_true, local_name, name_of

IMPORT = "import hvdtrain.keras as hvd"
ROOT = "hvd.rank() == 0"
CALLBACKS = ("hvd.callbacks.BroadcastGlobalVariablesCallback(0)", "hvd.callbacks.MetricAverageCallback()")
INTO_SHARD = {"x", "y", "batch_size", "shuffle", "class_weight", "sample_weight"}
"""Arguments of fit that are hvd.shard's."""
FILES = ("ModelCheckpoint", "TensorBoard", "CSVLogger")
START = "start it with horovodrun -np N python script.py (or mpirun), N the number of GPUs"


def rewrite(scan: Scan, made: Rewrite) -> list[str]:
    """Plan all edits of a script with ``fit``; `Refused` where one of them cannot be made.

    Return the statements that begin the script's distributed part: ``hvd.init()``, and this rank's GPU.
    """
    if "hvd" in scan.bound:
        raise Refused(1, "the name hvd has another use", "hvdtrain.keras would be imported under that name",
                      "rename it, then run migrate again")
    keras_calls.check(scan)
    made.edits.imports.append(IMPORT)
    for call in compiles(scan):
        _compile(scan, made, call)
    keras_calls.weigh_steps(scan, made)
    datasets: set[str] = set()
    for call in fits(scan):
        _fit(scan, made, call, datasets)
    for name in sorted(datasets):
        _dataset(scan, made, name)
    _writers(scan, made)
    _saves(scan, made)
    return ["hvd.init()", *_device(scan, made)]


def _device(scan: Scan, made: Rewrite) -> list[str]:
    """Return the statements that show a rank its own GPU alone, unless the script chooses devices itself."""
    if any(True for _ in scan.methods("set_visible_devices")):
        return []
    tf = next((local_name(alias) for alias in scan.all(cst.ImportAlias) if scan.scope(alias) is scan.module
               and isinstance(scan.parent[alias], cst.Import) and name_of(alias.name) == "tensorflow"), "")
    if not tf:
        tf = "tf" if scan.imports.get("tf", "tensorflow") == "tensorflow" and not scan.bindings("tf") else "tensorflow"
        made.edits.imports.append("import tensorflow as tf" if tf == "tf" else "import tensorflow")
    gpus = "gpus" if "gpus" not in scan.bound else "rank_gpus"
    return [f'{gpus} = {tf}.config.list_physical_devices("GPU")',
            f'{tf}.config.set_visible_devices({gpus}[hvd.local_rank():][:1] or {gpus}[:1], "GPU")']


def _compile(scan: Scan, made: Rewrite, call: cst.Call) -> None:
    """Plan ``optimizer=hvd.DistributedOptimizer(x)`` for ``optimizer=x``, and ``jit_compile=False`` for True."""
    where = argument_indices(scan, call, COMPILE)
    unknown = sorted(set(where) - set(COMPILE))
    if unknown and any(True for _ in keras_calls.methods(scan, "compile")):
        raise Refused(scan.line(call), f"compile of a custom model gets {', '.join(unknown)}",
                      "which of them are optimizers cannot be derived from the code, and each optimizer must be "
                      "distributed",
                      "wrap each optimizer by hvd.DistributedOptimizer of hvdtrain.keras where it is made")
    index = where.get("optimizer")
    if index is None:  # Keras' default
        made.edits.put(call, lambda new: with_args(
            new, [arg('hvd.DistributedOptimizer("rmsprop")', "optimizer"), *new.args]))
    else:
        made.edits.put(_optimizer(scan, call.args[index]), lambda new: _around("hvd.DistributedOptimizer({})", new))
    jit = argument(call, "jit_compile", 7)
    if is_true(jit):
        assert jit is not None
        made.edits.swap(jit.value, "False")


def _optimizer(scan: Scan, given_as: cst.Arg) -> cst.BaseExpression:
    """Return what to wrap: the argument, or where its name is used elsewhere, too, what that name is given.

    A distributed optimizer is a copy: who continues with the plain one would change a rate that nothing obeys.
    """
    value = given_as.value
    if isinstance(value, cst.Attribute) and value.attr.value == "optimizer":
        raise Refused(scan.line(value), f"{scan.short(value)} is compiled a second time",
                      "it is already a distributed optimizer, or will be one",
                      "make a new optimizer, then run migrate again")
    others = [use for use in scan.uses(value.value) if use is not value] if isinstance(value, cst.Name) else []
    if not others:
        return value
    made = scan.value(value)
    wrapped = {one for call in compiles(scan) for one in call.args}
    if isinstance(made, cst.Call) and not any(scan.parent[use] in wrapped for use in others):
        return made
    raise Refused(scan.line(value), f"{scan.code(value)} is the optimizer of compile and has other uses",
                  "the distributed optimizer is a copy, and changes of the plain one would have no effect",
                  "wrap it by hvd.DistributedOptimizer where it is made")


def _around(form: str, inner: cst.BaseExpression) -> Any:
    whole = expression(form.format("_"))
    target = next(n for n in Scan(cst.Module(body=[cst.SimpleStatementLine([cst.Expr(whole)])])).all(cst.Name)
                  if n.value == "_")
    return whole.deep_replace(target, inner)


def _fit(scan: Scan, made: Rewrite, call: cst.Call, datasets: set[str]) -> None:
    where = argument_indices(scan, call, FIT)
    line = scan.line(call)
    if "x" not in where:
        raise Refused(line, f"{scan.short(call)} has no data", "fit needs x", "fix the script first")
    for name in ("validation_split", "steps_per_epoch"):
        if name in where:
            raise Refused(line, f"fit gets {name}", "hvd.shard divides whole epochs of its data",
                          "split the arrays first and give validation_data" if name == "validation_split" else
                          f"remove {name} if the data are finite; otherwise (a "
                          "generator, a dataset that repeats) convert them to arrays, or give each rank its "
                          "own batches with hvdtrain.keras")
    x = call.args[where["x"]].value
    if "y" not in where:
        if is_generator(scan, x):
            raise Refused(line, f"fit gets a generator: {scan.short(x)}",
                          "the division and number of its batches cannot be derived from the code",
                          "convert it to arrays for hvd.shard(x, y, global_batch=...)")
        if not isinstance(x, cst.Name) or chain(scan, scan.value(x)) is None:
            raise Refused(line, f"fit gets {DATASET[0]}: {scan.short(x)}", *DATASET[1:], elsewhere=True)
        datasets.add(x.value)
    elif isinstance(x, (cst.List, cst.Dict, cst.Tuple)):
        raise Refused(line, f"fit gets several inputs: {scan.short(x)}", "hvd.shard takes one array x and one y",
                      "put them into one array, or use Trainer with a custom dataset")
    made.edits.put(call, lambda new: _new_fit(new, where, scan.width(call)))
    if "y" in where:
        said = comments([call.args[where[name]] for name in where if name in INTO_SHARD])
        if said and isinstance(scan.statement(call), cst.SimpleStatementLine):
            made.edits.put(scan.statement(call),
                           lambda new: new.with_changes(leading_lines=[*new.leading_lines, *said]))
    made.tell(line, "changed", "fit: batch_size is the batch over all ranks"
              if "y" in where else "fit: the dataset's batch is the batch over all ranks",
              "so the results are those of one process with this batch, for any number of ranks",
              "nothing, unless this is the batch per rank: then multiply it by hvd.size(), and check the rate")


def _new_fit(new: cst.Call, where: dict[str, int], width: int) -> cst.Call:
    """Return ``fit`` with changed arguments; ``where``: index of each by name; ``width``: columns before them."""
    if isinstance(new.whitespace_before_args, cst.ParenthesizedWhitespace):
        width = len(new.whitespace_before_args.last_line.value)
    by_index = {index: name for name, index in where.items()}
    into_shard = INTO_SHARD if "y" in where else set()
    args: list[cst.Arg] = [cst.Arg(_shard(new, where))] if into_shard else []
    alone: list[cst.Arg] = []
    for index, old in enumerate(new.args):
        name = by_index[index]
        if name in into_shard:
            continue
        if old.keyword is None and name != "x":
            old = keyword(name, old.value).with_changes(comma=old.comma)
        if name == "callbacks":
            old = old.with_changes(value=_callbacks(old.value, width))
            alone.append(old)
        if name == "verbose":
            old = old.with_changes(value=_verbose(old.value))
        args.append(old)
    if "callbacks" not in where:
        args.append(keyword("callbacks", _callbacks(cst.Name("None"), width)))
        alone.append(args[-1])
    if "verbose" not in where:
        args.append(arg(f'"auto" if {ROOT} else 0', "verbose"))
        alone.append(args[-1])
    return with_args(new, args, alone, width)


def _shard(new: cst.Call, where: dict[str, int]) -> cst.Call:
    """Return ``hvd.shard(x, y, global_batch=...)`` from the arguments of a ``fit``."""
    value = {name: new.args[index].value for name, index in where.items()}
    args = [cst.Arg(value["x"]), cst.Arg(value["y"])]
    if "sample_weight" in value:
        args.append(cst.Arg(value["sample_weight"]))
    size = value.get("batch_size")
    default = size is None or isinstance(size, cst.Name) and size.value == "None"
    args.append(arg("32", "global_batch") if default or size is None else keyword("global_batch", size))
    args += [keyword(name, value[name]) for name in ("class_weight", "shuffle") if name in value]
    return cst.Call(expression("hvd.shard"), in_a_row(args))


def _callbacks(old: cst.BaseExpression, width: int) -> cst.BaseExpression:
    ours: list[Any] = [cst.Element(expression(text)) for text in CALLBACKS]
    width += len("callbacks=[")
    if isinstance(old, cst.List):
        return with_elements(old, ours, width)
    if isinstance(old, cst.Name) and old.value == "None":
        return with_elements(cst.List([]), ours, width)
    inner = old if isinstance(old, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) or getattr(
        old, "lpar", None) else old.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return with_elements(cst.List([]), [*ours, cst.StarredElement(inner)], width)


def _verbose(old: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(old, cst.Integer) and old.value == "0":
        return old
    if not isinstance(old, (cst.Integer, cst.SimpleString, cst.Name, cst.Attribute)):
        old = old.with_changes(lpar=[cst.LeftParen(), *old.lpar], rpar=[*old.rpar, cst.RightParen()])
    return _around('{} if hvd.rank() == 0 else 0', old)


def _dataset(scan: Scan, made: Rewrite, name: str) -> None:
    """Plan ``name = hvd.shard(...)`` for ``name = tf.data.Dataset.from_tensor_slices(...)...``."""
    assign = scan.assigned(name)[0]
    found = chain(scan, assign.value)
    assert found is not None
    calls = fits(scan)
    for use in scan.uses(name):
        if not any(argument(c, "x", 0) is scan.parent[use] for c in calls):
            raise Refused(scan.line(use), f"{name} is used for more than fit", *DATASET[1:], elsewhere=True)
    made.edits.put(assign.value, lambda new: _sharded(new, found))
    if found.drops:
        made.tell(scan.line(assign), "changed", f"{name}: drop_remainder=True is removed",
                  "hvd.shard weights a short last batch by its samples, so no sample has to be dropped", "nothing")


def _sharded(new: cst.Call, found: Chain) -> cst.BaseExpression:
    size: cst.BaseExpression | None = None
    seed: cst.BaseExpression | None = None
    node: Any = new
    while True:
        assert isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)
        name = node.func.attr.value
        if name == "from_tensor_slices":
            break
        if name == "batch":
            picked = argument(node, "batch_size", 0)
            size = picked.value if picked else None
        if name == "shuffle" and found.seeded:
            picked = argument(node, "seed", 1)
            seed = picked.value if picked else None
        node = node.func.value
    tensors = argument(node, "tensors", 0)
    assert tensors is not None and isinstance(tensors.value, cst.Tuple) and size is not None
    args = [cst.Arg(element.value) for element in tensors.value.elements]
    args.append(keyword("global_batch", size))
    if not found.shuffled:
        args.append(arg("False", "shuffle"))
    if seed is not None:
        args.append(keyword("seed", seed))
    return cst.Call(expression("hvd.shard"), in_a_row(args))


def _writers(scan: Scan, made: Rewrite) -> None:
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        if last == "BackupAndRestore":
            raise Refused(scan.line(call), "BackupAndRestore is used",
                          "ranks that read one backup while another writes it can start at different epochs, "
                          "and then wait for each other",
                          "load the weights on every rank and give fit the initial_epoch, or use Trainer with resume")
        if last in FILES:
            _writer(scan, made, call)


def _writer(scan: Scan, made: Rewrite, call: cst.Call) -> None:
    up = scan.parent[call]
    if isinstance(up, cst.Element) and isinstance(scan.parent[up], cst.List):
        made.edits.put(up, _on_root)
        return
    if isinstance(up, cst.Arg):
        around = scan.parent[up]
        if isinstance(around, cst.Call) and isinstance(around.func,
                                                       cst.Attribute) and around.func.attr.value == "append":
            made.edits.put(sole(scan, around), lambda new: guarded(new, ROOT))
            return
    if isinstance(up, cst.Assign) and len(up.targets) == 1 and isinstance(up.targets[0].target, cst.Name):
        name = up.targets[0].target.value
        elements = [scan.parent[use] for use in scan.uses(name)]
        if scan.bindings(name) == 1 and all(isinstance(e, cst.Element) for e in elements):
            for element in elements:
                made.edits.put(element, _on_root)
            return
    raise Refused(scan.line(call), f"{scan.short(call.func)} would write from every rank",
                  "ranks that write one file at the same time corrupt it",
                  "put it into the list of callbacks, then run migrate again")


def _on_root(element: cst.Element) -> cst.StarredElement:
    """Return ``*([x] if hvd.rank() == 0 else [])`` in place of the element ``x``."""
    value = _around("([{}] if hvd.rank() == 0 else [])", element.value)
    return cst.StarredElement(value, comma=element.comma)


def _saves(scan: Scan, made: Rewrite) -> None:
    """Plan ``model.save(...)`` under ``if hvd.rank() == 0:``."""
    for call in saves(scan):
        line = sole(scan, call)
        if not isinstance(line.body[0], cst.Expr):
            raise Refused(scan.line(call), f"the result of {scan.short(call)} is used", "it must run on rank 0 only",
                          "put it on a separate line, then run migrate again")
        made.edits.put(line, lambda new: guarded(new, ROOT))


TITLE = "a script of Keras on one device"
TARGETS = ("hvdtrain.keras", "trainer")


snippet = keras_trainer.snippet


def recognise(scan: Scan) -> bool:
    return scan.imports_any("keras",
                            "tensorflow") and (bool(fits(scan)) or any(True for _ in scan.calls("GradientTape")))


def plan(scan: Scan, options: MigrateOptions) -> Rewrite:
    made = Rewrite()
    found = fits(scan)
    if not found:
        tape = next(scan.calls("GradientTape"))
        made.tell(scan.line(tape), "by hand", "the model is trained by a custom loop with a GradientTape",
                  "the source of its batches and the divisor of its loss cannot be derived from the code",
                  "import hvdtrain.tensorflow as hvd; hvd.init(); tape = hvd.DistributedGradientTape(tape); "
                  "hvd.broadcast_variables(model.variables, root_rank=0) after the first step; "
                  "x[hvd.rank()::hvd.size()]")
        return made
    if options.target == "trainer":
        keras_trainer.rewrite(scan, made)
        keras2.rewrite(scan, made)
        return made
    _begin(scan, made, rewrite(scan, made))
    keras2.rewrite(scan, made)
    made.tell(scan.line(found[0]), "note", "one process trained this model; now every rank runs the whole script",
              "ranks are processes, one for each GPU", START)
    return made


def _begin(scan: Scan, made: Rewrite, texts: list[str]) -> None:
    """Plan them first in ``if __name__ == "__main__":`` where fit is in a function; else behind the imports."""
    calls = [*compiles(scan), *fits(scan)]
    at_top = any(isinstance(scan.scope(call), cst.Module) for call in calls)
    guards = [node for node in scan.module.body if isinstance(node, cst.If) and "__name__" in scan.code(node.test)]
    inside = bool(guards) and all(scan.inside(call, guards[0]) for call in calls)
    if guards and (inside or not at_top) and isinstance(guards[0].body, cst.IndentedBlock):
        made.edits.put(guards[0].body, lambda new: new.with_changes(
            body=[*(statement(text) for text in texts), *new.body]))
    else:
        made.edits.first += texts
