"""Collectives over a wire of host memory as nodes of a graph that is being traced (`Ops.during_backward`).

Owns the nodes, their order, and what becomes of an error in one. Each is a call of Python that holds one of
TensorFlow's threads until the wire is done, so a bucket's gradient is summed and forgotten while backward goes on. They
run in the order in which they are traced, which is the same on every rank: such a wire pairs calls by their order.

Where TensorFlow has one such thread, backward stands still meanwhile; otherwise it may run ahead of a rank that is late
by the gradients that are left.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import entered
from hvdtrain.comm.collectives.null import Done
from hvdtrain.comm.collectives.parts import WithoutMemory
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Collectives, Handle
from hvdtrain.core.protocols.transport import Counts

MOST = 64
"""Errors that are kept for whoever runs the graph to find."""

_numbers = itertools.count()
_errors: OrderedDict[str, BaseException] = OrderedDict()
_of_graph: weakref.WeakKeyDictionary[Any, HostNodes] = weakref.WeakKeyDictionary()


class Failed(RuntimeError):
    """What a node raises for TensorFlow to quote: by its words `raised` finds what has happened."""


def raised(message: str) -> BaseException | None:
    """Return the exception of the node that TensorFlow's ``message`` is about; None where it is about something else.
    """
    return next((_errors.pop(words) for words in list(_errors) if words in message), None)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Keep an error of the body, a node called ``what``, for `raised` to find by what TensorFlow quotes of it."""
    try:
        yield
    except BaseException as error:
        words = f"hvdtrain's node {next(_numbers)} ({what})"
        _errors[words] = error
        while len(_errors) > MOST:
            _errors.popitem(last=False)
        raise Failed(words) from error


def stood_s(ready_s: tf.Tensor, after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the seconds, float64 (), that the nodes of the graph being traced made its other work stand still.

    Up to the time ``ready_s`` (of `tf.timestamp`), and once ``after`` are there. 0 where there are no such nodes.
    """
    nodes = _of_graph.get(tf.compat.v1.get_default_graph())
    if nodes is None:
        return tf.zeros([], tf.float64)
    with tf.control_dependencies(after):
        return tf.ensure_shape(tf.numpy_function(nodes.take_stood, [ready_s], tf.float64), [])


def _threads() -> int:
    """How many nodes TensorFlow runs at once."""
    set_here = tf.config.threading.get_inter_op_parallelism_threads()
    return set_here or int(os.environ.get("TF_NUM_INTEROP_THREADS", 0)) or os.cpu_count() or 1


class HostNodes(WithoutMemory):
    """Implements `hvdtrain.core.protocols.Collectives` while a graph is traced, over ``wire``, which is not in graphs.

    ``overlaps``: the rest of backward goes on while a node waits, on TensorFlow's other threads.
    """

    overlaps, in_graph, host = True, True, False

    def __init__(self, wire: Collectives) -> None:
        assert wire.host and not wire.in_graph, wire.name
        self._wire = wire
        self.name, self.rank, self.size = wire.name, wire.rank, wire.size
        self.dtypes, self.reductions = wire.dtypes, wire.reductions
        self._latest: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._spans: list[tuple[float, float]] = []

    def among(self, group: Group) -> HostNodes:
        """Nodes over the wire between the ranks of ``group``."""
        return HostNodes(self._wire.among(group))

    def allreduce(self, flat_N: tf.Tensor, name: str, op: str = "sum") -> Handle:
        """Combine over ranks: (N,) -> (N,)."""
        return self._node(lambda x: self._wire.allreduce(x, name, op), flat_N, name, flat_N.shape, np.array)

    def allgather(self, x_K: tf.Tensor, name: str) -> Handle:
        """Every rank's vector, by rank: (K,) -> (P, K)."""
        return self._node(lambda x: self._wire.allgather(x, name), x_K, name, [self.size, *x_K.shape])

    def alltoall(self, x_PK: tf.Tensor, name: str) -> Handle:
        """Row p goes to rank p: (P, K) -> (P, K)."""
        return self._node(lambda x: self._wire.alltoall(x, name), x_PK, name, x_PK.shape)

    def alltoallv(self, flat_N: tf.Tensor, sent_P: Counts, got_P: Counts, name: str) -> Handle:
        """Consecutive parts go to the ranks: (N,) -> (N',)."""
        if not tf.is_tensor(sent_P):
            return self._node(lambda x: self._wire.alltoallv(x, sent_P, got_P, name), flat_N, name, [sum(got_P)])

        def call(packed: np.ndarray) -> Handle:
            """Tell the others the counts once more: who enters zeros instead of the graph's vector sends nothing."""
            own_P = packed[:self.size]
            sent_PP = self._wire.allgather(own_P, f"{name}.counts").wait()
            return self._wire.alltoallv(packed[self.size:self.size + own_P.sum()], sent_PP[self.rank].tolist(),
                                        sent_PP[:, self.rank].tolist(), name)

        return self._node(call, tf.concat([sent_P, flat_N], 0), name, [None])

    def reducescatter(self, flat_N: tf.Tensor, name: str) -> Handle:
        """This rank's 1/P of the sum: (N,) -> (N/P,)."""
        return self._node(lambda x: self._wire.reducescatter(x, name), flat_N, name, [flat_N.shape[0] // self.size])

    def reducescatterv(self, flat_N: tf.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        """This rank's part of the sum: (N,) -> (sizes_P[rank],); by way of the wire's vector in flight, if any."""
        def aside(x: np.ndarray) -> np.ndarray:
            flight_N = self._wire.flight(x.size, x.dtype.name)
            if flight_N is None:
                return x
            np.copyto(flight_N, x)
            return flight_N

        return self._node(lambda x: self._wire.reducescatterv(x, sizes_P, name), flat_N, name, [sizes_P[self.rank]],
                          aside)

    def allgatherv(self, part_K: tf.Tensor, sizes_P: Sequence[int], name: str) -> Handle:
        """The ranks' parts one after the other: (sizes_P[rank],) -> (N,)."""
        return self._node(lambda x: self._wire.allgatherv(x, sizes_P, name), part_K, name, [sum(sizes_P)])

    def broadcast(self, x_N: tf.Tensor, name: str, root: int = 0) -> Handle:
        """``root``'s vector: (N,) -> (N,)."""
        return self._node(lambda x: self._wire.broadcast(x, name, root), x_N, name, x_N.shape, np.array)

    def take_stood(self, ready_s: np.ndarray) -> np.float64:
        """Return the seconds before ``ready_s`` that nodes took of a graph that could do nothing else; forget them."""
        spans, self._spans = self._spans, []
        alone = _threads() == 1
        return np.float64(sum(max(0.0, min(end, float(ready_s)) - begin) for begin, end in spans) if alone else 0.0)

    def _node(self, call: Callable[[np.ndarray], Handle], x: tf.Tensor, name: str, shape: Any,
              prepare: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> Done:
        """Add ``call(prepare(x)).wait()`` to the graph, with a result of ``shape``."""
        node = _Node(lambda x: call(prepare(x)).wait(), x.shape, x.dtype)

        def run(x: np.ndarray) -> np.ndarray:
            begin = time.time()
            try:
                with telling(f"collective {name}"):
                    x = prepare(x)
                    node.runs += 1
                    return np.array(_whole(call, x), x.dtype)  # not the wire's memory, which the next node overwrites
            finally:
                self._spans.append((begin, time.time()))

        graph = tf.compat.v1.get_default_graph()
        before = self._latest.get(graph)
        with tf.control_dependencies([] if before is None else [before]):
            # Stateful nodes wait for whatever else is stateful in the graph, such as the clock at the end of backward.
            result = tf.numpy_function(run, [x], x.dtype, stateful=False, name=name)
        if tf.inside_function():
            self._latest[graph], _of_graph[graph] = result.op, self
            entered.note(node)
        return Done(tf.ensure_shape(result, shape))


class _Node:
    """Implements `hvdtrain.backends.tensorflow.entered.Collective`. ``call``: enters and ends it, from an array."""

    def __init__(self, call: Callable[[np.ndarray], Any], shape: tf.TensorShape, dtype: tf.DType) -> None:
        self._call, self._shape, self._dtype = call, shape, dtype
        self.runs = 0

    def entered(self) -> int:
        """Return how often its node came to the wire."""
        return self.runs

    def settle(self, runs: int) -> None:
        """Begin anew from ``runs``."""
        self.runs = runs

    def enter(self, value: float) -> None:
        """Enter it with an array full of ``value``, of 0 where that is of integers."""
        full = value if self._dtype.is_floating else 0
        self._call(np.full(self._shape.as_list(), full, self._dtype.as_numpy_dtype))


def _whole(call: Callable[[np.ndarray], Handle], x: np.ndarray) -> np.ndarray:
    """The result of a collective. One that runs out of memory in its middle cannot be entered again: no lack of memory
    that a step is repeated for."""
    try:
        return call(x).wait()
    except MemoryError as error:
        raise RuntimeError(f"out of memory in the middle of a collective: {error}") from error
