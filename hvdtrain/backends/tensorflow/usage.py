"""What TensorFlow holds at this moment: of a model and its optimizer by kind, of each GPU as its allocator tells."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.backends.tensorflow.footprint import nbytes, state_now
from hvdtrain.parallel.parts import ModelParts


def held(parts: ModelParts) -> dict[str, int | None]:
    """Return the bytes of the model's variables and of optimizer state of this rank.

    Gradients are None: they live within a graph, or in the memory of their buckets.
    """
    model: Any = parts.model
    return {"parameters": sum(map(nbytes, model.variables)), "gradients": None, "state": state_now(parts)}


def allocators() -> list[dict[str, Any]]:
    """Return of each GPU of this process what TensorFlow's allocator tells; [] without a GPU.

    It does not tell what it has reserved, nor what lies free between tensors: those are None.
    """
    found = []
    for i in range(len(tf.config.list_physical_devices("GPU"))):
        told = tf.config.experimental.get_memory_info(f"GPU:{i}")
        found.append({"allocated_bytes": int(told["current"]), "reserved_bytes": None, "peak_bytes": int(told["peak"]),
                      "fragmentation": None, "retries": None})
    return found
