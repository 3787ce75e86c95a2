"""Words of Keras 2 and TensorFlow 1, and what Keras 3 wants in their place.

Owns the list of them: each `Word` says what to do by hand, and has an edit where Keras 3 has one form that means the
same. The pinning of GPUs by a session of TensorFlow 1 is ``session``'s, the names of files are ``keras_files``'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import libcst as cst

from hvdtrain.commands.migrate.edit import Edits, arg, expression, with_args
from hvdtrain.commands.migrate.rules import Plan, Word, keras_files, session
from hvdtrain.commands.migrate.scan import Scan, argument, local_name, name_of, starred

QUEUES = ("workers", "use_multiprocessing", "max_queue_size")
GENERATORS = {"fit_generator": ("x", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data",
                                "validation_steps"),
              "evaluate_generator": ("x", "steps"), "predict_generator": ("x", "steps")}
"""Their first parameters, which all of Keras 2 had in this order, by the names of fit, evaluate and predict."""
ITERATORS = ("ImageDataGenerator", "Iterator", "NumpyArrayIterator", "DirectoryIterator")
LEGACY = "keras.preprocessing.image"


def rewrite(scan: Scan, made: Plan) -> None:
    """Plan the edits of all words that have one, and tell of them."""
    for word in words(scan):
        if word.edit is not None:
            word.edit(made.edits)
            made.tell(scan.line(word.node), "changed", word.what, word.why, f"nothing, the diff does: {word.do}")


def words(scan: Scan) -> list[Word]:
    """All words of Keras 2 and TensorFlow 1 that are found in a script."""
    return [*session.words(scan), *_generators(scan), *_by_call(scan), *_iterators(scan)]


def _by_call(scan: Scan) -> Iterator[Word]:
    for call in scan.all(cst.Call):
        last = (name_of(call.func) or "").rpartition(".")[2]
        if "optimizers." in scan.dotted(call.func):
            yield from _optimizer(scan, call)
        elif last == "variables" and isinstance(call.func, cst.Attribute) and not call.args and (
                sure := is_optimizer(scan, call.func.value)) is not None:
            yield Word(call, f"{scan.short(call)} calls what is a list in Keras 3",
                       f"write {scan.short(call.func)} without ()", _uncalled(call) if sure else None)
        elif isinstance(call.func, cst.Attribute) and last in ("fit", "evaluate", "predict", "compile"):
            gone = ("experimental_run_tf_function",) if last == "compile" else QUEUES
            given = [word for word in gone if argument(call, word)]
            if given:
                yield Word(call, f"{last} gets {', '.join(given)}, which Keras 3 does not know",
                           "take it out" + ("" if last == "compile" else "; a PyDataset takes workers itself"),
                           _without(call, given))
        else:
            yield from keras_files.words(scan, call, last)
            yield from _values(scan, call, last)


def _optimizer(scan: Scan, call: cst.Call) -> Iterator[Word]:
    lr = argument(call, "lr")
    if argument(call, "decay") is not None:
        yield Word(call, "Keras 3 ignores decay= of an optimizer",
                   "give learning_rate a keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)",
                   why="it warns once and trains on with a constant rate")
    if lr is not None and lr.keyword is not None and argument(call, "learning_rate") is None:
        yield Word(lr, "lr= of an optimizer is not in Keras 3", "write learning_rate=", _renamed(lr.keyword))
    if ".optimizers.legacy." in scan.dotted(call.func):
        yield Word(call, f"{scan.short(call.func)} is not in Keras 3", "take the optimizer of that name without legacy")


def _values(scan: Scan, call: cst.Call, last: str) -> Iterator[Word]:
    """Values of Keras 2's backend and optimizers."""
    dotted = scan.dotted(call.func)
    if dotted in ("keras.backend.get_value", "keras.backend.set_value"):
        yield Word(call, f"{scan.short(call.func)} is not in Keras 3",
                   "use keras.ops.convert_to_numpy(x), float(x), or x.assign(...)")
    elif dotted == "tensorflow.keras.backend.set_value":
        yield Word(call, f"{scan.short(call.func)} does not take a variable of Keras 3", "use x.assign(...)")
    elif last in ("get_weights", "set_weights") and isinstance(call.func, cst.Attribute) and is_optimizer(
            scan, call.func.value) is not None:
        what, why = f"{scan.short(call.func)} is not in Keras 3", Word.why
        if last == "set_weights":
            what = f"{scan.short(call.func)} takes other values in Keras 3"
            why = "its list begins with iteration and learning_rate, and an optimizer without variables refuses it"
        yield Word(call, what, "use its variables: [v.numpy() for v in optimizer.variables], and v.assign(value) for "
                   "each", None, why)


def is_optimizer(scan: Scan, node: cst.BaseExpression) -> bool | None:
    """True where all that binds a name is the making of an optimizer; False where its name alone says so; None else."""
    name = name_of(node) or ""
    made = [_made(scan, binder) for binder in scan.binders(name, node)] if isinstance(node, cst.Name) else []
    if made and all(isinstance(call, cst.Call) and (
            "optimizers." in scan.dotted(call.func) or scan.means(call.func, "DistributedOptimizer"))
            for call in made):
        return True
    return False if "opt" in name.rpartition(".")[2].lower() else None


def _made(scan: Scan, binder: cst.CSTNode) -> cst.BaseExpression | None:
    """What a name is given where it is bound by a plain assignment."""
    target = scan.parent.get(binder)
    assign = scan.parent.get(target) if isinstance(target, cst.AssignTarget) else None
    return assign.value if isinstance(assign, cst.Assign) else None


# --- generators ------------------------------------------------------------------------------------------------


def _generators(scan: Scan) -> Iterator[Word]:
    """``fit_generator`` and its kin: ``fit`` takes generators, too."""
    for call in scan.methods(*GENERATORS):
        assert isinstance(call.func, cst.Attribute)
        name = call.func.attr.value
        order, plain = GENERATORS[name], name.partition("_")[0]
        unnamed = [a for a in call.args if a.keyword is None]
        sure = not starred(call) and len(unnamed) <= len(order)
        yield Word(call, f"{name} is not in Keras 3", f"call {plain}, which takes generators, too"
                   + ("" if sure else ", with its arguments by name"),
                   _plain(scan, call, plain, order) if sure else None)
    for call in scan.methods("fit", "fit_generator"):
        old = scan.code(call.func).endswith("fit_generator")
        given = {word: argument(call, word, GENERATORS["fit_generator"].index(word) if old else None)
                 for word in ("steps_per_epoch", "validation_steps")}
        steps = [word for word, arg in given.items() if arg is not None and scan.code(arg.value) != "None"]
        if steps and (old or _flows(scan, call)):
            yield Word(call, f"fit of a generator gets {' and '.join(steps)}", "leave that out where the generator has "
                       "a length (flow, flow_from_directory, a PyDataset), and give each rank its own part of the data",
                       None, "Keras 2 began such a generator anew in mid-epoch; in Keras 3 the epoch ends there, "
                       "however few its steps")


def _flows(scan: Scan, call: cst.Call) -> bool:
    """Whether the data of a ``fit`` are what an ImageDataGenerator gives."""
    x = argument(call, "x", 0)
    value = scan.value(x.value) if x is not None else None
    return isinstance(value, cst.Call) and (name_of(value.func) or scan.code(value.func)).rpartition(".")[2] in (
        "flow", "flow_from_directory", "flow_from_dataframe")


def _plain(scan: Scan, call: cst.Call, name: str, order: tuple[str, ...]) -> Callable[[Edits], None]:
    """Call ``name`` with all arguments by name, without those of Keras 2's queues, and as silent as it was."""
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
    """An argument whose next line, which stood below the opening parenthesis at ``width``, stands there again."""
    space = given.comma.whitespace_after if isinstance(given.comma, cst.Comma) else None
    if not isinstance(space, cst.ParenthesizedWhitespace) or len(space.last_line.value) != width:
        return given
    return given.with_deep_changes(space.last_line, value=" " * (width - by))


# --- images ----------------------------------------------------------------------------------------------------


def _iterators(scan: Scan) -> Iterator[Word]:
    """ImageDataGenerator, which Keras 3 has under tensorflow.keras alone."""
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
            yield Word(node, what, do, _moved(node, f"tensorflow.{module}"))
    for used in scan.all(cst.Attribute):
        text = name_of(used) or ""
        if text == scan.dotted(used) and text in [f"{LEGACY}.{word}" for word in ITERATORS]:
            tf = next((name for name, means in scan.imports.items() if means == "tensorflow"), "")
            yield Word(used, what, do, _swapped(used, f"{tf}.{text}") if tf else None)


# --- edits -----------------------------------------------------------------------------------------------------


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
