"""Horovod alone with TensorFlow: its DistributedGradientTape in one traced step, all settings as by default.

Horovod's Keras optimizer does not work with Keras 3 (its ranks drift apart without an error); its tape does.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers import Prepared, Setup
from benchmarks.peers import tensorflow_common as common


def prepare(setup: Setup) -> Prepared:
    """Return the tape averages the gradients over ranks; rank 0's variables go to all."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    model, loss, optimizer = common.build(setup, setup.begin)
    hvd.init()
    assert hvd.size() == setup.control.size, "Horovod did not find the ranks"
    variables = [v.value for v in model.trainable_variables]
    hvd.broadcast_variables(variables, root_rank=0)

    @tf.function(jit_compile=False)
    def train(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(model, batch)
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(value, variables), model.trainable_variables)
        return value

    return common.prepared(setup, model, train, "horovod")
