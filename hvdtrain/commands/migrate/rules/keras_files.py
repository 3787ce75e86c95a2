"""Names of a Keras script's files as Keras 3 takes them: models in .keras or .h5, weights in .weights.h5."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import libcst as cst

from hvdtrain.commands.migrate.edit import Edits, with_args
from hvdtrain.commands.migrate.finding import OldCall
from hvdtrain.commands.migrate.rules.keras_calls import models
from hvdtrain.commands.migrate.scan import Scan, argument, is_true, name_of

Literal = cst.SimpleString | cst.FormattedStringText

WEIGHTS: tuple[str, ...] = (".weights.h5",)
MODELS: tuple[str, ...] = (".keras", ".h5", ".hdf5")
FOREIGN = (".pt", ".pth", ".pkl", ".pickle", ".joblib", ".onnx", ".bin", ".json", ".txt", ".zip")
"""Endings of models and files of other libraries, which stay."""
OLD = (".h5", ".hdf5", ".hdf", ".keras", ".ckpt", ".tf", ".weights")
"""Endings that a new one replaces; any other is part of the name."""
READERS = {"save": 0, "save_weights": 0, "load_weights": 0, "load_model": 0, "save_model": 1, "ModelCheckpoint": 0,
           "exists": 0, "isfile": 0, "isdir": 0, "remove": 0, "unlink": 0, "open": 0, "getsize": 0, "getmtime": 0,
           "copy": 0, "copy2": 0, "copyfile": 0, "move": 0, "rename": 0}
"""Functions that a file's name is given to, and where: what has to follow when the name changes."""
GONE = ("save_format", "options")
"""Arguments that chose the format; Keras 3 reads it from the name."""


def replacements(scan: Scan, call: cst.Call, last: str) -> Iterator[OldCall]:
    """Yield what Keras 3 refuses in a call that saves or loads a model; ``last``: the name of what is called."""
    if last in ("save", "save_model") and (at := _of_model(scan, call, last)) is not None:
        new = ".h5" if _format(call) == "h5" else ".keras"
        yield from _renamed(scan, call, at, MODELS, new, "a model is saved as", "; model.export writes a SavedModel")
    elif last == "save_weights" and _is_method(scan, call):
        yield from _renamed(scan, call, 0, WEIGHTS, WEIGHTS[0], "weights are saved as", "")
    elif last == "load_weights" and _is_method(scan, call):
        yield from _checkpoint(scan, call)
    elif last == "ModelCheckpoint":
        weights = is_true(argument(call, "save_weights_only", 4))
        ends = WEIGHTS if weights else MODELS[:2]
        yield from _renamed(scan, call, 0, ends, ends[0], "ModelCheckpoint to", "")
        if argument(call, "period") is not None:
            yield OldCall(call, "ModelCheckpoint gets period, which Keras 3 does not have",
                          "write save_freq, a number of batches (or leave it out: once each epoch)")
    if last in ("save", "save_model", "save_weights") and _is_keras(scan, call, last) and any(
            argument(call, word) for word in GONE):
        gone = ", ".join(word for word in GONE if argument(call, word))
        yield OldCall(call, f"{last} gets {gone}, which Keras 3 does not have",
                      "remove it: the suffix of the name sets the format", _without_format(call))


def _renamed(scan: Scan, call: cst.Call, at: int, ends: tuple[str, ...], new: str, what: str,
             more: str) -> Iterator[OldCall]:
    """Yield a path whose ending is none of ``ends``, with the edit that makes it ``new``."""
    path = argument(call, "filepath", at)
    literal = tail(scan, path.value) if path is not None else None
    text = _text(literal)
    if literal is None or path is None or not text or text.endswith(ends):
        return
    shown = scan.value(path.value)
    whole = _text(shown) if isinstance(shown, cst.SimpleString) else None
    sure = not text.endswith(("/", "\\")) and (isinstance(literal, cst.FormattedStringText) or literal.quote in "'\"")
    owner, _, method = (name_of(call.func) or "").rpartition(".")
    if method == "save" and owner not in models(scan):  # its name says that it is a model, but not that it is Keras'
        sure = sure and not text.endswith(FOREIGN)
    yield OldCall(call, f"{what} {whole!r}" if whole else f"{what} {scan.short(path.value)}",
                  f"name it {' or '.join(ends)}{more}",
                  partial(_rename, scan, literal, new) if sure else None)


def _checkpoint(scan: Scan, call: cst.Call) -> Iterator[OldCall]:
    """Yield weights that are loaded from a checkpoint of TensorFlow, unless this script saves them too."""
    path = argument(call, "filepath", 0)
    literal = tail(scan, path.value) if path is not None else None
    text = _text(literal)
    if text and not text.endswith(MODELS) and not any(
            _text(one) == text for other in scan.methods("save_weights") for one in _literals(scan, other)):
        yield OldCall(call, f"weights are loaded from {text!r}",
                      "load that checkpoint of TensorFlow with Keras 2 (package tf_keras), and save it as .weights.h5")


def tail(scan: Scan, node: cst.BaseExpression) -> Literal | None:
    """Return the literal that a path ends with, through names, ``+``, ``/``, ``%``, ``join`` and f-strings."""
    node = scan.value(node)
    if isinstance(node, cst.SimpleString):
        return node
    if isinstance(node, cst.FormattedString) and node.parts:
        last = node.parts[-1]
        return last if isinstance(last, cst.FormattedStringText) else None
    if isinstance(node, cst.BinaryOperation):
        return tail(scan, node.left if isinstance(node.operator, cst.Modulo) else node.right)
    if isinstance(node, cst.ConcatenatedString):
        return tail(scan, node.right)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "format":
        return tail(scan, node.func.value)
    if isinstance(node, cst.Call) and node.args and (name_of(node.func) or "").rpartition(".")[2] in (
            "join", "str", "Path"):
        return tail(scan, node.args[-1].value)
    return None


def _text(literal: cst.CSTNode | None) -> str | None:
    if isinstance(literal, cst.SimpleString):
        return literal.evaluated_value if isinstance(literal.evaluated_value, str) else None
    return literal.value if isinstance(literal, cst.FormattedStringText) else None


def _literals(scan: Scan, call: cst.Call) -> list[Literal]:
    at = READERS.get((name_of(call.func) or scan.code(call.func)).rpartition(".")[2])
    path = argument(call, "filepath", at) if at is not None else None
    found = tail(scan, path.value) if path is not None else None
    return [] if found is None else [found]


def _rename(scan: Scan, literal: Literal, new: str, edits: Edits) -> None:
    """Plan the ending ``new`` for ``literal`` and for those like it that are paths in this script."""
    for call in scan.all(cst.Call):
        for one in _literals(scan, call):
            if one not in edits.changes and _text(one) == _text(literal):
                edits.put(one, partial(_with_ending, new=new))


def _with_ending(literal: Literal, new: str) -> Literal:
    end = literal.quote if isinstance(literal, cst.SimpleString) else ""
    text = literal.value.removesuffix(end)
    old = next((ending for ending in OLD if text.endswith(ending)), "")
    return literal.with_changes(value=text.removesuffix(old) + new + end)


def _of_model(scan: Scan, call: cst.Call, last: str) -> int | None:
    """Return the position of the path where a Keras model is saved; None for the ``save`` of anything else."""
    if scan.means(call.func, "models.save_model", "saving.save_model"):
        return 1
    owner = scan.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
    known = owner and not scan.dotted(call.func) and (owner in models(scan) or "model" in owner.lower())
    return 0 if known and last == "save" else None


def _is_method(scan: Scan, call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and not scan.dotted(call.func) and not any(
        function.name.value == call.func.attr.value for function in scan.all(cst.FunctionDef))


def _is_keras(scan: Scan, call: cst.Call, last: str) -> bool:
    return _is_method(scan, call) if last == "save_weights" else _of_model(scan, call, last) is not None


def _format(call: cst.Call) -> str:
    given = argument(call, "save_format")
    return (_text(given.value) or "") if given is not None else ""


def _without_format(call: cst.Call) -> Callable[[Edits], None]:
    return lambda edits: edits.put(call, lambda new: with_args(
        new, [a for a in new.args if not (a.keyword and a.keyword.value in GONE)]))
