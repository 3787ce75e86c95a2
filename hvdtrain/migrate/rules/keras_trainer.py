"""Keras' ``fit`` rewritten to hvdtrain's Trainer. Owns that edit; reading is ``keras_calls``'."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hvdtrain.migrate.edit import arg, comments, expression, guarded
from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.rules import Plan
from hvdtrain.migrate.rules.keras_calls import FIT, fits, given, models, sole
from hvdtrain.migrate.scan import Scan, argument, text_of

IMPORT = "from hvdtrain import Config, Trainer"
NEITHER = ("validation_split", "steps_per_epoch", "initial_epoch", "validation_steps")
KEPT_BY_KERAS = ("initial_epoch", "validation_steps")
"""Those that the other target keeps."""
HANDED = ("callbacks", "class_weight")
"""Arguments that Trainer.fit takes by the same names."""
ROOT = "trainer.run.control.rank == 0"


def rewrite(scan: Scan, made: Plan) -> None:
    """Plan ``trainer = Trainer(Config(...))`` and ``trainer.fit(model, data)`` for the one ``fit`` of a script."""
    calls = fits(scan)
    if len(calls) != 1:
        raise Refused(scan.line(calls[1]), f"fit is called {len(calls)} times", "a Trainer is one run",
                      "make a Trainer for each by hand")
    call = calls[0]
    taken = {"Config", "Trainer", "trainer", "Data"} & scan.bound
    if taken:
        raise Refused(1, f"the name {sorted(taken)[0]} is used for something else",
                      "hvdtrain's would be imported by it",
                      "rename it, then run migrate again")
    where = given(scan, call, FIT)
    _refuse(scan, call, where)
    line = sole(scan, call)
    _result(scan, call, line.body[0])
    batch = _batch(scan, call, where)
    made.edits.imports.append(IMPORT)
    if "shuffle" in where:
        made.edits.imports.append("from hvdtrain.config import Data")
    made.edits.put(call, lambda new: _fit(new, where))
    made.edits.put(line, lambda new: _with_trainer(new, _config(scan, call, where, batch), comments(call.args)))
    _saves(scan, made, call)
    made.tell(scan.line(call), "changed", "fit runs in Trainer, with the model as it is compiled",
              "the batch is that of all ranks together; logs, checkpoints and the final model go to a folder under "
              "runs/",
              "start it with horovodrun -np N python script.py (or mpirun)")


def _result(scan: Scan, call: cst.Call, small: cst.BaseSmallStatement) -> None:
    """`Refused` where more of what fit returns is read than ``.history``, which a Result has, too."""
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
    for name in NEITHER:
        if name in where:
            raise Refused(line, f"fit gets {name}", "Trainer has it in another form, or not at all",
                          "see docs/config.md (early_stop, checkpoint, schedule), and take it out of fit" + (
                              "; or run migrate with --to hvdtrain.keras" if name in KEPT_BY_KERAS else ""))
    if "x" not in where:
        raise Refused(line, f"{scan.short(call)} has no data", "fit needs x", "mend the script first")
    if "sample_weight" in where and "y" not in where:
        raise Refused(line, "fit gets sample_weight without y", "it belongs to arrays", "mend the script first")


def _batch(scan: Scan, call: cst.Call, where: dict[str, int]) -> cst.BaseExpression:
    """The batch size: of ``fit``, or of the dataset's own ``batch``."""
    size = call.args[where["batch_size"]].value if "batch_size" in where else None
    if size is not None and not (isinstance(size, cst.Name) and size.value == "None"):
        return size
    if "y" in where:
        return expression("32")
    node = scan.value(call.args[where["x"]].value)
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        given_size = argument(node, "batch_size", 0)
        if node.func.attr.value == "batch" and given_size is not None:
            return given_size.value
        node = node.func.value
    raise Refused(scan.line(call), f"the batch size of {scan.short(call.args[where['x']].value)} is not to be seen",
                  "Config needs it as global_batch",
                  "write Trainer(Config(global_batch=...)).fit(model, data) by hand")


def _config(scan: Scan, call: cst.Call, where: dict[str, int], batch: cst.BaseExpression) -> str:
    """``trainer = Trainer(Config(...))``."""
    epochs = scan.code(call.args[where["epochs"]].value) if "epochs" in where else "1"
    keys = [f"epochs={epochs}", f"global_batch={scan.code(batch)}"]
    if "shuffle" in where:
        keys.append(f"data=Data(shuffle={scan.code(call.args[where['shuffle']].value)})")
    if "verbose" in where:
        value = call.args[where["verbose"]].value
        if text_of(value) is None and scan.code(value) == "0":
            keys.append('progress="off"')
    return f"trainer = Trainer(Config({', '.join(keys)}))"


def _with_trainer(line: Any, text: str, said: list[cst.EmptyLine]) -> Any:
    """The line that makes the trainer, before the line that fits; ``said``: comments from among fit's arguments."""
    made: Any = cst.parse_statement(text)
    return cst.FlattenSentinel([made.with_changes(leading_lines=[*line.leading_lines, *said]),
                                line.with_changes(leading_lines=[])])


def _fit(new: cst.Call, where: dict[str, int]) -> cst.Call:
    """``trainer.fit(model, ((x, y), (x_test, y_test)))``."""
    assert isinstance(new.func, cst.Attribute)
    value = {name: new.args[index].value for name, index in where.items()}
    names = [n for n in ("x", "y", "sample_weight") if n in value]
    data = _tuple([value[n] for n in names]) if len(names) > 1 else value["x"]
    test = value.get("validation_data")
    if test is not None and not (isinstance(test, cst.Name) and test.value == "None"):
        data = _tuple([data, test])
    fit = new.with_changes(func=expression("trainer.fit"))
    more = [arg("_", name).with_changes(value=value[name]) for name in HANDED if name in value]
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    args = [cst.Arg(new.func.value), cst.Arg(data), *more]
    return fit.with_changes(args=[a.with_changes(comma=comma) for a in args[:-1]] + args[-1:],
                            whitespace_before_args=cst.SimpleWhitespace(""))


def _tuple(values: list[cst.BaseExpression]) -> cst.Tuple:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return cst.Tuple([cst.Element(v, comma=comma) for v in values[:-1]] + [cst.Element(values[-1])])


def _saves(scan: Scan, made: Plan, fit: cst.Call) -> None:
    """``model.save(...)`` behind the fit, on rank 0."""
    known = models(scan)
    for call in scan.methods("save", "save_weights", "export"):
        assert isinstance(call.func, cst.Attribute)
        if scan.code(call.func.value) not in known:
            continue
        if scan.scope(call) is not scan.scope(fit) or scan.line(call) < scan.line(fit):
            raise Refused(scan.line(call), f"{scan.short(call)} is not right behind fit",
                          "only there is it known which rank this is", "move it behind fit, then run migrate again")
        made.edits.put(sole(scan, call), lambda new: guarded(new, ROOT))
