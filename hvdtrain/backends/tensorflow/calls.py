"""Graphs by what they do and by the shapes they were traced for.

A graph for one exact number of samples is traced and made ready faster than one for any number (a small decoder: 4.4 s
in place of 7.2), and runs no slower, so the first `MOST_SIZES` numbers that come along get a graph each. Whatever else
comes is served by one for any number, so that a run whose parts of a batch differ does not trace for ever; where they
go on changing (``balance: auto``) that one serves all. None is ever dropped: which graph serves a number of samples,
and so the bits of its gradient, does not depend on what came in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.tensorflow.entered import Graph

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
