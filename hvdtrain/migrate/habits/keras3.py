"""Habits that Keras 3 no longer bears: Horovod's own wrappers, XLA around a collective, words of Keras 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.migrate.finding import Finding
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


def _words(scan: Scan, node: cst.CSTNode, what: str, do: str) -> Finding:
    return Finding(scan.line(node), "by hand", what, "Keras 3 ends with an error there", do)


HABITS = (silent_divergence, compiled_by_xla, keras_2_words)
