"""What a graph that fails has entered of the collectives in it, so that the others can be entered from outside.

Owns the count of each collective's runs, and the graph that keeps them. After an error TensorFlow goes on with every
node that does not depend on the one that failed, and a call returns when all have ended. So whatever was entered is
complete by then, and a count that is raised after each collective, on the same device, tells which these are.

An update in a graph cannot be taken back: `Update` tells whether one had begun.
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

_tracing = threading.local()


class UpdateBroken(RuntimeError):
    """A graph failed in the middle of its update: parameters and optimizer have changed in part."""


class Collective(Protocol):
    """One collective of a graph. ``runs``: how often it was entered."""

    def entered(self) -> int:
        """Return ``runs``, when no run of the graph is under way."""
        ...

    def settle(self, runs: int) -> None:
        """Set ``runs``."""
        ...

    def enter(self, value: float) -> None:
        """Enter it from outside of the graph, with ``value`` in place of what the graph would bring."""
        ...


def note(collective: Collective | Update) -> None:
    """Note that the `Graph` that is being traced has ``collective``; nothing where none is."""
    noted = getattr(_tracing, "noted", None)
    if noted is not None:
        noted.append(collective)


def noting() -> bool:
    """Return whether a `Graph` is being traced in this thread."""
    return getattr(_tracing, "noted", None) is not None


@contextmanager
def _noted(into: list[Any] | None) -> Iterator[None]:
    before, _tracing.noted = getattr(_tracing, "noted", None), into
    try:
        yield
    finally:
        _tracing.noted = before


class Graph:
    """The graph of ``trace`` for tensors like ``signature``, traced at once."""

    def __init__(self, trace: Callable[..., Any], signature: Sequence[tf.TensorSpec]) -> None:
        self._found: list[Any] = []
        self.runs = 0

        def noted(*tensors: tf.Tensor) -> Any:
            self._found.clear()  # traced anew
            with _noted(self._found):
                return trace(*tensors)

        self.function = tf.function(noted, input_signature=signature, **PLAIN).get_concrete_function()
        self.graph = self.function.graph
        self._collectives = [found for found in self._found if not isinstance(found, Update)]
        self._updates = [found for found in self._found if isinstance(found, Update)]

    def __call__(self, *tensors: tf.Tensor) -> Any:
        """Run it. Errors: `UpdateBroken` in place of one that left an update half made."""
        self.runs += 1
        try:
            return self.function(*tensors)
        except Exception as error:
            if any(update.begun() for update in self._updates):
                raise UpdateBroken("the update of this step failed in its middle, so that parameters have changed in "
                                   f"part and the step cannot be repeated: {error}") from error
            raise

    def collectives(self) -> bool:
        """Return whether there are any in it."""
        return bool(self._collectives)

    def enter_rest(self, value: float) -> None:
        """After a run that failed enter what it did not enter, in the order of the trace, which is that of every rank.
        """
        left = [each for each in self._collectives if each.entered() != self.runs]
        for each in self._collectives:
            each.settle(self.runs)
        for each in left:
            each.enter(value)


class Mark:
    """Counts in a graph how often it came to a point. ``device``: where that is, "" where TensorFlow chooses it."""

    def __init__(self, device: str = "") -> None:
        self._device = device
        with self._place():
            self._variable = _number()

    def _place(self) -> Any:
        return tf.device(self._device) if self._device else nullcontext()

    def after(self, points: Sequence[Any]) -> tf.Operation:
        """Add to the graph that is traced: one more once all of ``points`` are there. Returns that."""
        with self._place(), tf.control_dependencies(points):
            return self._variable.assign_add(1, read_value=False)

    def read(self) -> tf.Tensor:
        """Return the count, in the graph that is traced or outside."""
        return self._variable.read_value()

    def count(self) -> int:
        """Return the count."""
        return int(self._variable.numpy())

    def set(self, count: int) -> None:
        """Begin anew from ``count``."""
        self._variable.assign(count)


class Node:
    """Implements `Collective` by ``enter(value)`` and a `Mark` behind the node in the graph."""

    def __init__(self, enter: Callable[[float], None], mark: Mark) -> None:
        self.enter = enter
        self.entered, self.settle = mark.count, mark.set


def note_after(out: Any, enter: Callable[[float], Any], device: str) -> None:
    """Note that the `Graph` that is being traced has a collective with the result ``out``, which `Collective.enter`
    enters by ``enter``; nothing where none is traced. ``device``: where it is, unless it tells."""
    if noting():
        first = out[0] if isinstance(out, tuple) else out
        mark = Mark(first.device or device)
        mark.after([first])
        note(Node(enter, mark))


class Update:
    """An update within a graph: what it changes cannot be put back."""

    def __init__(self) -> None:
        self._begun, self._before = Mark(), _number()

    @classmethod
    def here(cls) -> Update:
        """Return one of the graph that is being traced, at whose begin it reads its count."""
        made = cls()
        made._before.assign(made._begun.read(), read_value=False)
        note(made)
        return made

    def begin(self) -> tf.Operation:
        """Return what the update's operations are to depend on, in the branch that makes it."""
        return self._begun.after([])

    def begun(self) -> bool:
        """Return whether the latest run of the graph came to it."""
        return self._begun.count() != int(self._before.numpy())


def _number() -> ResourceVariable:
    """A variable int64 (), made while a graph is traced that makes none itself: not by tf.Variable, which tf.function
    would take for one of its own."""
    with tf.init_scope():
        return ResourceVariable(0, trainable=False, dtype=tf.int64, name="entered")


def poison(like: Sequence[tf.Tensor], value: float) -> list[tf.Tensor]:
    """Return tensors like those of a graph, outside of it: full of ``value``, integers as they are where they are
    constants (how many elements go to which rank), else 0."""
    made = []
    for x in like:
        known = None if x.dtype.is_floating else tf.get_static_value(x)
        full = value if x.dtype.is_floating else 0
        made.append(tf.fill(x.shape.as_list(), tf.cast(full, x.dtype)) if known is None else tf.constant(known))
    return made


MOST_SIZES = 8
"""Numbers of samples with a graph of their own, for each kind of graph: one takes a second or more to trace."""


class Calls:
    """Graphs ``trace(scale, *leaves)``, traced when they are first called.

    ``failed``: the graph whose latest run ended with an error; None after one that did not. ``latest``: the graph that
    ran last. ``around``: makes what a graph is traced within.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._around = around
        self.failed: Graph | None = None
        self.latest: Graph | None = None
        self._graphs: dict[tuple[Hashable, int | None], Any] = {}
        self._sizes: dict[Hashable, list[int]] = {}
        self._scale: tuple[float, Any] = (0.0, None)

    def call(self, kind: Hashable, trace: Callable[..., Any], leaves: Sequence[tf.Tensor], scale: float,
             exact: bool = True) -> Any:
        """Run the graph of ``kind`` on tensors and a float64 scalar; without ``exact`` one for any B.

        The first of ``leaves`` is (B, ...); of the others those are that have B in their first dimension.
        """
        graph = self.made(kind, lambda specs: Graph(trace, [tf.TensorSpec([], tf.float64), *specs]), leaves, exact)
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
        """Run a graph."""
        self.failed = self.latest = graph
        results = graph(*tensors)
        self.failed = None
        return results

    def exact(self) -> list[tuple[int, Any]]:
        """Return (samples, graph) of the graphs that are for one number of samples."""
        return [(size, graph.graph) for (_, size), graph in self._graphs.items()
                if size is not None and isinstance(graph, Graph)]
