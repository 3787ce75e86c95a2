"""A traced training step and nothing around it, on one process or each rank: what Keras' ``train_on_batch`` runs."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import tensorflow_common as common


def prepare(setup: Setup, compiled: bool = False) -> Prepared:
    """Tape, gradients, SGD, in one `tf.function`; ``compiled``: by XLA."""
    import tensorflow as tf

    model, loss, optimizer = common.build(setup, setup.begin)

    @tf.function(jit_compile=compiled)
    def train(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(model, batch)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    return common.prepared(setup, model, train, "none")
