"""Graph operations on the device of what they work on, for a model whose variables live on several.

Owns the device of operations that nobody gave one: TensorFlow would put them all on the first device and copy every
variable there and back (Keras' optimizers, compressors). Knows no model.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def follow() -> None:
    """While a graph is traced: from here to its end an operation without a device goes to that of its largest input.

    A variable counts as what it holds. Operations without inputs stay open: TensorFlow puts them beside their reader.
    It is not a scope, because TensorFlow itself adds an operation for each result after the traced function's end.
    """
    graph = tf.compat.v1.get_default_graph()
    scope = graph.device(lambda op: op.device or _largest(op))
    scope.__enter__()
    graph._hvdtrain_following = scope  # would be left when it is collected; TensorFlow ends it with the graph


def _largest(op: Any) -> str:
    """The device of the input with the most elements, among those that have one; the first of equals."""
    best, most = "", -1
    for tensor in op.inputs:
        where = device_of(tensor)
        size = _elements(tensor)
        if where and size > most:
            best, most = where, size
    return best


def device_of(tensor: Any) -> str:
    """Where a tensor of a graph is made, as far as the graph says; what a graph captured is where it is outside."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return str(tensor.device)
    if tensor.op.device:
        return str(tensor.op.device)
    if tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        captured = next((outer for outer, inner in captures if inner.name == tensor.name), None)
        return "" if captured is None else device_of(captured)
    return device_of(tensor.op.inputs[0]) if len(tensor.op.inputs) == 1 else ""


def _elements(tensor: Any) -> int:
    """Elements of a tensor, or of the variable behind a handle; unknown sizes count as large."""
    data = getattr(tensor, "_handle_data", None) if tensor.dtype == tf.resource else None
    shape = tf.TensorShape(data.shape_and_type[0].shape) if data is not None and data.is_set else tensor.shape
    n = shape.num_elements()
    return 1 << 60 if n is None else int(n)
