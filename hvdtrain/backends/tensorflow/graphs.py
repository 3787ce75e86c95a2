"""Graphs of a step: traced for each shape, with a count of the collectives that a failed run has entered.

Owns which graph serves a batch, and the counters in graphs. What they compute is `gradients`' and `stage`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

PLAIN = {"jit_compile": False, "autograph": False}
"""No XLA, which has no kernels for the collectives; no AutoGraph, as in `keras.Model.fit`."""

MOST_SIZES = 8
"""Numbers of samples with a graph of their own, for each kind of graph: one takes a second or more to trace."""

_tracing = threading.local()


class UpdateBroken(RuntimeError):
    """A graph failed in the middle of its update: parameters and optimizer have changed in part."""


class Collective(Protocol):
    """A collective of a graph. ``runs``: how often it was entered."""

    def entered(self) -> int:
        """Return ``runs``, when no run of the graph is under way."""

    def settle(self, runs: int) -> None:
        ...

    def enter(self, value: float) -> None:
        """Enter it from outside of the graph, with ``value`` in place of the graph's tensor."""


def note(collective: Collective | Update) -> None:
    """Note that the `Graph` that is being traced has ``collective``; do nothing outside of a trace."""
    noted = getattr(_tracing, "noted", None)
    if noted is not None:
        noted.append(collective)


def noting() -> bool:
    """Return whether a `Graph` is being traced in this thread."""
    return getattr(_tracing, "noted", None) is not None


@contextmanager
def _noting(into: list[Any] | None) -> Iterator[None]:
    before, _tracing.noted = getattr(_tracing, "noted", None), into
    try:
        yield
    finally:
        _tracing.noted = before


class Graph:
    """The graph of ``trace`` for tensors like ``signature``, traced at once.

    After an error TensorFlow continues with every node that does not depend on the failed one, and a call returns when
    all have ended. So whatever was entered is complete by then, and counts that are raised after each collective tell
    which these are. The others can be entered from outside (`enter_rest`).
    """

    def __init__(self, trace: Callable[..., Any], signature: Sequence[tf.TensorSpec]) -> None:
        self._noted: list[Any] = []
        self.runs = 0

        def noted(*tensors: tf.Tensor) -> Any:
            self._noted.clear()  # TensorFlow traces twice
            with _noting(self._noted):
                return trace(*tensors)

        function = tf.function(noted, input_signature=signature, **PLAIN).get_concrete_function()
        self._run, self.graph = direct(function), function.graph
        self._collectives = [one for one in self._noted if not isinstance(one, Update)]
        self._updates = [one for one in self._noted if isinstance(one, Update)]

    def __call__(self, *tensors: tf.Tensor) -> Any:
        """Run it. Errors: `UpdateBroken` in place of an error in the middle of an update."""
        self.runs += 1
        try:
            return self._run(*tensors)
        except Exception as error:
            if any(update.begun() for update in self._updates):
                raise UpdateBroken("the update of this step failed midway: some parameters "
                                   f"have changed, and the step cannot be repeated: {error}") from error
            raise

    def collectives(self) -> bool:
        return bool(self._collectives)

    def enter_rest(self, value: float) -> None:
        """Enter, after a failed run, what that has not entered, in the order of the trace."""
        left = [each for each in self._collectives if each.entered() != self.runs]
        for each in self._collectives:
            each.settle(self.runs)
        for each in left:
            each.enter(value)


def direct(function: Any) -> Callable[..., Any]:
    """Return a call of a concrete function by flat tensors, in the order of its arguments, which it does not check.

    `ConcreteFunction.__call__` binds, checks and casts arguments: 70 us of the 250 that a small step's graph takes.
    """
    inner = getattr(function, "inference_fn", None)  # of TensorFlow, not documented
    if inner is None or function.graph.deferred_external_captures:  # those are looked up in each call
        return function  # type: ignore[no-any-return]
    run, captured, pack = inner.call_flat, function.captured_inputs, function.function_type.pack_output
    return lambda *tensors: pack(run(*tensors, *captured))


class Mark:
    """A counter in a graph. ``device``: its place; "" leaves it to TensorFlow."""

    def __init__(self, device: str = "") -> None:
        self._device = device
        with self._place():
            self._variable = _number()

    def _place(self) -> Any:
        return tf.device(self._device) if self._device else nullcontext()

    def after(self, points: Sequence[Any]) -> tf.Operation:
        """Add one, in the graph that is traced, once all of ``points`` are there; return the operation."""
        with self._place(), tf.control_dependencies(points):
            return self._variable.assign_add(1, read_value=False)

    def read(self) -> tf.Tensor:
        return self._variable.read_value()

    def count(self) -> int:
        return int(self._variable.numpy())

    def set(self, count: int) -> None:
        self._variable.assign(count)


class Node:
    """Implements `Collective` by ``enter(value)`` and a `Mark` behind the node in the graph."""

    def __init__(self, enter: Callable[[float], None], mark: Mark) -> None:
        self.enter = enter
        self.entered, self.settle = mark.count, mark.set


def note_after(out: Any, enter: Callable[[float], Any], device: str) -> None:
    """Note a collective with the result ``out`` in the `Graph` that is being traced; do nothing outside of a trace.

    ``enter``: is `Collective.enter`. ``device``: of the collective, if ``out`` has none.
    """
    if noting():
        first = out[0] if isinstance(out, tuple) else out
        mark = Mark(first.device or device)
        mark.after([first])
        note(Node(enter, mark))


class Update:
    """An update within a graph, which cannot be undone."""

    def __init__(self) -> None:
        self._begun, self._before = Mark(), _number()

    @classmethod
    def here(cls) -> Update:
        """Return one for the graph that is being traced; it reads its count at the graph's begin."""
        made = cls()
        made._before.assign(made._begun.read(), read_value=False)
        note(made)
        return made

    def begin(self) -> tf.Operation:
        """Return the operation on which those of the update are to depend, in its branch."""
        return self._begun.after([])

    def begun(self) -> bool:
        """Return whether the latest run of the graph came to the update."""
        return self._begun.count() != int(self._before.numpy())


def _number() -> ResourceVariable:
    """Return a variable int64 (). tf.function would take a tf.Variable made during a trace for one of its own."""
    with tf.init_scope():
        return ResourceVariable(0, trainable=False, dtype=tf.int64, name="entered")


def poison(like: Sequence[tf.Tensor], value: float) -> list[tf.Tensor]:
    """Return tensors like those of a graph, outside of it: full of ``value``; integers keep constants, else 0."""
    made = []
    for x in like:
        known = None if x.dtype.is_floating else tf.get_static_value(x)
        full = value if x.dtype.is_floating else 0
        made.append(tf.fill(x.shape.as_list(), tf.cast(full, x.dtype)) if known is None else tf.constant(known))
    return made


class Calls:
    """Graphs ``trace(scale, *leaves)``, traced when they are first called, and kept until `drop`.

    A graph for one number of samples is traced faster than one for any number (a small decoder: 4.4 s in place of 7.2)
    and runs no slower, so the first `MOST_SIZES` numbers get a graph each. One for any number serves all others, so
    that a run whose shares change (``balance: auto``) does not trace for ever. Which graph serves a number of samples,
    and so the bits of its gradient, does not depend on earlier batches. ``failed``: the graph whose latest run ended
    with an error, else None. ``latest``: the graph that ran last. ``around``: makes the context of a trace.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._around = around
        self.failed: Graph | None = None
        self.latest: Graph | None = None
        self._graphs: dict[tuple[Hashable, int | None], Any] = {}
        self._sizes: dict[Hashable, list[int]] = {}
        self._latest_of: dict[Hashable, tuple[Hashable, Graph]] = {}
        self._scale: tuple[float, Any] = (0.0, None)

    def call(self, kind: Hashable, trace: Callable[..., Any], leaves: Sequence[Any], scale: float,
             exact: bool = True) -> Any:
        """Run the graph of ``kind`` on tensors or arrays and a float64 scalar; without ``exact`` one for any B.

        The first of ``leaves`` is (B, ...); of the others those are that have B in their first dimension.
        """
        form = exact, *((x.dtype, x.shape) for x in leaves)
        leaves = [x if tf.is_tensor(x) else tf.convert_to_tensor(x) for x in leaves]
        latest_form, graph = self._latest_of.get(kind, (None, None))
        if graph is None or latest_form != form:  # TensorFlow's shapes take longer than numpy's to compare
            graph = self.made(kind, lambda specs: Graph(trace, [tf.TensorSpec([], tf.float64), *specs]), leaves, exact)
            self._latest_of[kind] = form, graph
        if self._scale[1] is None or self._scale[0] != scale:
            self._scale = scale, tf.constant(scale, tf.float64)
        return self.run(graph, self._scale[1], *leaves)

    def made(self, kind: Hashable, make: Callable[[list[tf.TensorSpec]], Any], leaves: Sequence[tf.Tensor],
             exact: bool = True) -> Any:
        """Return what ``make`` made for ``kind`` and tensors like ``leaves``, which are as in `call`."""
        n = int(leaves[0].shape[0])
        of_samples = [x.shape.rank > 0 and x.shape[0] == n for x in leaves]
        kind = (kind, *((x.dtype, by_B, *x.shape[int(by_B):]) for x, by_B in zip(leaves, of_samples)))
        known = self._sizes.setdefault(kind, [])
        if exact and n not in known and len(known) < MOST_SIZES:
            known.append(n)
        size = n if n in known else None
        if (kind, size) not in self._graphs:
            with self._around():
                self._graphs[kind, size] = make([tf.TensorSpec([size, *x.shape[1:]] if by_B else x.shape, x.dtype)
                                                 for x, by_B in zip(leaves, of_samples)])
        return self._graphs[kind, size]

    def run(self, graph: Graph, *tensors: tf.Tensor) -> Any:
        self.failed = self.latest = graph
        results = graph(*tensors)
        self.failed = None
        return results

    def drop(self) -> None:
        """Trace again what is called from now on: the model trains other variables."""
        self._graphs.clear()
        self._latest_of.clear()

    def exact(self) -> list[tuple[int, Any]]:
        return [(size, graph.graph) for (_, size), graph in self._graphs.items()
                if size is not None and isinstance(graph, Graph)]
