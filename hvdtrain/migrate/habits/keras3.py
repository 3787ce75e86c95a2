"""Habits that Keras 3 no longer bears: Horovod's own wrappers, XLA around a collective, words of Keras 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.migrate.finding import Finding
from hvdtrain.migrate.rules.keras_calls import models
from hvdtrain.migrate.scan import Scan, argument, is_true, name_of, text_of


def silent_divergence(scan: Scan, context: Any) -> Iterator[Finding]:
    """Horovod's DistributedOptimizer with Keras' fit."""
    if context.kind != "horovod_keras" or not any(True for _ in scan.methods("fit", "compile")):
        return
    for call in scan.calls("DistributedOptimizer"):
        if scan.dotted(call.func).startswith("horovod."):
            yield Finding(scan.line(call), "unsafe", "Horovod's DistributedOptimizer does nothing under Keras 3",
                          "fit runs without an error, no gradient is exchanged, and every rank trains a model "
                          "of its own",
                          "import hvdtrain.keras in its place" + (": the diff does" if context.edited else ""))


def compiled_by_xla(scan: Scan, context: Any) -> Iterator[Finding]:
    """``jit_compile=True``, which no collective of MPI or Horovod goes through."""
    if context.kind in ("horovod_torch", "ddp", "data_parallel", "accelerate"):
        return
    for call in scan.all(cst.Call):
        if is_true(argument(call, "jit_compile")):
            yield Finding(scan.line(call), "unsafe", f"{scan.short(call.func)} asks for XLA (jit_compile=True)",
                          "XLA cannot compile the exchange of gradients between processes",
                          "set jit_compile=False")


def keras_2_words(scan: Scan, context: Any) -> Iterator[Finding]:
    """What Keras 3 refuses and has no single new form for."""
    if context.kind not in ("horovod_keras", "tf_distribute", "keras_fit"):
        return
    for call in scan.all(cst.Call):
        dotted, last = scan.dotted(call.func), (name_of(call.func) or "").rpartition(".")[2]
        if last in ("fit_generator", "evaluate_generator", "predict_generator"):
            yield _words(scan, call, f"{last} is not in Keras 3", f"call {last.partition('_')[0]} with a PyDataset")
        elif "optimizers." in dotted and argument(call, "decay") is not None:
            yield _words(scan, call, "decay= of an optimizer is not in Keras 3",
                         "give learning_rate a keras.optimizers.schedules.InverseTimeDecay")
        elif last in ("fit", "evaluate", "predict") and isinstance(call.func, cst.Attribute) and (
                gone := [w for w in ("workers", "use_multiprocessing", "max_queue_size") if argument(call, w)]):
            yield _words(scan, call, f"{last} gets {', '.join(gone)}", "give them to the PyDataset that makes batches")
        elif last == "compile" and argument(call, "experimental_run_tf_function") is not None and not context.edited:
            yield _words(scan, call, "experimental_run_tf_function is not in Keras 3", "take it out")
        elif last == "variables" and isinstance(call.func, cst.Attribute) and _is_optimizer(scan, call.func.value):
            yield _words(scan, call, f"{scan.short(call)} calls what is a list in Keras 3",
                         f"write {scan.short(call.func)} without ()")
        elif last in ("save", "save_model") and (saved := _folder(scan, call)):
            yield _words(scan, call, f"a model is saved to {saved!r}",
                         "name a file that ends with .keras, or use model.export for a SavedModel")
        elif dotted in ("keras.backend.get_value", "keras.backend.set_value"):
            yield _words(scan, call, f"{scan.short(call.func)} is not in Keras 3",
                         "use keras.ops.convert_to_numpy(x), float(x), or x.assign(...)")
        elif ".optimizers.legacy." in dotted:
            yield _words(scan, call, f"{scan.short(call.func)} is not in Keras 3", "take the optimizer of that name "
                         "without legacy")
        elif last == "ModelCheckpoint":
            path = argument(call, "filepath", 0)
            text = (text_of(path.value) or "") if path else ""
            weights = is_true(argument(call, "save_weights_only", 4))
            if text and not text.endswith(".weights.h5" if weights else ".keras"):
                yield _words(scan, call, f"ModelCheckpoint to {text!r}",
                             "name it .weights.h5 with save_weights_only, else .keras")
        elif last in ("ConfigProto", "set_session", "Session", "get_session") and (
                "tensorflow" in dotted or "keras" in dotted):
            yield _words(scan, call, f"{scan.short(call.func)} is of TensorFlow 1",
                         "use tf.config.set_visible_devices and tf.config.experimental.set_memory_growth")


def _is_optimizer(scan: Scan, node: cst.BaseExpression) -> bool:
    """Whether an expression is an optimizer, by its name or by what it is made of."""
    value = scan.value(node)
    return "opt" in (name_of(node) or "").rpartition(".")[2].lower() or isinstance(value, cst.Call) and (
        "optimizers." in scan.dotted(value.func) or scan.means(value.func, "DistributedOptimizer"))


def _folder(scan: Scan, call: cst.Call) -> str:
    """The path that a Keras model is saved to where it has no ending that Keras 3 knows; else ""."""
    is_function = scan.means(call.func, "models.save_model", "saving.save_model")
    owner = scan.code(call.func.value) if isinstance(call.func, cst.Attribute) and not is_function else ""
    if not is_function and (not owner or scan.dotted(call.func) or owner not in models(scan)
                            and "model" not in owner.lower()):
        return ""
    path = argument(call, "filepath", 1 if is_function else 0)
    text = text_of(path.value) if path is not None else None
    return "" if text is None or text.endswith((".keras", ".h5", ".hdf5")) else text


def _words(scan: Scan, node: cst.CSTNode, what: str, do: str) -> Finding:
    return Finding(scan.line(node), "by hand", what, "Keras 3 ends with an error there", do)


HABITS = (silent_divergence, compiled_by_xla, keras_2_words)
