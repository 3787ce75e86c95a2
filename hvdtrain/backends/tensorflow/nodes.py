"""Nodes of TensorFlow graphs for collectives: over transports in host memory, and under names outside of graphs.

Owns the nodes, their order and their errors. Sums, and the memory that ranks share, are the transport's.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context, execute, record

from hvdtrain.backends.tensorflow import graphs
from hvdtrain.comm.collectives.base import ReadyHandle, WithoutMemory
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Collectives, Handle
from hvdtrain.core.protocols.transport import Counts

MOST_ERRORS = 64
"""Errors of nodes that wait for `raised`."""

_numbers = itertools.count()
_errors: OrderedDict[str, BaseException] = OrderedDict()
_of_graph: weakref.WeakKeyDictionary[Any, HostNodes] = weakref.WeakKeyDictionary()


class Failed(RuntimeError):
    """Error of a node, whose text TensorFlow quotes: `raised` finds the original by it."""


def raised(message: str) -> BaseException | None:
    """Return the exception of the node that TensorFlow's ``message`` is about; None for other messages."""
    return next((_errors.pop(key) for key in list(_errors) if key in message), None)


@contextmanager
def node_errors() -> Iterator[None]:
    """Raise the exception of a node in place of TensorFlow's error that quotes it."""
    try:
        yield
    except tf.errors.OpError as error:
        own = raised(error.message)
        if own is None:
            raise
        raise own from None


def host_node(run: Callable[..., Any], xs: Sequence[tf.Tensor], dtypes: Any, what: str, *, stateful: bool = False,
              name: str | None = None) -> Any:
    """Add a call of Python, ``run(*arrays)``, to the graph that is being traced; outside of graphs run it at once.

    ``dtypes``: of the results, as in `tf.numpy_function`. ``what``: describes the node in errors. The call holds one of
    TensorFlow's threads until it returns. ``stateful``: TensorFlow runs such nodes in program order, also after
    everything else that has a state, and keeps those whose results are not used. A node without state, fed constants
    alone, runs once, when the graph is optimised.
    """
    def call(*arrays: np.ndarray) -> Any:
        try:
            return run(*arrays)
        except BaseException as error:
            key = f"hvdtrain's node {next(_numbers)} ({what})"
            _errors[key] = error
            while len(_errors) > MOST_ERRORS:
                _errors.popitem(last=False)
            raise Failed(f"{key}: {type(error).__name__}: {error}") from error

    # Outside of graphs TensorFlow lets an exception through as it is; nobody would look up the original.
    return tf.numpy_function(run if tf.executing_eagerly() else call, xs, dtypes, stateful=stateful, name=name)


def blocked_s(ready_s: tf.Tensor, after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the seconds, float64 (), for which the nodes of the graph being traced blocked its other work.

    Up to the time ``ready_s`` (of `tf.timestamp`), and once ``after`` are there. 0 where there are no such nodes.
    """
    nodes = _of_graph.get(tf.compat.v1.get_default_graph())
    if nodes is None:
        return tf.zeros([], tf.float64)
    with tf.control_dependencies(after):
        return tf.ensure_shape(tf.numpy_function(nodes.take_blocked_s, [ready_s], tf.float64), [])


def _threads() -> int:
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    return configured or int(os.environ.get("TF_NUM_INTEROP_THREADS", 0)) or os.cpu_count() or 1


class HostNodes(WithoutMemory):
    """Implements `hvdtrain.core.protocols.Collectives` while a graph is traced, over ``wire``, which is not in graphs.

    Nodes run in the order in which they are traced, which is the same on every rank: ``wire`` pairs calls by order.
    ``overlaps``: the rest of backward continues while a node waits, on TensorFlow's other threads, and may run ahead of
    a late rank. With a single such thread it waits.
    """

    in_graph, host = True, False

    def __init__(self, wire: Collectives) -> None:
        assert wire.host and not wire.in_graph, wire.name
        self._wire, self.overlaps = wire, _threads() > 1
        self.name, self.rank, self.size = wire.name, wire.rank, wire.size
        self.dtypes, self.reductions = wire.dtypes, wire.reductions
        self._latest: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._spans: deque[tuple[float, float]] = deque(maxlen=1 << 12)

    def among(self, group: Group) -> HostNodes:
        return HostNodes(self._wire.among(group))

    def allreduce(self, flat_N: tf.Tensor, name: str, op: str = "sum") -> Handle:
        return self._node(lambda x: self._wire.allreduce(x, name, op), flat_N, name, flat_N.shape, np.array)

    def allgather(self, x_K: tf.Tensor, name: str) -> Handle:
        return self._node(lambda x: self._wire.allgather(x, name), x_K, name, [self.size, *x_K.shape])

    def alltoall(self, x_PK: tf.Tensor, name: str) -> Handle:
        return self._node(lambda x: self._wire.alltoall(x, name), x_PK, name, x_PK.shape)

    def alltoallv(self, flat_N: tf.Tensor, sent_P: Counts, got_P: Counts, name: str) -> Handle:
        if not tf.is_tensor(sent_P):
            return self._node(lambda x: self._wire.alltoallv(x, sent_P, got_P, name), flat_N, name, [sum(got_P)])

        def call(packed: np.ndarray) -> Handle:
            # Exchange the counts again: a rank that enters zeros instead of the graph's vector sends nothing.
            own_P = packed[:self.size]
            sent_PP = self._wire.allgather(own_P, f"{name}.counts").wait()
            return self._wire.alltoallv(packed[self.size:self.size + own_P.sum()], sent_PP[self.rank].tolist(),
                                        sent_PP[:, self.rank].tolist(), name)

        return self._node(call, tf.concat([sent_P, flat_N], 0), name, [None])

    def reducescatter(self, flat_N: tf.Tensor, name: str) -> Handle:
        return self._node(lambda x: self._wire.reducescatter(x, name), flat_N, name, [flat_N.shape[0] // self.size])

    def reducescatterv(self, flat_N: tf.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        """Reduce to shards by way of the transport's vector in flight, if it has one."""
        def in_flight(x: np.ndarray) -> np.ndarray:
            flight_N = self._wire.flight(x.size, x.dtype.name)
            if flight_N is None:
                return x
            np.copyto(flight_N, x)
            return flight_N

        return self._node(lambda x: self._wire.reducescatterv(x, sizes_P, name), flat_N, name, [sizes_P[self.rank]],
                          in_flight, new=True)

    def allgatherv(self, part_K: tf.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        return self._node(lambda x: self._wire.allgatherv(x, sizes_P, name), part_K, name, [sum(sizes_P)])

    def broadcast(self, x_N: tf.Tensor, name: str, root: int = 0) -> Handle:
        return self._node(lambda x: self._wire.broadcast(x, name, root), x_N, name, x_N.shape, np.array)

    def take_blocked_s(self, ready_s: np.ndarray) -> np.float64:
        """Return the seconds before ``ready_s`` that nodes took of a graph that could do nothing else; forget them."""
        spans = list(self._spans)
        self._spans.clear()
        alone = _threads() == 1
        return np.float64(sum(max(0.0, min(end, float(ready_s)) - begin) for begin, end in spans) if alone else 0.0)

    def _node(self, call: Callable[[np.ndarray], Handle], x: tf.Tensor, name: str, shape: Any,
              prepare: Callable[[np.ndarray], np.ndarray] = lambda x: x, new: bool = False) -> ReadyHandle:
        """Add a node for ``call(prepare(x))``. ``new``: where ``prepare`` copies, nothing else has the result's memory.
        """
        node = _Node(lambda x: call(prepare(x)).wait(), x.shape, x.dtype)

        def run(x: np.ndarray) -> np.ndarray:
            begin = time.time()
            try:
                sent = prepare(x)
                node.runs += 1
                result = _whole(call, sent)
                if new and sent is not x:
                    return result
                return np.array(result, x.dtype)  # the next node overwrites the transport's memory
            finally:
                self._spans.append((begin, time.time()))

        graph = tf.compat.v1.get_default_graph()
        before = self._latest.get(graph)
        with tf.control_dependencies([] if before is None else [before]):
            # Stateful nodes wait for whatever else is stateful in the graph, such as the clock at the end of backward.
            result = host_node(run, [x], x.dtype, f"collective {name}", name=name)
        if tf.inside_function():
            self._latest[graph], _of_graph[graph] = result.op, self
            graphs.note(node)
        return ReadyHandle(tf.ensure_shape(result, shape))


class _Node:
    """Implements `hvdtrain.backends.tensorflow.graphs.Collective`. ``call``: enters and ends it, from an array."""

    def __init__(self, call: Callable[[np.ndarray], Any], shape: tf.TensorShape, dtype: tf.DType) -> None:
        self._call, self._shape, self._dtype = call, shape, dtype
        self.runs = 0

    def entered(self) -> int:
        return self.runs

    def settle(self, runs: int) -> None:
        self.runs = runs

    def enter(self, value: float) -> None:
        full = value if self._dtype.is_floating else 0
        self._call(np.full(self._shape.as_list(), full, self._dtype.as_numpy_dtype))


def _whole(call: Callable[[np.ndarray], Handle], x: np.ndarray) -> np.ndarray:
    """Return the result of a collective. One that runs out of memory in its middle cannot be entered again: no
    shortage of memory for which a step is repeated."""
    try:
        return call(x).wait()
    except MemoryError as error:
        raise RuntimeError(f"out of memory inside a collective: {error}") from error


MOST_NAMES = 128
"""Names, of all transports together; the graph of a name takes 35 KiB."""

PLACEHOLDER = "collective"
"""The name of the node in a traced graph, which copies replace."""


@dataclass(frozen=True)
class _Traced:
    """A graph to copy: its definition, its number of results, and whether that is one tensor and no tuple."""

    definition: FunctionDef
    results: int
    single: bool


class Recent:
    """The `MOST_NAMES` values that were asked for last, by key; ``forget`` is called with each that is dropped."""

    def __init__(self, forget: Callable[[Any], None] = lambda value: None) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._forget = forget

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            else:
                self._kept[key] = make()
                if len(self._kept) > MOST_NAMES:
                    self._forget(self._kept.popitem(last=False)[1])
            return self._kept[key]


_traced, _taped = Recent(), Recent()
_copies = Recent(lambda function: context.context().remove_function(function))


class NamedCalls:
    """Calls of one transport's operations, each in a graph of one operation that carries its name.

    Horovod pairs operations of different ranks by the name of their node; run eagerly, every allreduce has the same
    name, and whatever comes next is summed. TensorFlow traces a graph once for each kind of call; each name gets a copy
    with the node renamed, which takes half a millisecond in place of fifteen.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)

    def run(self, operate: Callable[..., Any], xs: Sequence[tf.Tensor], name: str, kind: Hashable) -> Any:
        """Run ``operate(name, *xs)``, whose collectives' nodes are called ``name``, or ``name.0``, ``name.1``, ...

        Return its result: a tensor, or a tuple of them. ``kind`` distinguishes calls that make different graphs of
        tensors of equal types. While a tape records, TensorFlow's own function runs, which has a gradient.
        """
        key = (self._number, kind, *(x.dtype for x in xs))
        if record.could_possibly_record():
            return _taped.get((name, key), lambda: _trace(operate, name, xs))(*xs)
        traced = _traced.get(key, lambda: _template(_trace(operate, PLACEHOLDER, xs)))
        function = _copies.get((name, key), lambda: _copy(traced.definition, name))
        out = execute.execute(function, traced.results, list(xs), _as_it_is(), context.context())
        return out[0] if traced.single else tuple(out)


def _trace(operate: Callable[..., Any], name: str, xs: Sequence[tf.Tensor]) -> Any:
    """Return the graph of ``operate`` for tensors of these types and any shape."""
    function = tf.function(lambda *ts: operate(name, *ts), jit_compile=False, autograph=False)
    return function.get_concrete_function(*[tf.TensorSpec(None, x.dtype) for x in xs])


@functools.cache
def _as_it_is() -> tuple[str, bytes]:
    """Return the attribute that skips the graph optimizer, which takes longer than the operation."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return "config_proto", config.SerializeToString()


def _template(graph: Any) -> _Traced:
    assert not graph.captured_inputs, "the graph of a collective takes its tensors and nothing else"
    return _Traced(graph.function_def, len(graph.outputs), isinstance(graph.structured_outputs, tf.Tensor))


def _copy(definition: FunctionDef, name: str) -> str:
    """Register a copy of a traced graph whose `PLACEHOLDER` is called ``name``; return the function's name."""
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
    """Return a node, or one of its outputs such as ``node:output:0``, with ``name`` for the placeholder."""
    node, colon, rest = reference.partition(":")
    if node != PLACEHOLDER and not node.startswith(f"{PLACEHOLDER}."):
        return reference
    return f"{name}{node[len(PLACEHOLDER):]}{colon}{rest}"
