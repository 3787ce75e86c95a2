"""Forward and backward of a split model in one graph: stage by stage, part by part, in GPipe's order.

Owns what is traced: each stage under its device with a tape of its own, copies at the cuts and nowhere else, the sum
of the parts' gradients. Moves no variable (`hvdtrain.backends.tensorflow.split`), knows no optimizer.

The order is laid down by control edges: a stage computes one part at a time, all forward, then backward from the last
part to the first (`hvdtrain.planning.pipeline.orders.gpipe_slots`). Between that TensorFlow's executor starts
whatever has its inputs, so that the devices work at once. What layers add to the loss (regularisers) is computed on
their own stage and crosses the cut as a scalar, so that no variable ever does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow import recompute
from hvdtrain.backends.tensorflow.chain import Chain
from hvdtrain.backends.tensorflow.pipelined.ends import ModelPlaceholder
from hvdtrain.backends.tensorflow.placement import HOST
from hvdtrain.backends.tensorflow.task import Task
from hvdtrain.core.errors import UserError
from hvdtrain.planning.pipeline.orders import BACKWARD, FORWARD, gpipe_slots

Gradient = Any


class _Visit(NamedTuple):
    """A stage's forward over one part: what its backward needs. ``outputs``: those with a gradient."""

    tape: tf.GradientTape
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


class Pipeline:
    """Traces a split model. ``stages``: block numbers; ``devices``: names; ``variables``: the trainable ones."""

    def __init__(self, chain: Chain, stages: Sequence[range], devices: Sequence[str],
                 variables: Sequence[keras.Variable]) -> None:
        self.chain, self.stages, self.devices = chain, list(stages), list(devices)
        self._of_stage: list[list[int]] = [[] for _ in stages]
        for i, variable in enumerate(variables):
            block = chain.owner[id(variable)]
            self._of_stage[next(s for s, stage in enumerate(stages) if block in stage)].append(i)
        self._variables = [v.value for v in variables]

    def gradients(self, task: Task, batch: tuple[Any, ...], scale: tf.Tensor,
                  parts: int) -> tuple[tf.Tensor, tf.Tensor, list[Gradient], tf.Tensor]:
        """(loss_sum, weight, gradients of ``loss_sum * scale`` by variable, times); called while a graph is traced.

        A gradient is None where the loss does not depend on the variable. ``times``: float64[1 + slots], when the
        graph began and when each slot of GPipe's schedule ended.
        """
        trace = _Trace(self, parts)
        losses: list[tuple[tf.Tensor, tf.Tensor]] = []
        backs = []
        for m, part in enumerate(_cut(batch, parts)):
            with tf.device(self.devices[-1]):
                placeholder = AllStages(self.chain.model, trace, m)
                with tf.GradientTape() as tape:
                    placeholder.tape = tape
                    loss_sum, weight = task(placeholder, part, True)
                    scaled = loss_sum * tf.cast(scale, loss_sum.dtype)
            losses.append((loss_sum, weight))
            backs.append((tape, scaled, placeholder))
        recompute.backward_begins()
        for m in reversed(range(parts)):
            trace.backward(m, *backs[m])
        with tf.device(self.devices[-1]):
            loss_sum, weight = (tf.add_n(list(terms)) for terms in zip(*losses))
        return loss_sum, weight, trace.sums(), trace.times()

    def run_stage(self, s: int, x: Any, training: bool | None) -> tuple[Any, list[tf.Tensor]]:
        """(the stage's output, what its layers add to the loss)."""
        layers = [self.chain.layers[i] for i in self.stages[s]]
        for layer in layers:
            layer._clear_losses()
        x = self.chain.run(self.chain.entry(x) if s == 0 else x, training, self.stages[s])
        return x, [loss for layer in layers for loss in layer.losses]


class AllStages(ModelPlaceholder):
    """Called, it runs all stages over part ``micro``."""

    def __init__(self, model: keras.Model, trace: _Trace, micro: int) -> None:
        super().__init__(model, "split over devices", "set model_parallel: 1")
        self._trace, self._micro = trace, micro
        self.tape: tf.GradientTape | None = None
        self.ends: list[tuple[list[tf.Tensor], list[_Visit], int]] = []

    def __call__(self, x: Any, training: bool | None = None) -> Any:
        """The model's output on the last device; its gradient is taken over by the stages."""
        assert self.tape is not None, "a placeholder is called within a tape"
        with self.tape.stop_recording():
            y, extras, visits = self._trace.forward(self._micro, x, training)
            y, extras = tf.nest.map_structure(_seam, (y, extras))
        watched = [t for t in tf.nest.flatten(y) if t.dtype.is_floating] + extras
        self.tape.watch(watched)
        self.ends.append((watched, visits, len(extras)))
        self.losses = extras
        return y


class _Trace:
    """One tracing: what each stage did last, what its gradients sum to, when its slots end."""

    def __init__(self, pipeline: Pipeline, parts: int) -> None:
        self._p, self._parts = pipeline, parts
        self._last: list[list[tf.Tensor]] = [[] for _ in pipeline.stages]
        self._dense: dict[int, tf.Tensor] = {}
        self._sparse: dict[int, list[tf.IndexedSlices]] = {}
        self._ends: dict[tuple[int, int, str], tf.Tensor] = {}
        with tf.device(HOST):
            self._begin_s = tf.timestamp()

    def forward(self, m: int, x: Any, training: bool | None) -> tuple[Any, list[tf.Tensor], list[_Visit]]:
        """Part m through all stages: (output, loss terms, both on the last device, visits by stage)."""
        visits: list[_Visit] = []
        terms: list[list[tf.Tensor]] = []
        for s, device in enumerate(self._p.devices):
            with tf.device(device), tf.control_dependencies(self._last[s]):
                x = tf.nest.map_structure(_copy, x)
                inputs = [t for t in tf.nest.flatten(x) if t.dtype.is_floating] if s else []
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    x, extras = self._p.run_stage(s, x, training)
                outputs = [t for t in tf.nest.flatten(x) if t.dtype.is_floating]
            visits.append(_Visit(tape, inputs, outputs + extras))
            terms.append(extras)
            self._did(s, m, FORWARD, tf.nest.flatten(x))
        with tf.device(self._p.devices[-1]):
            extras = [_copy(term) for stage in terms for term in stage]
            return tf.nest.map_structure(_copy, x), extras, visits

    def backward(self, m: int, tape: tf.GradientTape, scaled: tf.Tensor, placeholder: AllStages) -> None:
        """The gradient of part m's loss, from the last stage to the first."""
        last = len(self._p.devices) - 1
        with tf.device(self._p.devices[last]), tf.control_dependencies(self._last[last]):
            watched = [t for end in placeholder.ends for t in end[0]]
            given = tape.gradient(scaled, watched) if watched else []
        flows = []
        for tensors, visits, n_extras in placeholder.ends:
            own, given = given[:len(tensors)], given[len(tensors):]
            at = len(own) - n_extras
            flows.append((own[:at], own[at:], visits))
        for s in range(last, -1, -1):
            done: list[tf.Tensor] = []
            for k, (arrived, terms, visits) in enumerate(flows):
                flowing, terms, results = self._stage_backward(s, arrived, terms, visits[s])
                flows[k] = (flowing, terms, visits)
                done += results
            self._did(s, m, BACKWARD, done)

    def _stage_backward(self, s: int, arrived: list[Any], terms: list[Any],
                        visit: _Visit) -> tuple[list[Any], list[Any], list[tf.Tensor]]:
        """(gradients of the stage's inputs, terms left for the stages before, all that was computed)."""
        mine = len(visit.outputs) - len(arrived)
        own_terms, terms = terms[len(terms) - mine:], terms[:len(terms) - mine]
        own = self._p._of_stage[s]
        with tf.device(self._p.devices[s]), tf.control_dependencies(self._last[s]):
            outputs, given = [], []
            for out, g in zip(visit.outputs, [*arrived, *own_terms]):
                if g is not None:  # zeros in its place would give variables a gradient that have none
                    outputs.append(out)
                    given.append(_copy(g))
            targets = visit.inputs + [self._p._variables[i] for i in own]
            if not targets or not outputs:
                return [None] * len(visit.inputs), terms, given
            grads = visit.tape.gradient(outputs, targets, output_gradients=given)
            for i, grad in zip(own, grads[len(visit.inputs):]):
                self._add(i, grad)
            done = [self._dense[i] for i in own if i in self._dense]
            done += [sparse.values for i in own for sparse in self._sparse.get(i, [])[-1:]]
            flowing = grads[:len(visit.inputs)]
            return flowing, terms, done + [g for g in flowing if g is not None]

    def _add(self, i: int, grad: Gradient) -> None:
        if isinstance(grad, tf.IndexedSlices):
            self._sparse.setdefault(i, []).append(grad)
        elif grad is not None:
            self._dense[i] = self._dense[i] + grad if i in self._dense else grad

    def sums(self) -> list[Gradient]:
        """The sum over parts by variable, each on its device; None where no part depends on it."""
        found: list[Gradient] = [None] * len(self._p._variables)
        for s, own in enumerate(self._p._of_stage):
            with tf.device(self._p.devices[s]):
                for i in own:
                    total = self._dense.get(i)
                    if i in self._sparse:
                        rows = self._sparse[i]
                        joint = tf.convert_to_tensor(tf.IndexedSlices(
                            tf.concat([r.values for r in rows], 0), tf.concat([r.indices for r in rows], 0),
                            rows[0].dense_shape))
                        total = joint if total is None else total + joint
                    found[i] = total
        return found

    def _did(self, s: int, m: int, phase: str, tensors: list[tf.Tensor]) -> None:
        """Note what stage s ended with, and when it was there."""
        self._last[s] = tensors or self._last[s]
        with tf.device(HOST):
            if "GPU" in self._p.devices[s]:  # a copy to the host waits for the device
                tensors = [tf.identity(tf.reshape(t, [-1])[:1]) for t in tensors]
            with tf.control_dependencies(tensors or self._last[s]):
                self._ends[s, m, phase] = tf.timestamp()

    def times(self) -> tf.Tensor:
        """float64[1 + slots]: the begin, then the end of each slot in the schedule's order."""
        slots = gpipe_slots(len(self._p.stages), self._parts)
        with tf.device(HOST):
            return tf.stack([self._begin_s, *(self._ends[slot[1:]] for slot in slots)])


def _seam(x: tf.Tensor) -> tf.Tensor:
    """``x``, behind which only the pipeline differentiates: a tape of the task's own that gets here is refused.

    It would see all stages, but nothing of what it makes of them would come back to their variables.
    """
    if not x.dtype.is_floating:
        return x

    @tf.custom_gradient
    def seam(t: tf.Tensor) -> Any:
        def refuse(*_: Any) -> Any:
            raise UserError("a GradientTape of the task's own differentiates through a model that is split over "
                            "devices", "a task that computes a loss from model(x)",
                            "open that tape after model(x) if it is for the outputs, compute the gradient inside a "
                            "block, or set model_parallel: 1")

        return tf.identity(t), refuse

    passed = seam(x)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        passed._keras_mask = mask
    return passed


def _copy(x: tf.Tensor) -> tf.Tensor:
    """``x`` on the device of the scope, with the mask that Keras hung on it."""
    with tf.name_scope("cut"):
        moved = tf.identity(x)
        mask = getattr(x, "_keras_mask", None)
        if mask is not None:
            moved._keras_mask = tf.identity(mask)
    return moved


def _cut(batch: tuple[Any, ...], parts: int) -> list[tuple[Any, ...]]:
    """``parts`` pieces of a batch, whose sizes differ by one at most; sliced in host memory."""
    if parts == 1:
        return [batch]
    with tf.device(HOST):
        n = tf.shape(tf.nest.flatten(batch)[0])[0]
        ends = [n * k // parts for k in range(parts + 1)]
        return [tf.nest.map_structure(lambda t, a=a, b=b: t[a:b], batch) for a, b in zip(ends, ends[1:])]
