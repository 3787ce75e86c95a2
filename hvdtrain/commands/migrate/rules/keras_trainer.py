"""Keras' ``fit`` rewritten to hvdtrain's Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate.edit import Names, arg, comments, expression, guarded, in_a_row, keyword, with_args
from hvdtrain.commands.migrate.finding import Refused, Rewrite
from hvdtrain.commands.migrate.rules import keras_calls
from hvdtrain.commands.migrate.rules.keras_calls import FIT, argument_indices, fits, saves, sole
from hvdtrain.commands.migrate.scan import Scan, argument, name_of, text_of

NEITHER = ("validation_split", "steps_per_epoch", "initial_epoch", "validation_steps")
KEPT_BY_KERAS = ("initial_epoch", "validation_steps")
"""Those that the other target keeps."""
HANDED = ("callbacks", "class_weight")
"""Arguments that Trainer.fit takes by the same names."""


def rewrite(scan: Scan, made: Rewrite) -> None:
    """Plan ``trainer = Trainer(Config(...))`` and ``trainer.fit(model, data)`` for the one ``fit`` of a script."""
    calls = fits(scan)
    if len(calls) != 1:
        raise Refused(scan.line(calls[1]), f"fit is called {len(calls)} times", "a Trainer is one run, with its own "
                      "folder", "make a Trainer for each, as in the code below")
    call, names = calls[0], Names(scan)
    where = argument_indices(scan, call, FIT)
    _refuse(scan, call, where)
    line = sole(scan, call)
    _result(scan, call, line.body[0])
    batch = _batch(scan, call, where)
    if not batch:
        raise Refused(scan.line(call), f"the batch size of {scan.short(call.args[where['x']].value)} is not visible",
                      "Config needs it as global_batch", "write it into the code below")
    if "y" not in where:
        _endless(scan, made, call.args[where["x"]].value)
    config = _config(scan, call, where, batch, names)
    made.edits.imports += names.imports(config)
    made.edits.put(call, lambda new: _fit(new, where, names.trainer))
    made.edits.put(line, lambda new: _with_trainer(new, config, comments(call.args)))
    _saves(scan, made, call, f"{names.trainer}.run.control.rank == 0")
    made.tell(scan.line(call), "changed", "fit runs in Trainer, with the model as compiled",
              "the batch is the batch over all ranks; logs, checkpoints and the final model go to a folder under "
              "runs/",
              "start it with horovodrun -np N python script.py (or mpirun)")


def snippet(scan: Scan) -> str:
    """Return each fit as a Trainer's, to continue from by hand."""
    names, lines = Names(scan), []
    for call in fits(scan):
        try:
            where = argument_indices(scan, call, FIT)
        except Refused:
            continue
        if "x" in where and not set(where) & set(NEITHER):
            text = _config(scan, call, where, _batch(scan, call, where) or "...", names)
            lines += [text, cst.Module([]).code_for_node(_fit(call, where, names.trainer))]
    return "\n".join([*names.imports("\n".join(lines)), "", *lines]) if lines else ""


def _result(scan: Scan, call: cst.Call, small: cst.BaseSmallStatement) -> None:
    """Raise `Refused` where more of what fit returns is read than ``.history``, which a Result has, too."""
    if isinstance(small, cst.Expr):
        return
    target = small.targets[0].target if isinstance(small, cst.Assign) and len(small.targets) == 1 else None
    plain = isinstance(target, cst.Name) and isinstance(small, cst.Assign) and small.value is call
    ups = [scan.parent[use] for use in scan.uses(target.value)] if plain and isinstance(target, cst.Name) else [None]
    if not all(isinstance(up, cst.Attribute) and up.attr.value == "history" for up in ups):
        raise Refused(scan.line(call), "more than .history is read of what fit returns",
                      "Trainer.fit returns a Result",
                      "read result.loss, result.metrics and result.history by hand")


def _refuse(scan: Scan, call: cst.Call, where: dict[str, int]) -> None:
    line = scan.line(call)
    for step in keras_calls.methods(scan, "train_step", "compute_loss"):
        raise Refused(scan.line(step), f"a custom model has {step.name.value}", "Trainer does not call it",
                      "give the model's file a task(model, batch) -> (loss_sum, weight), or run migrate with --to "
                      "hvdtrain.keras, whose fit calls it")
    for name in NEITHER:
        if name in where:
            raise Refused(line, f"fit gets {name}", "Trainer has it in another form, or not at all",
                          "see early_stop, checkpoint, schedule in docs/reference/settings.md; remove it from fit" + (
                              "; or run migrate with --to hvdtrain.keras" if name in KEPT_BY_KERAS else ""))
    if "x" not in where:
        raise Refused(line, f"{scan.short(call)} has no data", "fit needs x", "fix the script first")
    if "sample_weight" in where and "y" not in where:
        raise Refused(line, "fit gets sample_weight without y", "it belongs to arrays", "fix the script first")


def _batch(scan: Scan, call: cst.Call, where: dict[str, int]) -> str:
    """Return the code of the batch size, of ``fit`` or of the dataset's ``batch``; "" where it is not visible."""
    size = call.args[where["batch_size"]].value if "batch_size" in where else None
    if size is not None and not (isinstance(size, cst.Name) and size.value == "None"):
        return scan.code(size)
    if "y" in where:
        return "32"
    for name, link in _links(scan, call.args[where["x"]].value):
        given_size = argument(link, "batch_size", 0)
        if name == "batch" and given_size is not None:
            return _legible(scan, given_size.value, call)
    return ""


def _links(scan: Scan, node: cst.BaseExpression) -> Iterator[tuple[str, cst.Call]]:
    node = returned(scan, node)
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        yield node.func.attr.value, node
        node = returned(scan, node.func.value)


def _endless(scan: Scan, made: Rewrite, data: cst.BaseExpression) -> None:
    """Give a dataset's shuffle a seed, which all ranks have to share; `Refused` for a dataset that has no end."""
    for name, link in _links(scan, data):
        if name == "repeat" and not link.args:
            raise Refused(scan.line(link), f"the dataset has no end: {scan.short(link)}",
                          "Trainer repeats the dataset and counts epochs", "remove .repeat(), then run migrate again")
        if name == "shuffle" and argument(link, "seed", 1) is None:
            made.edits.put(link, lambda new: with_args(new, [*new.args, arg("0", "seed")]))
            made.tell(scan.line(link), "changed", f"{scan.short(link, 40)} gets a seed",
                      "all ranks read the dataset and take their shares of one order",
                      "nothing, or choose another seed")


def _legible(scan: Scan, size: cst.BaseExpression, at: cst.CSTNode) -> str:
    """Return the code of ``size`` that means the same at ``at``: a number, or names of the module; else ""."""
    if isinstance(scan.value(size), cst.Integer):
        return scan.code(size if scan.scope(size) is scan.scope(at) else scan.value(size))
    names = [node for node in scan.inner(size) if isinstance(node, cst.Name)]
    shared = all(scan.scope(b) in (scan.module, scan.scope(at)) for n in names for b in scan.binders(n.value, n))
    return scan.code(size) if shared and scan.scope(size) in (scan.module, scan.scope(at)) else ""


def returned(scan: Scan, node: cst.BaseExpression) -> cst.BaseExpression:
    """Return what a name stands for; through ``a, b = f()``, the one ``return`` of a function of this file."""
    found = scan.value(node)
    if isinstance(found, cst.Call) and (inner := _result_of(scan, found)) is not None:
        return inner
    if not isinstance(found, cst.Name) or scan.bindings(found.value) != 1:
        return found
    for assign in scan.all(cst.Assign):
        target = assign.targets[0].target
        if isinstance(target, cst.Tuple) and isinstance(assign.value, cst.Call):
            names = [name_of(element.value) for element in target.elements]
            inner = _result_of(scan, assign.value)
            if found.value in names and isinstance(inner, cst.Tuple) and len(inner.elements) == len(names):
                return inner.elements[names.index(found.value)].value
    return found


def _result_of(scan: Scan, call: cst.Call) -> cst.BaseExpression | None:
    made = [f for f in scan.module.body if isinstance(f, cst.FunctionDef) and f.name.value == name_of(call.func)]
    gives = [r for r in scan.all(cst.Return, made[0]) if scan.scope(r) is made[0]] if len(made) == 1 else []
    return scan.value(gives[0].value) if len(gives) == 1 and gives[0].value is not None else None


def _config(scan: Scan, call: cst.Call, where: dict[str, int], batch: str, names: Names) -> str:
    epochs = scan.code(call.args[where["epochs"]].value) if "epochs" in where else "1"
    keys = [f"epochs={epochs}", f"global_batch={batch}"]
    if "shuffle" in where:
        keys.append(f"data={names['DataConfig']}(shuffle={scan.code(call.args[where['shuffle']].value)})")
    if "verbose" in where:
        value = call.args[where["verbose"]].value
        if text_of(value) is None and scan.code(value) == "0":
            keys.append('progress="off"')
    return f"{names.trainer} = {names['Trainer']}({names['Config']}({', '.join(keys)}))"


def _with_trainer(line: Any, text: str, said: list[cst.EmptyLine]) -> Any:
    """Return the line that makes the trainer, then the line that fits; ``said``: comments among fit's arguments."""
    made: Any = cst.parse_statement(text)
    return cst.FlattenSentinel([made.with_changes(leading_lines=[*line.leading_lines, *said]),
                                line.with_changes(leading_lines=[])])


def _fit(new: cst.Call, where: dict[str, int], trainer: str) -> cst.Call:
    """Return ``trainer.fit(model, ((x, y), (x_test, y_test)))``."""
    assert isinstance(new.func, cst.Attribute)
    value = {name: new.args[index].value for name, index in where.items()}
    names = [n for n in ("x", "y", "sample_weight") if n in value]
    data = _tuple([value[n] for n in names]) if len(names) > 1 else value["x"]
    test = value.get("validation_data")
    if test is not None and not (isinstance(test, cst.Name) and test.value == "None"):
        data = _tuple([data, test])
    fit = new.with_changes(func=expression(f"{trainer}.fit"))
    args = [cst.Arg(new.func.value), cst.Arg(data), *(keyword(name, value[name]) for name in HANDED if name in value)]
    return fit.with_changes(args=in_a_row(args), whitespace_before_args=cst.SimpleWhitespace(""))


def _tuple(values: list[cst.BaseExpression]) -> cst.Tuple:
    return cst.Tuple(in_a_row([cst.Element(value) for value in values]))


def _saves(scan: Scan, made: Rewrite, fit: cst.Call, root: str) -> None:
    """Plan ``model.save(...)`` behind the fit, on rank 0."""
    for call in saves(scan):
        if scan.scope(call) is not scan.scope(fit) or scan.line(call) < scan.line(fit):
            raise Refused(scan.line(call), f"{scan.short(call)} is not directly after fit",
                          "only there is the rank known", "move it after fit, then run migrate again")
        made.edits.put(sole(scan, call), lambda new: guarded(new, root))
