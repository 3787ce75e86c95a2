"""Habits that Keras 3 no longer bears: Horovod's own wrappers, XLA around a collective, words of Keras 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from hvdtrain.commands.migrate.finding import Finding
from hvdtrain.commands.migrate.rules import keras2
from hvdtrain.commands.migrate.scan import Scan, argument, is_true


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
    """What Keras 3 refuses, where the diff does not put its new form."""
    if context.kind not in ("horovod_keras", "tf_distribute", "keras_fit", "hvdtrain"):
        return
    for word in keras2.words(scan):
        if word.edit is None or not context.edited:
            yield Finding(scan.line(word.node), "by hand", word.what, word.why, word.do)


HABITS = (silent_divergence, compiled_by_xla, keras_2_words)
