"""Runs collectives outside of graphs under names that all ranks share, which TensorFlow's eager mode has no word for.

Owns the graphs that carry the names, and how many there are. Knows nothing of what a collective does.

Horovod pairs operations of different ranks by the name of their node; run eagerly, every allreduce is called the same
and whatever comes next is summed. So a name lives in a graph of one operation. TensorFlow traces it once for each kind
of call; each name gets a copy of that graph with the node renamed, which takes half a millisecond in place of fifteen,
and the names used longest ago are dropped.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context, execute, record

MOST = 128
"""So many names are kept, of all wires together; a name's graph takes 35 KiB."""

STAND_IN = "collective"
"""The name of the node in a traced graph, which copies replace."""

_numbers = itertools.count()


@dataclass(frozen=True)
class _Traced:
    """A graph to copy: its definition, how many results it has, and whether that is one tensor and no tuple."""

    definition: FunctionDef
    results: int
    single: bool


class Recent:
    """The `MOST` values that were asked for last, by key; ``forget`` is told those that go."""

    def __init__(self, forget: Callable[[Any], None] = lambda value: None) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._forget = forget

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``, made where there is none."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            else:
                self._kept[key] = make()
                if len(self._kept) > MOST:
                    self._forget(self._kept.popitem(last=False)[1])
            return self._kept[key]


_traced, _taped = Recent(), Recent()
_copies = Recent(lambda function: context.context().remove_function(function))


class NamedCalls:
    """Calls of one wire's operations."""

    def __init__(self) -> None:
        self._number = next(_numbers)

    def run(self, operate: Callable[..., Any], xs: Sequence[tf.Tensor], name: str, kind: Hashable) -> Any:
        """Run ``operate(name, *xs)``, whose collectives' nodes are called ``name``, or ``name.0``, ``name.1``, ...

        Returns what it does: a tensor, or a tuple of them. ``kind`` tells calls apart that make different graphs of
        tensors of equal types. While a tape records, TensorFlow's own function runs, which has a gradient.
        """
        key = (self._number, kind, *(x.dtype for x in xs))
        if record.could_possibly_record():
            return _taped.get((name, key), lambda: _trace(operate, name, xs))(*xs)
        traced = _traced.get(key, lambda: _template(_trace(operate, STAND_IN, xs)))
        function = _copies.get((name, key), lambda: _copy(traced.definition, name))
        out = execute.execute(function, traced.results, list(xs), _as_it_is(), context.context())
        return out[0] if traced.single else tuple(out)


def _trace(operate: Callable[..., Any], name: str, xs: Sequence[tf.Tensor]) -> Any:
    """The graph of ``operate`` for tensors of these types and any shape."""
    function = tf.function(lambda *ts: operate(name, *ts), jit_compile=False, autograph=False)
    return function.get_concrete_function(*[tf.TensorSpec(None, x.dtype) for x in xs])


@functools.cache
def _as_it_is() -> tuple[str, bytes]:
    """The attribute by which TensorFlow leaves a graph as it is: to improve it takes longer than to run it."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return "config_proto", config.SerializeToString()


def _template(graph: Any) -> _Traced:
    assert not graph.captured_inputs, "the graph of a collective takes its tensors and nothing else"
    return _Traced(graph.function_def, len(graph.outputs), isinstance(graph.structured_outputs, tf.Tensor))


def _copy(definition: FunctionDef, name: str) -> str:
    """Register a copy of a traced graph whose `STAND_IN` is called ``name``; returns the function's name."""
    copy = FunctionDef()
    copy.CopyFrom(definition)
    copy.signature.name = f"hvdtrain_{next(_numbers)}"
    for node in copy.node_def:
        node.name = _renamed(node.name, name)
        for i, source in enumerate(node.input):
            node.input[i] = _renamed(source, name)
    for result, source in copy.ret.items():
        copy.ret[result] = _renamed(source, name)
    context.context().ensure_initialized()
    context.context().add_function_def(copy)
    return copy.signature.name


def _renamed(reference: str, name: str) -> str:
    """A node, or one of its outputs such as ``node:output:0``, with ``name`` for the stand-in."""
    node, colon, rest = reference.partition(":")
    if node != STAND_IN and not node.startswith(f"{STAND_IN}."):
        return reference
    return f"{name}{node[len(STAND_IN):]}{colon}{rest}"
