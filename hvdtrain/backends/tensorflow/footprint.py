"""Bytes that a Keras model and its optimizer hold while they train, planned and measured.

Owns the count of optimizer state without making it for the whole model. The plan is `hvdtrain.planning.memory`'s.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.optim import alike
from hvdtrain.backends.tensorflow.optimizer import Optimizer
from hvdtrain.core.protocols.types import itemsize
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.planning.memory.facts import Model, Slots

SMALL = 3
"""Elements of the vectors that stand in for variables."""


def model_bytes(parts: ModelParts) -> Model:
    """Return what is known of a model and its optimizer before the first step."""
    params, optimizer = parts.params, parts.optimizer
    assert isinstance(optimizer, Optimizer)
    own = {id(v) for v in parts.model.trainable_variables}
    others = [v for v in parts.model.variables if id(v) not in own]
    slot, common = Slots(0.0), state_now(parts)  # state of other shapes than the variables': as it was made
    if optimizer.elementwise:
        slot, common = _by_vectors(optimizer.own)
    return Model(params.specs, sum(map(nbytes, others)), [slot] * len(params.specs), common, optimizer.elementwise,
                 "tensorflow")


def _by_vectors(own: Any) -> tuple[Slots, int]:
    """Return (what an optimizer like ``own`` keeps of each variable, bytes that it keeps once), by small vectors."""
    made = [alike(own) for _ in range(2)]
    held = []
    for n_variables, optimizer in enumerate(made, 1):
        optimizer.build([keras.Variable(keras.ops.zeros((SMALL,))) for _ in range(n_variables)])
        held.append(optimizer.variables)
    one, two = held
    shaped = sum(itemsize(_dtype(v)) for v in one if tuple(v.shape) == (SMALL,))
    fixed = sum(nbytes(v) for v in two) - sum(nbytes(v) for v in one) - shaped * SMALL
    common = sum(nbytes(v) for v in one) - shaped * SMALL - fixed
    return Slots(float(shaped), fixed), common


def state_now(parts: ModelParts) -> int:
    """Return the bytes of the optimizer's state that are there already."""
    assert isinstance(parts.optimizer, Optimizer)
    return sum(map(nbytes, parts.optimizer.own.variables))


def traced(parts: ModelParts, batch: object) -> None:
    """Do nothing: a graph's memory is its executor's affair, and is measured."""


def _dtype(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def nbytes(variable: Any) -> int:
    """Return the bytes of a Keras variable."""
    n = 1
    for length in variable.shape:
        n *= int(length)
    return n * itemsize(_dtype(variable))


def held(parts: ModelParts) -> dict[str, int | None]:
    """Return the bytes of the model's variables and of optimizer state of this rank.

    Gradients are None: they live within a graph, or in the memory of their buckets.
    """
    model: Any = parts.model
    return {"parameters": sum(map(nbytes, model.variables)), "gradients": None, "state": state_now(parts)}


def allocators() -> list[dict[str, Any]]:
    """Return TensorFlow's allocator statistics of each GPU of this process; [] without a GPU.

    Reserved bytes and free gaps are unknown: None.
    """
    found = []
    for i in range(len(tf.config.list_physical_devices("GPU"))):
        told = tf.config.experimental.get_memory_info(f"GPU:{i}")
        found.append({"allocated_bytes": int(told["current"]), "reserved_bytes": None, "peak_bytes": int(told["peak"]),
                      "fragmentation": None, "retries": None})
    return found
