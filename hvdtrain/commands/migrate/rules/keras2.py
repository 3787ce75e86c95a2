"""Calls of Keras 2 and TensorFlow 1 and their replacements in Keras 3; ``keras_files`` has the names of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import libcst as cst

from hvdtrain.commands.migrate.edit import Edits, arg, expression, statement, with_args
from hvdtrain.commands.migrate.finding import OldCall, Rewrite
from hvdtrain.commands.migrate.rules import keras_files
from hvdtrain.commands.migrate.scan import Scan, argument, local_name, name_of, starred

QUEUES = ("workers", "use_multiprocessing", "max_queue_size")
GENERATORS = {"fit_generator": ("x", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data",
                                "validation_steps"),
              "evaluate_generator": ("x", "steps"), "predict_generator": ("x", "steps")}
"""Their first parameters, which all of Keras 2 had in this order, by the names of fit, evaluate and predict."""
ITERATORS = ("ImageDataGenerator", "Iterator", "NumpyArrayIterator", "DirectoryIterator")
LEGACY = "keras.preprocessing.image"


def rewrite(scan: Scan, made: Rewrite) -> None:
    """Plan all replacements that have an edit, and report them."""
    for word in replacements(scan):
        if word.edit is not None:
            word.edit(made.edits)
            made.tell(scan.line(word.node), "changed", word.what, word.why, f"nothing, the diff does: {word.do}")


def replacements(scan: Scan) -> list[OldCall]:
    """Return all calls of Keras 2 and TensorFlow 1 in a script."""
    return [*sessions(scan), *_generators(scan), *_by_call(scan), *_iterators(scan)]


def _by_call(scan: Scan) -> Iterator[OldCall]:
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        if "optimizers." in scan.dotted(call.func):
            yield from _optimizer(scan, call)
        elif last == "variables" and isinstance(call.func, cst.Attribute) and not call.args and (
                sure := is_optimizer(scan, call.func.value)) is not None:
            yield OldCall(call, f"{scan.short(call)} calls an attribute that is a list in Keras 3",
                          f"write {scan.short(call.func)} without ()", _uncalled(call) if sure else None)
        elif isinstance(call.func, cst.Attribute) and last in ("fit", "evaluate", "predict", "compile"):
            gone = ("experimental_run_tf_function",) if last == "compile" else QUEUES
            given = [word for word in gone if argument(call, word)]
            if given:
                yield OldCall(call, f"{last} gets {', '.join(given)}, which Keras 3 does not have",
                              "remove it" + ("" if last == "compile" else "; a PyDataset takes workers itself"),
                              _without(call, given))
        else:
            yield from keras_files.replacements(scan, call, last)
            yield from _values(scan, call, last)


def _optimizer(scan: Scan, call: cst.Call) -> Iterator[OldCall]:
    lr = argument(call, "lr")
    if argument(call, "decay") is not None:
        yield OldCall(call, "Keras 3 ignores decay= of an optimizer",
                      "give learning_rate a keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)",
                      why="it warns once and trains with a constant rate")
    if lr is not None and lr.keyword is not None and argument(call, "learning_rate") is None:
        yield OldCall(lr, "lr= of an optimizer is not in Keras 3", "write learning_rate=", _renamed(lr.keyword))
    if ".optimizers.legacy." in scan.dotted(call.func):
        yield OldCall(call, f"{scan.short(call.func)} is not in Keras 3",
                      "use the optimizer of that name without legacy")


def _values(scan: Scan, call: cst.Call, last: str) -> Iterator[OldCall]:
    dotted = scan.dotted(call.func)
    if dotted in ("keras.backend.get_value", "keras.backend.set_value"):
        yield OldCall(call, f"{scan.short(call.func)} is not in Keras 3",
                      "use keras.ops.convert_to_numpy(x), float(x), or x.assign(...)")
    elif dotted == "tensorflow.keras.backend.set_value":
        yield OldCall(call, f"{scan.short(call.func)} does not accept a variable of Keras 3", "use x.assign(...)")
    elif last in ("get_weights", "set_weights") and isinstance(call.func, cst.Attribute) and is_optimizer(
            scan, call.func.value) is not None:
        what, why = f"{scan.short(call.func)} is not in Keras 3", OldCall.why
        if last == "set_weights":
            what = f"{scan.short(call.func)} takes different values in Keras 3"
            why = "its list begins with iteration and learning_rate, and an optimizer without variables refuses it"
        yield OldCall(call, what, "use its variables: [v.numpy() for v in optimizer.variables], and v.assign(value) "
                      "for each", None, why)


def is_optimizer(scan: Scan, node: cst.BaseExpression) -> bool | None:
    """Return True where all that binds a name makes an optimizer; False where only its name says so; None else."""
    name = name_of(node) or ""
    made = [_made(scan, binder) for binder in scan.binders(name, node)] if isinstance(node, cst.Name) else []
    if made and all(isinstance(call, cst.Call) and (
            "optimizers." in scan.dotted(call.func) or scan.means(call.func, "DistributedOptimizer"))
            for call in made):
        return True
    return False if "opt" in name.rpartition(".")[2].lower() else None


def _made(scan: Scan, binder: cst.CSTNode) -> cst.BaseExpression | None:
    target = scan.parent.get(binder)
    assign = scan.parent.get(target) if isinstance(target, cst.AssignTarget) else None
    return assign.value if isinstance(assign, cst.Assign) else None


def _generators(scan: Scan) -> Iterator[OldCall]:
    for call in scan.methods(*GENERATORS):
        assert isinstance(call.func, cst.Attribute)
        name = call.func.attr.value
        order, plain = GENERATORS[name], name.partition("_")[0]
        unnamed = [a for a in call.args if a.keyword is None]
        sure = not starred(call) and len(unnamed) <= len(order)
        yield OldCall(call, f"{name} is not in Keras 3", f"call {plain}, which also accepts generators"
                      + ("" if sure else ", with its arguments by name"),
                      _plain(scan, call, plain, order) if sure else None)
    for call in scan.methods("fit", "fit_generator"):
        old = scan.code(call.func).endswith("fit_generator")
        given = {word: argument(call, word, GENERATORS["fit_generator"].index(word) if old else None)
                 for word in ("steps_per_epoch", "validation_steps")}
        steps = [word for word, arg in given.items() if arg is not None and scan.code(arg.value) != "None"]
        if steps and (old or _flows(scan, call)):
            yield OldCall(call, f"fit of a generator gets {' and '.join(steps)}", "remove it if the generator "
                          "has a length (flow, flow_from_directory, a PyDataset), and give each rank "
                          "its own shard of the data", None, "Keras 2 restarted such a generator in mid-epoch; in "
                          "Keras 3 the epoch ends there, even after few steps")


def _flows(scan: Scan, call: cst.Call) -> bool:
    x = argument(call, "x", 0)
    value = scan.value(x.value) if x is not None else None
    return isinstance(value, cst.Call) and (name_of(value.func) or scan.code(value.func)).rpartition(".")[2] in (
        "flow", "flow_from_directory", "flow_from_dataframe")


def _plain(scan: Scan, call: cst.Call, name: str, order: tuple[str, ...]) -> Callable[[Edits], None]:
    """Plan to call ``name`` with all arguments by name, without those of Keras 2's queues, and as silent as it was."""
    width = scan.width(call)

    def change(new: cst.Call) -> cst.Call:
        args: list[cst.Arg] = []
        for index, old in enumerate(new.args):
            word = old.keyword.value if old.keyword is not None else order[index]
            word = "x" if word == "generator" else word
            if word in QUEUES:
                continue
            first = word == "x" and not args
            args.append(old.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT) if first else
                        arg("_", word).with_changes(value=old.value, comma=old.comma,
                                                    whitespace_after_arg=old.whitespace_after_arg))
        if name != "fit" and argument(call, "verbose") is None:
            args.append(arg("0", "verbose"))
        assert isinstance(new.func, cst.Attribute)
        made = with_args(new, [_closer(a, width, len("_generator")) for a in args])
        return made.with_changes(func=new.func.with_changes(attr=cst.Name(name)))

    return lambda edits: edits.put(call, change)


def _closer(given: cst.Arg, width: int, by: int) -> cst.Arg:
    """Return an argument whose next line stands below the opening parenthesis, which was at ``width``, again."""
    space = given.comma.whitespace_after if isinstance(given.comma, cst.Comma) else None
    if not isinstance(space, cst.ParenthesizedWhitespace) or len(space.last_line.value) != width:
        return given
    return given.with_deep_changes(space.last_line, value=" " * (width - by))


def _iterators(scan: Scan) -> Iterator[OldCall]:
    what, do = "ImageDataGenerator is not in Keras 3's own name space", f"take it from tensorflow.{LEGACY}"
    for node in scan.all(cst.ImportFrom):
        module = name_of(node.module) if node.module is not None else ""
        if isinstance(node.names, cst.ImportStar) or node.relative or module not in (LEGACY, "keras.preprocessing"):
            continue
        names = {name_of(alias.name) for alias in node.names}
        whole = module == "keras.preprocessing" and any(
            scan.dotted(used) == f"{LEGACY}.{word}" for alias in node.names for word in ITERATORS
            for used in scan.all(cst.Attribute) if (name_of(used) or "").startswith(local_name(alias) + "."))
        if whole or module == LEGACY and names & set(ITERATORS):
            yield OldCall(node, what, do, _moved(node, f"tensorflow.{module}"))
    for used in scan.all(cst.Attribute):
        text = name_of(used) or ""
        if text == scan.dotted(used) and text in [f"{LEGACY}.{word}" for word in ITERATORS]:
            tf = next((name for name, means in scan.imports.items() if means == "tensorflow"), "")
            yield OldCall(used, what, do, _swapped(used, f"{tf}.{text}") if tf else None)


def _renamed(keyword: cst.Name) -> Callable[[Edits], None]:
    return lambda edits: edits.put(keyword, lambda new: new.with_changes(value="learning_rate"))


def _without(call: cst.Call, names: list[str]) -> Callable[[Edits], None]:
    return lambda edits: edits.put(call, lambda new: with_args(
        new, [a for a in new.args if not (a.keyword and a.keyword.value in names)]))


def _uncalled(call: cst.Call) -> Callable[[Edits], None]:
    return lambda edits: edits.put(call, lambda new: new.func)


def _moved(node: cst.ImportFrom, module: str) -> Callable[[Edits], None]:
    return lambda edits: edits.put(node, lambda new: new.with_changes(module=expression(module)))


def _swapped(node: cst.Attribute, text: str) -> Callable[[Edits], None]:
    return lambda edits: edits.swap(node, text)


OF_SESSIONS = ("ConfigProto", "set_session", "Session", "get_session", "enable_eager_execution")
PIN_DO = "use tf.config.set_visible_devices and tf.config.experimental.set_memory_growth"
IDLE = "TensorFlow 2 has it only under compat.v1, and Keras 3 uses no sessions"
TENSORFLOWS = ("tensorflow", "tensorflow.compat.v1")


def sessions(scan: Scan) -> Iterator[OldCall]:
    """Yield each configuration that can be replaced whole, and every other use of sessions."""
    seen: set[cst.CSTNode] = set()
    for call in scan.calls("ConfigProto"):
        found = _Pin.of(scan, call)
        if found is not None:
            seen |= {node for line in found.lines for node in scan.inner(line)}
            yield OldCall(call, "GPUs are pinned by a session of TensorFlow 1", PIN_DO, found.edit)
    for call in scan.all(cst.Call):
        dotted, last = scan.dotted(call.func), (name_of(call.func) or "").rpartition(".")[2]
        if last in OF_SESSIONS and ("tensorflow" in dotted or "keras" in dotted) and call not in seen:
            idle = "compat.v1" in dotted and ".keras." not in dotted
            yield OldCall(call, f"{scan.short(call.func)} belongs to TensorFlow 1", PIN_DO, None,
                          IDLE if idle else OldCall.why)


class _Pin:
    """Lines of one configuration: its making, its settings, its session. ``index``: code of this rank's GPU."""

    def __init__(self, scan: Scan, tf: str, lines: list[cst.SimpleStatementLine], index: str, growth: bool) -> None:
        self.lines = lines
        self._tf, self._index, self._growth = tf, index, growth
        self._gpus, self._gpu = ("gpus", "gpu") if not {"gpus", "gpu"} & scan.bound else ("rank_gpus", "rank_gpu")

    @staticmethod
    def of(scan: Scan, call: cst.Call) -> _Pin | None:
        """Return the lines of the configuration that ``call`` makes; None where it is used for anything else."""
        up = scan.parent[call]
        target = up.targets[0].target if isinstance(up, cst.Assign) and len(up.targets) == 1 else None
        tf = (name_of(call.func) or "").removesuffix(".ConfigProto").removesuffix(".compat.v1")
        if not isinstance(target, cst.Name) or call.args or scan.imports.get(tf) not in TENSORFLOWS or (
                scan.bindings(target.value) != 1):
            return None
        lines, index, growth, ends = [scan.statement(call)], "", False, False
        for use in scan.uses(target.value):
            line = scan.statement(use)
            small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
            text = scan.code(small) if small is not None else ""
            value = small.value if isinstance(small, cst.Assign) else None
            if text.startswith(f"{target.value}.gpu_options.allow_growth =") and isinstance(value, cst.Name):
                growth = value.value == "True"
            elif text.startswith(f"{target.value}.gpu_options.visible_device_list =") and isinstance(
                    value, cst.Call) and name_of(value.func) == "str" and len(value.args) == 1:
                index = scan.code(value.args[0].value)
            elif isinstance(small, cst.Expr) and _starts(scan, small.value, target.value):
                ends = True
            else:
                return None
            lines.append(line)
        blocks = {id(scan.parent[line]) for line in lines}
        plain = [line for line in lines if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1]
        if not ends or len(blocks) > 1 or len(plain) != len(lines):
            return None
        return _Pin(scan, tf, plain, index, growth)

    def edit(self, edits: Edits) -> None:
        first, last = self.lines[0], self.lines[-1]
        texts = [f'{self._gpus} = {self._tf}.config.list_physical_devices("GPU")']
        if self._growth:
            texts.append(f"for {self._gpu} in {self._gpus}:\n"
                         f"    {self._tf}.config.experimental.set_memory_growth({self._gpu}, True)")
        if self._index:
            texts.append(f"if {self._gpus}:\n"
                         f'    {self._tf}.config.set_visible_devices({self._gpus}[{self._index}], "GPU")')
        blank = max((i for i, line in enumerate(first.leading_lines) if line.comment is None), default=-1)
        said = first.leading_lines[blank + 1:]
        for line in self.lines[:-1]:
            edits.remove(line)
        new = [statement(text) for text in texts]
        edits.put(last, lambda old: cst.FlattenSentinel(
            [new[0].with_changes(leading_lines=[*old.leading_lines, *said]), *new[1:]]))


def _starts(scan: Scan, node: cst.BaseExpression, config: str) -> bool:
    """Return whether an expression is ``set_session(Session(config=config))``, or eager execution with it."""
    if not isinstance(node, cst.Call):
        return False
    if scan.means(node.func, "enable_eager_execution"):
        return len(node.args) == 1 and scan.code(node.args[0].value) == config
    inner = node.args[0].value if len(node.args) == 1 and scan.means(node.func, "set_session") else None
    if not isinstance(inner, cst.Call) or not scan.means(inner.func, "Session") or len(inner.args) != 1:
        return False
    given = argument(inner, "config")
    return given is not None and scan.code(given.value) == config
