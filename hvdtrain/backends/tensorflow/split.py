"""A Keras model split over a rank's devices by a `DevicePlan`: its variables, its graph, its measured bubble.

Owns the placement of variables and optimizer slots, and one graph of forward and backward with copies at the cuts
alone. Blocks are measured by `chain`; calls outside of steps are `transforms.placement`'s.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow import placement, recompute, state
from hvdtrain.backends.tensorflow.chain import Chain, check_same, profile
from hvdtrain.backends.tensorflow.pipelined.crossing import ModelPlaceholder
from hvdtrain.backends.tensorflow.placement import HOST, move, move_slots
from hvdtrain.backends.tensorflow.task import Task
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.parallel.pipeline.plan import DevicePlan
from hvdtrain.planning.pipeline.blocks import DeviceProfile, Needs, part_samples, parts_of
from hvdtrain.planning.pipeline.orders import BACKWARD, FORWARD, gpipe_slots, measured_bubble

MEASURED_STEPS = 32
"""Latest steps whose times give the measured bubble."""
WARM = 2
"""First calls, which trace and warm up, and are not measured."""


def measured(chain: Chain, optimizer: Any, config: Config, control: Control,
             sample: Callable[[int], Sequence[Any]]) -> list[DeviceProfile]:
    """Return a profile of each device, with ``sample(n)`` giving n samples as numpy arrays; everything is restored.

    Errors: `UserError` for too few devices, and for a model whose blocks are not all of it.
    """
    devices = placement.split_devices(config.model_parallel)
    with tf.device(placement.HOST):
        check_same(chain, sample(2)[0])
    samples = part_samples(config, control.rank, control.size)
    blocks, _ = profile(chain, sample, samples, devices[0], lambda batch: batch[0])
    capacity, together = placement.capacity_bytes(devices, control.local_size)
    needs = _needs(chain, optimizer, config, control.size)
    return [DeviceProfile(blocks, samples, own, needs, device, together_bytes=together)
            for device, own in zip(devices, capacity)]


def _needs(chain: Chain, optimizer: Any, config: Config, ranks: int) -> Needs:
    weights, slots = state.nbytes(chain.model.weights), state.nbytes(optimizer.variables)
    sums = int(config.in_parts)
    return Needs(1.0 + sums + int(ranks > 1), slots / max(1, weights))


class Split:
    """A model spread over the devices of ``plan``. To make it moves the variables."""

    def __init__(self, chain: Chain, plan: DevicePlan, optimizer: Any) -> None:
        self.chain, self.plan = chain, plan
        self._times: deque[tuple[int, tf.Tensor]] = deque(maxlen=MEASURED_STEPS)
        self._calls = 0
        model = chain.model
        old_keys = {optimizer._var_key(v): v for v in model.trainable_variables}
        for variable in model.variables:
            if id(variable) in chain.owner:
                move(variable, self.device(variable))
        model.train_function = model.test_function = model.predict_function = None  # they hold the old variables
        move_slots(optimizer, model.trainable_variables, old_keys)
        self.pipeline = Pipeline(chain, plan.stages, plan.devices, model.trainable_variables)

    def place(self, variable: keras.Variable) -> int:
        return self.plan.stage_of(self.chain.owner[id(variable)])

    def device(self, variable: keras.Variable) -> str:
        return self.plan.devices[self.place(variable)]

    def parts(self, samples: int) -> int:
        return parts_of(samples, self.plan.micros)

    def took(self, parts: int, times: tf.Tensor) -> None:
        """Keep the times at which the slots of a call ended."""
        self._calls += 1
        if self._calls > WARM:
            self._times.append((parts, times))

    def describe(self) -> dict[str, str]:
        """Return, for the summary, the partition, and the bubble as predicted and as measured."""
        words = f"{self.plan.step.idle_share:.1%} of the devices' time predicted"
        seen = [measured_bubble(self.plan.devices, parts, float(t[0]), [float(x) for x in t[1:]])
                for parts, t in self._times if parts == self.plan.micros]
        if seen:
            words += f", {statistics.median(seen):.1%} measured"
        return {"split": self.plan.words(), "bubble": words}


Gradient = Any


class _Visit(NamedTuple):
    """Tensors of a stage's forward over one share that its backward needs. ``outputs``: those with a gradient."""

    tape: tf.GradientTape
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


class Pipeline:
    """Traces a split model. ``stages``: block numbers; ``devices``: names; ``variables``: the trainable ones.

    Control edges lay down GPipe's order: a stage computes one share at a time, all forward, then backward from the last
    share to the first. In between, TensorFlow's executor starts whatever has its inputs, so that the devices work at
    once. Losses of layers (regularisers) stay on their stage and cross the cut as scalars.
    """

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
        """Return (loss_sum, weight, gradients of ``loss_sum * scale`` by variable, times); called while a graph is
        traced.

        A gradient is None if the loss does not depend on the variable. ``times``: float64[1 + slots], the begin of the
        graph and the end of each slot of GPipe's schedule.
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
        """Return (the stage's output, losses that its layers add)."""
        layers = [self.chain.layers[i] for i in self.stages[s]]
        for layer in layers:
            layer._clear_losses()
        x = self.chain.run(self.chain.entry(x) if s == 0 else x, training, self.stages[s])
        return x, [loss for layer in layers for loss in layer.losses]


class AllStages(ModelPlaceholder):
    """Called, it runs all stages over part ``micro``."""

    def __init__(self, model: keras.Model, trace: _Trace, micro: int) -> None:
        super().__init__(model, "partitioned over devices", "set model_parallel: 1")
        self._trace, self._micro = trace, micro
        self.tape: tf.GradientTape | None = None
        self.ends: list[tuple[list[tf.Tensor], list[_Visit], int]] = []

    def __call__(self, x: Any, training: bool | None = None) -> Any:
        """Return the model's output on the last device, whose gradient the stages compute."""
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
    """State of one trace: the latest tensors of each stage, the sums of its gradients, the ends of its slots."""

    def __init__(self, pipeline: Pipeline, parts: int) -> None:
        self._p, self._parts = pipeline, parts
        self._last: list[list[tf.Tensor]] = [[] for _ in pipeline.stages]
        self._dense: dict[int, tf.Tensor] = {}
        self._sparse: dict[int, list[tf.IndexedSlices]] = {}
        self._ends: dict[tuple[int, int, str], tf.Tensor] = {}
        with tf.device(HOST):
            self._begin_s = tf.timestamp()

    def forward(self, m: int, x: Any, training: bool | None) -> tuple[Any, list[tf.Tensor], list[_Visit]]:
        """Run share m through all stages: (output, loss terms, both on the last device, visits by stage)."""
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
        """Trace the gradient of share m's loss, from the last stage to the first."""
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
        """Return (gradients of the stage's inputs, terms left for the stages before, all that was computed)."""
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
        """Return the sum over shares by variable, each on its device; None if no share depends on it."""
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
        self._last[s] = tensors or self._last[s]
        with tf.device(HOST):
            if "GPU" in self._p.devices[s]:  # a copy to the host waits for the device
                tensors = [tf.identity(tf.reshape(t, [-1])[:1]) for t in tensors]
            with tf.control_dependencies(tensors or self._last[s]):
                self._ends[s, m, phase] = tf.timestamp()

    def times(self) -> tf.Tensor:
        """Return float64[1 + slots]: the begin, then the end of each slot in the schedule's order."""
        slots = gpipe_slots(len(self._p.stages), self._parts)
        with tf.device(HOST):
            return tf.stack([self._begin_s, *(self._ends[slot[1:]] for slot in slots)])


def _seam(x: tf.Tensor) -> tf.Tensor:
    """Return ``x``, behind which only the pipeline differentiates; a tape of the task's own that gets there is refused.

    Such a tape would see all stages, but no gradient of it would reach their variables.
    """
    if not x.dtype.is_floating:
        return x

    @tf.custom_gradient
    def seam(t: tf.Tensor) -> Any:
        def refuse(*_: Any) -> Any:
            raise UserError("a GradientTape of the task's own differentiates through a model that is partitioned "
                            "over devices", "a task that computes a loss from model(x)",
                            "open that tape after model(x) if it is for the outputs, compute the gradient inside a "
                            "block, or set model_parallel: 1")

        return tf.identity(t), refuse

    passed = seam(x)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        passed._keras_mask = mask
    return passed


def _copy(x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` on the device of the scope, with the mask that Keras attached to it."""
    with tf.name_scope("cut"):
        moved = tf.identity(x)
        mask = getattr(x, "_keras_mask", None)
        if mask is not None:
            moved._keras_mask = tf.identity(mask)
    return moved


def _cut(batch: tuple[Any, ...], parts: int) -> list[tuple[Any, ...]]:
    """Return ``parts`` shares of a batch, whose sizes differ by one at most; sliced in host memory."""
    if parts == 1:
        return [batch]
    with tf.device(HOST):
        n = tf.shape(tf.nest.flatten(batch)[0])[0]
        ends = [n * k // parts for k in range(parts + 1)]
        return [tf.nest.map_structure(lambda t, a=a, b=b: t[a:b], batch) for a, b in zip(ends, ends[1:])]
