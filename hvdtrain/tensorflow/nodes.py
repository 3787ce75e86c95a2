"""How collectives get into the graphs of users: node names, what must not be folded or converted, what is refused.

Owns names that are the same on every rank, and the guards around a collective's input. Moves nothing.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

from hvdtrain.core.errors import through_trace
from hvdtrain.tensorflow.errors import InvalidArgument

unconverted = tf.autograph.experimental.do_not_convert
"""Decorates what a user's tf.function calls: AutoGraph would rewrite this package's code, generators included."""

_scratch: dict[str, tf.Variable] = {}
_uses: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def node_name(base: str) -> str:
    """``base`` as a node may be called, numbered within the graph that is being traced.

    Ranks trace the same program, though not always at the same time, so a graph numbers its own nodes. Outside of
    graphs there is no number: calls come one after another.
    """
    clean = re.sub("[^A-Za-z0-9_.]", "_", base)
    if not tf.inside_function():
        return clean
    uses = _uses.setdefault(tf.compat.v1.get_default_graph(), Counter())
    uses[clean] += 1
    return clean if uses[clean] == 1 else f"{clean}.{uses[clean] - 1}"


def label_of(variable: Any) -> str:
    """A variable's name for messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "a tensor")


def unfolded(x: tf.Tensor) -> tf.Tensor:
    """``x`` as something TensorFlow takes for no constant, without a copy.

    Horovod's operations are not marked stateful: fed a constant they would run while the graph is optimised, once, on
    this rank only. A slice whose beginning a variable tells cannot be foreseen, and one of everything shares memory.
    """
    if not tf.inside_function():
        return x
    row = tf.reshape(x, [1]) if x.shape.rank == 0 else x
    begin = tf.fill([row.shape.rank], scratch("zero", tf.int32).read_value())
    out = tf.slice(row, begin, [-1] * row.shape.rank)
    out = tf.reshape(out, []) if x.shape.rank == 0 else out
    out.set_shape(x.shape)
    return out


def scratch(name: str, dtype: tf.DType) -> tf.Variable:
    """A scalar variable of this process, 0 at first, in host memory."""
    if name not in _scratch:
        with tf.init_scope(), tf.device("/CPU:0"):
            _scratch[name] = tf.Variable(0, dtype=dtype, trainable=False, name=name)
    return _scratch[name]


def refuse_xla(what: str) -> None:
    """Raise `UserError` in a function that XLA will compile: it knows no collectives of this kind."""
    graph: Any = tf.compat.v1.get_default_graph() if tf.inside_function() else None
    while graph is not None:
        context = getattr(graph, "_get_control_flow_context", lambda: None)()
        if context is not None and context.IsXLAContext():
            raise through_trace(InvalidArgument(
                f"{what} in a function that XLA compiles",
                "jit_compile=False: XLA knows no collectives between processes",
                "set jit_compile=False in model.compile or tf.function"))
        graph = getattr(graph, "outer_graph", None)
