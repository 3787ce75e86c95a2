"""Forward and backward of a Keras model on one rank, in graphs that also hold what the sink can trace.

Owns which graph is called when, and what is kept between calls. Their content is `gradients`', their shapes `graphs`'.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow import ops, placement, state
from hvdtrain.backends.tensorflow.buffers import Buffers, VariableCopies, holding
from hvdtrain.backends.tensorflow.collectives import peer_failures
from hvdtrain.backends.tensorflow.gradients import Gradients
from hvdtrain.backends.tensorflow.graphs import Calls, Graph
from hvdtrain.backends.tensorflow.nodes import blocked_s, host_node
from hvdtrain.backends.tensorflow.task import ClassNumbers, Task
from hvdtrain.backends.tensorflow.transforms import sync_batchnorm
from hvdtrain.backends.tensorflow.trial import Trial
from hvdtrain.core import rng, timeline
from hvdtrain.core.protocols import Batch, GradientSink, Pair
from hvdtrain.core.protocols.types import Bucket, itemsize
from hvdtrain.core.timeline import current
from hvdtrain.data.weighting import PlaceholderSample

STAMPS = 3
"""Numbers of a graph's report that are about time: seconds waited, when the last gradient was ready, the last sum."""


class Stage:
    """Implements `hvdtrain.core.protocols.Stage` for a whole model, which may be partitioned over devices.

    If the collectives can be graph nodes, the sink is called while the graph is traced: each bucket's node waits for
    its own gradients only, so that its sum overlaps the rest of backward, and the graph of the last micro-batch returns
    when the sums have arrived. A rank without a sample runs a graph of zeros with nodes of the same names. Over a
    transport of the host that works in the background each bucket leaves the graph when it is full (`Leaving`), over
    any other one after it. ``loss_scale``: returns this rank's factor of the loss. ``across``: what sums BatchNorm's
    moments over ranks, if anything does. ``exact``: the first sizes of a micro-batch get a graph each (`Calls`).
    ``loss_words``: the loss for the summary. ``calls``: the graphs that it trains with. ``divides``: whether a micro-
    batch is computed in shares, each with a loss of its own.
    """

    def __init__(self, model: keras.Model, task: Task, class_numbers: ClassNumbers, buffers: Buffers,
                 gradients: Gradients, loss_scale: Callable[[], float], across: sync_batchnorm.Across | None,
                 exact: bool, loss_words: str) -> None:
        self.model, self.task, self.class_numbers = model, task, class_numbers
        self._buffers, self._gradients, self._loss_scale, self._across = buffers, gradients, loss_scale, across
        self.divides = gradients.split is not None and gradients.split.plan.micros > 1
        self._exact, self._words = exact and gradients.split is None, {"loss": loss_words}
        self.asynchronous = placement.on_gpu(model)
        self.waited_s = 0.0
        self.unused: frozenset[int] = frozenset()
        self._stand_in = PlaceholderSample()
        self._like: Batch = ()
        self.calls, self._connected = Calls(gradients.around), False
        self._sink: GradientSink | None = None
        self._zeros: dict[int, Graph] = {}
        self._memory: list[Any] = []
        self._in_place = False
        self._leaving: Leaving | None = None
        self._several = False
        self.unused, self._names = gradients.numbers, list(state.named(model.trainable_variables))
        self._redraw = rng.mark()
        self._drawn = VariableCopies(state.seed_states(model).values())
        self._kept = (buffers.kept, self._drawn)
        self._trial: Trial | None = None

    def connect(self, sink: GradientSink) -> None:
        """Prepare the graphs for this sink; they are traced at the first batch, and kept while the sink is the same."""
        if sink is not self._sink or self._connected:
            self.calls, self._sink, self._zeros = Calls(self._gradients.around), sink, {}
            # Every rank asks for this memory or none, whatever it computes on: the transport may make it in common.
            self._memory = [] if sink.in_graph else [sink.buffer(b) for b in sink.buckets]
            # Gradients are copied, one by one, to where the transport sums them.
            self._in_place = bool(self._memory) and all(isinstance(x, np.ndarray) for x in self._memory)
            leaves = bool(self._memory) and sink.overlaps and not self._across
            self._leaving = Leaving(sink, self._memory, self._in_place) if leaves else None
        self._connected = True

    def disconnect(self) -> None:
        """Keep the graphs: nothing is hooked into the model."""
        self._connected = False

    def begin(self) -> None:
        self._redraw = rng.mark()
        self._gradients.rescale(self._loss_scale())
        self._several, self.waited_s = False, 0.0
        self.unused, self.calls.failed = self._gradients.numbers, None
        self._buffers.begin()
        self._drawn.forget()

    def rewind(self) -> None:
        self._redraw()
        self._drawn.put_back()

    def run(self, micro: Batch, scale: float, final: bool, sink: GradientSink) -> Pair:
        batch, samples = tuple(micro), len(tf.nest.flatten(micro)[0])
        self._buffers.saw(samples)
        undo: Callable[[], None] | None = None
        if self._across:
            self._across.begin(self._loss_scale(), samples > 0)
            if samples:
                self.spare(batch)
            else:
                batch, scale, undo = self._stand_in.instead(batch), 0.0, self._buffers.undone()
        with self.class_numbers.checked(batch):
            pair = self._final(batch, scale, sink) if final else self._add(batch, scale)
        if undo is not None:
            undo()
        if self._across:
            self.waited_s += _waited_in(self._across)
        if not samples:
            return 0.0, 0.0
        assert self.calls.latest is not None
        self.unused &= self._gradients.unused_of[self.calls.latest.graph]
        return pair

    def _add(self, batch: tuple[Any, ...], scale: float) -> Pair:
        """Run a micro-batch that is not the last one; its scalars are read when they are needed."""
        first = not self._several
        self._several, self.waited_s = True, 0.0
        self._gradients.allocate()

        def trace(parts: tuple[Any, ...], scale: tf.Tensor, n_parts: int) -> tf.Tensor:
            loss_sum, weight, grads = self._gradients.local(parts, scale, n_parts, self._kept if first else ())
            self._gradients.add(loss_sum, grads, first)
            return pair_of(loss_sum, weight)

        with holding(self._kept if first else ()):
            pair = self._run("first" if first else "more", batch, scale, trace)
        return tuple(tf.unstack(pair)) if self.asynchronous else tuple(pair.numpy().tolist())

    def _final(self, batch: tuple[Any, ...], scale: float, sink: GradientSink) -> Pair:
        several, self._several = self._several, False
        closely = sink.in_graph and wanted()

        def trace(parts: tuple[Any, ...], scale: tf.Tensor, n_parts: int) -> Any:
            kept = () if several else self._kept
            loss_sum, weight, grads = self._gradients.local(parts, scale, n_parts, kept)
            total, sums = self._gradients.completed(loss_sum, grads) if several else (loss_sum, grads)
            return self._hand_over(sink, pair_of(loss_sum, weight), total, sums, closely)

        # A graph without buckets may update too, and leaves out what no micro-batch of the step used.
        kind = "only" if not several else "last" if sink.buckets else ("last", self.unused)
        with holding(() if several else self._kept):
            report, tensors = self._run((kind, sink.variant, closely), batch, scale, trace)
        loss_sum, weight, *rest = report.numpy().tolist()
        if closely and sink.buckets:
            n_stamps = 2 * len(sink.buckets)
            tell(sink.buckets, rest[-n_stamps:])
            del rest[-n_stamps:]
        self._arrived(sink, tensors, rest)
        return loss_sum, weight

    def nothing(self, sink: GradientSink, poison: bool = False) -> None:
        self.waited_s = 0.0
        failed, value = self.calls.failed, math.nan if poison else 0.0
        if poison and sink.in_graph and (not sink.buckets or failed is not None and failed.collectives()):
            with peer_failures():
                failed.enter_rest(value) if failed is not None else None
            sink.ran([tf.zeros([0], b.dtype) for b in sink.buckets], [value, 0.0])
        elif self._across and self._across.active:  # the other ranks' layers wait for this one too
            self._across.begin(self._loss_scale(), False)
            self._final(self._stand_in.instead(self._like), value, sink)
            self.waited_s += _waited_in(self._across)
        elif sink.in_graph:
            if sink.variant not in self._zeros:
                def trace(value: tf.Tensor) -> Any:
                    return self._hand_over(sink, tf.zeros([2], tf.float64), value, self._gradients.all(value))

                self._zeros[sink.variant] = Graph(trace, [tf.TensorSpec([], tf.float32)])
            with peer_failures():
                report, tensors = self.calls.run(self._zeros[sink.variant], tf.constant(value))
            self._arrived(sink, tensors, report.numpy().tolist()[2:])
        else:
            owed = set(sink.owed() or ()) if poison else {b.index for b in sink.buckets}
            for bucket, memory_N in zip(sink.buckets, self._memory):
                if bucket.index in owed:
                    if self._in_place:
                        memory_N[...] = value
                    else:
                        with self._gradients.at(bucket.place):
                            memory_N = tf.fill([bucket.n], tf.cast(value, bucket.dtype))
                    sink.put(bucket.index, memory_N)

    def _arrived(self, sink: GradientSink, tensors: Sequence[tf.Tensor], rest: list[float]) -> None:
        if sink.in_graph:
            self.waited_s, ready_s, summed_s = rest[:STAMPS]
            if sink.buckets:
                ahead_s = time.time() - time.perf_counter()  # of the clock that stamps a graph
                timeline.stamped(self.waited_s, "gradients", ready_s - ahead_s, summed_s - ahead_s)
            sink.ran(tensors, rest[STAMPS:])
            return
        self.waited_s = 0.0
        if not tensors:  # they have left already
            return
        for bucket, flat_N in zip(sink.buckets, self._memory if self._in_place else ()):
            ops.fill(flat_N, bucket, [tensors[i] for i in bucket.params])
            sink.put(bucket.index, flat_N)
        for i, x in enumerate(() if self._in_place else tensors):
            sink.put(i, x)

    def _hand_over(self, sink: GradientSink, pair: tf.Tensor, loss_sum: tf.Tensor,
                   grads: list[tf.Tensor], closely: bool = False) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return (report, tensors) while a graph is traced.

        ``report``: float64, the pair, the seconds from the last local gradient to the last sum with the times of both,
        the sink's numbers; ``closely``: when each bucket was full, and when summed. One tensor, since each that is read
        costs the host a call. Without a sink in the graph it is the pair, and the times at which gradients left.
        """
        grads = self._gradients.unscaled(grads)
        tensors = grads
        if sink.buckets and not self._in_place:
            tensors = [self._gradients.packed(b, grads) for b in sink.buckets]
        if not sink.in_graph and self._leaving is None:
            return pair, tensors
        if self._leaving is not None:
            return tf.concat([pair, self._leaving.handed_over(tensors, self._gradients.unknown())], 0), []
        waited_s = ready_s = summed_s = tf.zeros([], tf.float64)
        if sink.buckets:
            with tf.control_dependencies(tensors):
                ready_s = tf.timestamp()
        for i, x in enumerate(tensors):
            sink.put(i, x)
        sums = sink.collect()
        if sink.buckets:
            with tf.control_dependencies(sums):
                summed_s = tf.maximum(tf.timestamp(), ready_s)
            waited_s = summed_s - ready_s + blocked_s(ready_s, sums)
        numbers, wanted = sink.look(loss_sum, sums)
        told = [after(x) for x in (*tensors, *sums)] if closely else []
        return tf.concat([pair, [waited_s, ready_s, summed_s], numbers, *([told] if told else [])], 0), list(wanted)

    def _run(self, kind: Any, batch: tuple[Any, ...], scale: float, graph: Callable[..., Any],
             exact: bool = True) -> Any:
        leaves, split = tf.nest.flatten(batch), self._gradients.split
        n_parts = split.parts(int(leaves[0].shape[0])) if split else 1

        def trace(scale: tf.Tensor, *parts: tf.Tensor) -> Any:
            results = graph(tf.nest.pack_sequence_as(batch, parts), scale, n_parts)
            return results, self._gradients.times if split else None

        xla = self._gradients.compiles(int(leaves[0].shape[0]))
        with peer_failures():
            results, times = self.calls.call((kind, n_parts, self._gradients.recomputed, xla), trace, leaves,
                                             scale * self._gradients.loss_scale, xla or exact and self._exact)
        if split and kind != "alone":
            split.took(n_parts, times)
        return results

    def ahead(self, batch: Batch) -> None:
        """Do nothing: a graph takes its inputs when it runs."""

    def spare(self, batch: Batch) -> None:
        self._stand_in.saw(batch)
        self._like = tuple(array[:0] for array in batch)

    def trial(self, batch: Batch) -> None:
        """Compute in a graph of its own, without an exchange."""
        self.alone(batch)

    def culprit(self, batch: Batch) -> str:
        names = iter(self._names)
        return next((n for n, g in zip(names, self.alone(batch)) if not bool(tf.reduce_all(tf.math.is_finite(g)))), "")

    def alone(self, batch: Batch) -> list[tf.Tensor]:
        if self._trial is None:
            self._trial = Trial(self.model, lambda parts: self._run(
                "alone", parts, 1.0, lambda batch, scale, n: self._gradients.local(batch, scale, n)[2], exact=False))
        with self.class_numbers.checked(tuple(batch)), sync_batchnorm.local_statistics(self._across):
            return self._gradients.unscaled(self._trial(batch))

    def device_s(self) -> None:
        """Return None: a call of a graph returns when its results are there."""

    def describe(self) -> dict[str, str]:
        return {**self._words, "device": "gpu" if self.asynchronous else "cpu"}

    def caveats(self) -> list[str]:
        found = []
        if not self._across and any(layer.trainable for layer in sync_batchnorm.norms(self.model)):
            found.append("BatchNorm computes its statistics over each rank's own samples, without sync_batchnorm: true")
        if state.draws(self.model):
            found.append("dropout draws differ with the number of ranks")
        return found


def _waited_in(across: sync_batchnorm.Across) -> float:
    """Return the seconds that the layers of the graph that has just run waited for other ranks."""
    seconds = across.waited_s()
    timeline.stamped(seconds)
    return seconds


def pair_of(loss_sum: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.cast(loss_sum, tf.float64), tf.cast(weight, tf.float64)])


def wanted() -> bool:
    """Return whether graphs of this thread are to stamp their buckets now."""
    timeline = current()
    return timeline is not None and timeline.closely


def after(x_N: tf.Tensor) -> tf.Tensor:
    """Return the time at which ``x_N`` was there, float64 () of `time.perf_counter`, while a graph is traced."""
    first = tf.cast(x_N[:1], tf.float32)  # what travels to Python; a constant would be stamped while it is optimised
    return tf.ensure_shape(tf.numpy_function(_now, [first], tf.float64, stateful=False), [])


def _now(x: np.ndarray) -> np.float64:
    return np.float64(time.perf_counter())


def tell(buckets: Sequence[Bucket], stamps: Sequence[float]) -> None:
    """Report each bucket's transfer to a trace, if one is taken; ``stamps``: when they were full, when summed."""
    timeline = current()
    taker = timeline.taker if timeline is not None else None
    for i, bucket in enumerate(buckets if taker is not None else ()):
        assert taker is not None
        full_s, summed_s = stamps[i], stamps[len(buckets) + i]
        taker.take(f"{bucket.name}.r0", "wire", full_s, max(full_s, summed_s),
                   {"bytes": bucket.n * itemsize(bucket.dtype), "beside": True})


class Leaving:
    """Nodes that hand buckets to one sink while the graph runs. ``memory``: numpy memory of each bucket to copy to;
    else the sink is given tensors.
    """

    def __init__(self, sink: GradientSink, memory: Sequence[Any], in_place: bool) -> None:
        self._sink, self._memory, self._in_place = sink, memory, in_place
        self._lock = threading.Lock()  # a sink takes one bucket at a time

    def handed_over(self, tensors: Sequence[tf.Tensor], zero: tf.Tensor) -> tf.Tensor:
        """Return the times at which buckets were handed over, float64 (B,), while a graph is traced.

        ``tensors``: the gradients by variable, or with a sink that is given tensors those of its buckets. ``zero``: a
        scalar that TensorFlow cannot know before the graph runs.
        """
        buckets = self._sink.buckets
        groups = [[tensors[i] for i in b.params] for b in buckets] if self._in_place else [[x] for x in tensors]
        return tf.stack([self._node(i, group, zero) for i, group in enumerate(groups)])

    def _node(self, index: int, group: Sequence[tf.Tensor], zero: tf.Tensor) -> tf.Tensor:
        bucket = self._sink.buckets[index]

        def leave(_: np.ndarray, *arrays: np.ndarray) -> np.float64:
            if self._in_place:
                ops.fill(self._memory[index], bucket, arrays)
            with self._lock:
                self._sink.put(index, self._memory[index] if self._in_place else tf.constant(arrays[0]))
            return np.float64(time.perf_counter())

        # Nodes with a state wait for whatever else has one in the graph. One without, fed constants alone, such as
        # gradients that are known to be zero, TensorFlow would run while it optimises the graph, and not again.
        return tf.ensure_shape(host_node(leave, [zero, *group], tf.float64, f"gradients of {bucket.name}"), [])
