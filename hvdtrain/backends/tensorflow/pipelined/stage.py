"""Forward, backward and evaluation of a rank's chunks of a partitioned Keras model.

Owns which graph is called when, and what is kept between a micro-batch's forward and its backward. A chunk's two graphs
are made by `halves`; the last chunk is one graph with the loss, its gradients and their sum.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.backends.keras.compiled import setup_of
from hvdtrain.backends.keras.metrics import Evaluation
from hvdtrain.backends.tensorflow import recompute
from hvdtrain.backends.tensorflow.collectives import peer_failures
from hvdtrain.backends.tensorflow.graphs import PLAIN, Graph
from hvdtrain.backends.tensorflow.pipelined.crossing import (
    CALLS,
    Crossing,
    First,
    Last,
    Runs,
    absent_form,
    absent_of,
    crossing_of,
    flat,
    has_gradient,
    input_of,
    tensors_of,
    to_cargo,
)
from hvdtrain.backends.tensorflow.pipelined.halves import Halves
from hvdtrain.backends.tensorflow.stage import Stage, pair_of
from hvdtrain.backends.tensorflow.task import ClassNumbers, Evaluator
from hvdtrain.core.protocols import Batch, Cargo, GradientSink, Pair


class _Forward(NamedTuple):
    """A chunk's forward of one micro-batch: its graphs, and the tensors kept for backward."""

    halves: Halves
    kept: list[tf.Tensor]


class Chunks(Stage):
    """Implements `hvdtrain.core.protocols.PipelineStage`. ``runs``: this rank's chunks; ``sums``: their gradients."""

    def __init__(self, *given: Any, runs: Runs, sums: Sums, names: Sequence[str], evaluator: PartEvaluator) -> None:
        super().__init__(*given)
        self.runs, self.sums, self._names, self._evaluator = runs, sums, list(names), evaluator
        self.chunks = len(runs.chunks)
        self._first, self._last = First(runs.whole), Last(runs.whole, runs.last)
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._backs: dict[int, tuple[list[tf.Tensor], list[bool]]] = {}
        self._exist: weakref.WeakKeyDictionary[Any, list[bool]] = weakref.WeakKeyDictionary()
        self._forms: dict[Any, str] = {}
        self._given: dict[int, Graph] = {}
        self.held = self.most_held = 0

    def connect(self, sink: GradientSink) -> None:
        if sink is not self._sink or not self._connected:
            self._given = {}
        super().connect(sink)

    def begin(self) -> None:
        """Open a step with sums of zero, and forget what an interrupted one has kept."""
        super().begin()
        self.drop()
        for kept in self._kept:
            kept.keep()
        self.sums.clear()

    def drop(self) -> None:
        self._forwards, self._backs, self.held = {}, {}, 0

    def forward(self, chunk: int, micro: int, came: Cargo | None, batch: Batch) -> Cargo:
        self._saw(chunk, batch)
        form = "" if came is None else came.form
        leaves = _tensors(batch) if came is None else tensors_of(came)
        inputs = [] if came is None else [i for i, x in enumerate(leaves) if has_gradient(x)]
        key = ("forward", chunk, form, self._gradients.recomputed)

        def trace(*leaves: tf.Tensor) -> list[tf.Tensor]:
            x = self._entered(batch, leaves, True) if came is None else crossing_of(leaves, form)
            tensors, self._forms[key] = flat(self.runs.run(chunk, x, True))
            return tensors

        with peer_failures():
            halves = self.calls.made(key, lambda specs: Halves(
                trace, specs, inputs, self.sums.variables(chunk), lambda grads: self.sums.add(chunk, grads),
                self._gradients.recomputed), leaves, self._exact)
            outputs, kept = halves.split(self.calls.run(halves.forward, *leaves))
        self._forwards[chunk, micro] = _Forward(halves, kept)
        self._hold()
        return to_cargo(outputs, self._forms[key])

    def loss(self, chunk: int, micro: int, came: Cargo | None, batch: Batch, scale: float) -> Pair:
        self._saw(chunk, batch)
        given, leaves = _tensors(batch), [] if came is None else tensors_of(came)
        n, form = len(given), "" if came is None else came.form

        def trace(scale: tf.Tensor, *leaves: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
            own = list(leaves[n:])
            inputs = [x for x in own if has_gradient(x)]
            with recompute.recording() as found:
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    self._last.take(crossing_of(own, form) if own else Crossing(None, []))
                    loss_sum, weight = self.task(self._last, tf.nest.pack_sequence_as(batch, leaves[:n]), True)
                    scaled = loss_sum * tf.cast(scale, loss_sum.dtype)
                recompute.backward_begins()
                grads = tape.gradient(scaled, [*inputs, *self.sums.variables(chunk)])
            recompute.rewrite(found, self._gradients.recomputed)
            self.sums.add(chunk, grads[len(inputs):])
            self._exist[tf.compat.v1.get_default_graph()] = [g is not None for g in grads]
            return pair_of(loss_sum, weight), _filled(inputs, grads)

        with self.class_numbers.checked(tuple(batch)):
            follows = setup_of(self.runs.whole).follow is not None
            key = ("loss", chunk, form, self._gradients.recomputed, follows)
            pair, back = self._call(key, trace, [*given, *leaves], scale)
        assert self.calls.latest is not None
        self._backs[micro] = back, self._exist[self.calls.latest.graph]
        self._hold()
        return tuple(tf.unstack(pair)) if self.asynchronous else tuple(pair.numpy().tolist())

    def backward(self, chunk: int, micro: int, came: Cargo | None) -> Cargo | None:
        self.held -= 1
        if came is None:
            back, exist = self._backs.pop(micro)
        else:
            halves, kept = self._forwards.pop((chunk, micro))
            with peer_failures():
                back = self.calls.run(halves.backward, *kept, *tensors_of(came))
            exist = halves.exist(absent_of(came))
        n = len(back)
        self.unused -= self.sums.numbers(chunk, exist[n:])
        absent = [i for i in range(n) if not exist[i]]
        return None if self.runs.chunks[chunk].start == 0 else to_cargo(back, absent_form(absent))

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        """Compute the whole model, of a replica on one rank."""
        pair = self.loss(0, 0, None, micro, scale)
        self.backward(0, 0, None)
        if final:
            self.hand_over(sink)
        return pair

    def trial(self, batch: Batch) -> None:
        """Compute without an exchange, of a replica on one rank, which has the whole model."""
        self.begin()
        self.loss(0, 0, None, batch, 1.0)
        self.backward(0, 0, None)
        for total in self.sums.read()[:1]:
            tf.reshape(total, [-1])[:1].numpy()  # a copy to the host waits for the device
        self._buffers.discard()
        self.rewind()

    def hand_over(self, sink: GradientSink) -> None:
        if sink.variant not in self._given:
            def trace() -> Any:
                return self._hand_over(sink, tf.zeros([2], tf.float64), tf.zeros([], tf.float64), self.sums.read())

            self._given[sink.variant] = Graph(trace, [])
        with peer_failures():
            report, tensors = self.calls.run(self._given[sink.variant])
        self._arrived(sink, tensors, report.numpy().tolist()[2:])

    def evaluate(self, chunk: int, came: Cargo | None, batch: Batch) -> Cargo | None:
        form = "" if came is None else came.form
        leaves = _tensors(batch) if came is None else tensors_of(came)
        if chunk == self.runs.ending:
            self._evaluator.add_outputs(batch, leaves if came is not None else [], form)
            return None
        key = ("evaluate", chunk, form)

        def trace(scale: tf.Tensor, *leaves: tf.Tensor) -> list[tf.Tensor]:
            x = self._entered(batch, leaves, False) if came is None else crossing_of(leaves, form)
            tensors, self._forms[key] = flat(self.runs.run(chunk, x, False))
            return tensors

        return to_cargo(self._call(key, trace, leaves, 0.0), self._forms[key])

    def culprit(self, batch: Batch) -> str:
        return next((name for name, x in zip(self._names, self.sums.read())
                     if not bool(tf.reduce_all(tf.math.is_finite(x)))), "")

    def _call(self, key: Any, trace: Any, leaves: Sequence[tf.Tensor], scale: float) -> Any:
        with peer_failures():
            return self.calls.call(key, trace, leaves, scale * self._gradients.loss_scale, self._exact)

    def _entered(self, batch: Batch, leaves: Sequence[tf.Tensor], training: bool) -> Crossing:
        packed = tf.nest.pack_sequence_as(batch, leaves)
        return self.runs.entered(input_of(self.task, self._first, packed, training))

    def _saw(self, chunk: int, batch: Batch) -> None:
        if chunk == 0:
            self._buffers.saw(len(tf.nest.flatten(batch)[0]))

    def _hold(self) -> None:
        self.held += 1
        self.most_held = max(self.most_held, self.held)


def _tensors(batch: Batch) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(x) for x in tf.nest.flatten(tuple(batch))]


def _filled(inputs: Sequence[tf.Tensor], grads: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for x, g in zip(inputs, grads)]


class Sums:
    """Gradients of a rank's chunks, summed over a step's micro-batches on the devices of their variables.

    ``variables``: the trainable ones of all chunks; ``chunk_of``: the chunk of each.
    """

    def __init__(self, variables: Sequence[keras.Variable], chunk_of: Sequence[int]) -> None:
        self._all = [v.value for v in variables]
        self._numbers = {chunk: [i for i, c in enumerate(chunk_of) if c == chunk] for chunk in set(chunk_of)}
        self._sums: list[tf.Variable] = []
        self._clear: Callable[[], None] | None = None

    def variables(self, chunk: int) -> list[tf.Variable]:
        return [self._all[i] for i in self._numbers.get(chunk, ())]

    def clear(self) -> None:
        """Set the sums to zero; make their memory at the first call."""
        if not self._sums:
            for v in self._all:
                with tf.device(v.device):
                    self._sums.append(tf.Variable(tf.zeros_like(v), trainable=False))

            def clear() -> None:
                for total in self._sums:
                    total.assign(tf.zeros(total.shape, total.dtype), read_value=False)

            self._clear = tf.function(clear, **PLAIN).get_concrete_function()
            return
        assert self._clear is not None
        self._clear()

    def numbers(self, chunk: int, exist: Sequence[bool]) -> frozenset[int]:
        return frozenset(i for i, there in zip(self._numbers.get(chunk, ()), exist) if there)

    def add(self, chunk: int, grads: Sequence[Any]) -> None:
        """Add gradients of a chunk's variables, also while a graph is traced; one that is None is left out."""
        for i, grad in zip(self._numbers.get(chunk, ()), grads):
            if isinstance(grad, tf.IndexedSlices):
                self._sums[i].scatter_add(grad)
            elif grad is not None:
                self._sums[i].assign_add(grad, read_value=False)

    def read(self) -> list[tf.Tensor]:
        return [total.read_value() for total in self._sums]


class PartEvaluator(Evaluator):
    """Implements `hvdtrain.core.protocols.Evaluator` on a rank of a pipeline. ``evaluation``: of the whole."""

    def __init__(self, spec: Any, evaluation: Evaluation, class_numbers: ClassNumbers, runs: Runs) -> None:
        super().__init__(evaluation, class_numbers)
        self._last = Last(runs.whole, runs.last)
        evaluation._spec = dataclasses.replace(spec, model=self._last)
        self._functions: dict[str, Any] = {}

    def add(self, batch: Batch) -> None:
        self.add_outputs(batch, [], "")

    def add_outputs(self, batch: Batch, came: Sequence[tf.Tensor], form: str) -> None:
        """Add a batch with ``came``, the last chunk's input."""
        self._add(batch, self._function_of(form), list(came), first=lambda samples: self._take(came, form, samples))

    def _function_of(self, form: str) -> Any:
        if form not in self._functions:
            def measure(batch: Any, came: list[tf.Tensor]) -> Any:
                self._take(came, form)
                return self._measure(batch)

            self._functions[form] = tf.function(measure, reduce_retracing=True, **PLAIN)
        return self._functions[form]

    def _take(self, came: Sequence[tf.Tensor], form: str, samples: int = 0) -> None:
        """Have the last chunk run on its input; of so many ``samples`` on the first, if its shape says how many."""
        value, losses = crossing_of(came, form) if came else Crossing(None, [])
        if samples and came:
            value = tf.nest.map_structure(lambda x: x[:1] if x.shape.rank and x.shape[0] == samples else x, value)
        self._last.take(Crossing(value, losses), CALLS)
