"""Common parts of the TensorFlow peers: model, loss and optimizer from the seed, and the loop around a traced step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.peers import Prepared, Setup
from benchmarks.workloads import LR, MOMENTUM


def build(setup: Setup, prepare: Callable[[], None] = lambda: None) -> tuple[Any, Callable[..., Any], Any]:
    """(model, ``loss(model, batch)``: the mean over the batch, optimizer), the weights from the seed."""
    import keras
    import tensorflow as tf

    from hvdtrain.backends.model_spec import build_spec

    spec = build_spec(setup.workload.model("tensorflow"), setup.workload.args, prepare)

    def loss(model: Any, batch: tuple[Any, ...]) -> Any:
        if spec.task is not None:
            loss_sum, weight = spec.task(model, batch)
            return loss_sum / tf.cast(weight, loss_sum.dtype)
        logits = model(batch[0], training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits))

    optimizer = keras.optimizers.SGD(learning_rate=LR, momentum=MOMENTUM)
    optimizer.build(spec.model.trainable_variables)
    return spec.model, loss, optimizer


def prepared(setup: Setup, model: Any, train: Callable[..., Any], wire: str) -> Prepared:
    """Return the loop around ``train(batch) -> loss``, a `tf.function`."""
    import tensorflow as tf

    last: list[Any] = [None]

    def step(i: int) -> None:
        last[0] = train(tuple(tf.convert_to_tensor(x) for x in setup.batches[i % len(setup.batches)]))

    return Prepared(step, lambda: float(last[0]), partial(arrays_of, model), wire, partial(sync, model))


def sync(model: Any) -> None:
    """Wait for the device: a value that is read comes after all the work that was begun before it."""
    model.trainable_variables[-1].numpy()


def arrays_of(model: Any) -> list[np.ndarray]:
    """Return copies of the trainable variables."""
    return [np.array(v.numpy()) for v in model.trainable_variables]
