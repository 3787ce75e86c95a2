"""A plan of `hvdtrain.parallel` carried out on a Keras model: variables, optimizer slots and blocks on their devices.

Owns where things live and what a run has to give back. The graphs are in `pipeline`, the measuring is in `costs`.
"""

from __future__ import annotations

import functools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow import costs, placement
from hvdtrain.backends.tensorflow.chain import Chain, check_same
from hvdtrain.backends.tensorflow.moving import move, move_slots
from hvdtrain.backends.tensorflow.pipeline import Pipeline
from hvdtrain.backends.tensorflow.trial import Trial, out_of_memory
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.parallel.memory import Needs
from hvdtrain.parallel.plan import Measured, Plan, micros_of, part_samples, parts_of
from hvdtrain.parallel.schedule import measured_bubble

KEPT = 32
"""Steps whose times are kept for the measured bubble; the first calls, which trace and warm up, are not among them."""

WARM = 2

_MARK = "_hvdtrain_split"
"""Attribute of a wrapped ``call``: the layer's own one, if its user had set it on the instance."""


def measured(chain: Chain, optimizer: Any, config: Config, control: Any,
             sample: Callable[[int], Sequence[Any]]) -> Measured:
    """What this rank finds out for a plan, with ``sample(n)`` giving n samples as numpy arrays; nothing remains of it.

    Errors: `UserError` for too few devices, and for a model whose blocks are not all of it.
    """
    devices = placement.split_devices(config.model_parallel)
    with tf.device(placement.HOST):
        check_same(chain, sample(2)[0])
    found: list[Any] = []

    def work(batch: tuple[Any, ...]) -> list[tf.Tensor]:
        found.extend(costs.measure(chain, batch[0], devices[0]))
        return []

    n = part_samples(config, control.rank, control.size)
    try:
        Trial(chain.model, work)(tuple(sample(n)))
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"{devices[0]} is out of memory with one block and {n} samples",
                        "a device that holds any block",
                        "cut the model into smaller blocks, or set a smaller micro_batch") from error
    capacity, together = placement.capacity_bytes(devices, getattr(control, "local_size", 1))
    return Measured(tuple(found), devices, capacity, _needs(chain, optimizer, config, control.size), together)


def _needs(chain: Chain, optimizer: Any, config: Config, ranks: int) -> Needs:
    """Bytes beside parameters, from the optimizer's own state."""
    weights = sum(_bytes(v) for v in chain.model.weights)
    slots = sum(_bytes(v) for v in optimizer.variables)
    sums = int(config.accumulate > 1 or config.micro_batch > 0 or config.balance != "off")
    return Needs(1.0 + sums + int(ranks > 1), slots / max(1, weights), micros_of(config))


class Split:
    """One model, spread over the devices of ``plan``. Making it moves the variables; `leave` gives the layers back."""

    def __init__(self, chain: Chain, plan: Plan, optimizer: Any) -> None:
        self.chain, self.plan = chain, plan
        self._times: deque[tuple[int, tf.Tensor]] = deque(maxlen=KEPT)
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
        """The stage of a variable."""
        return self.plan.cut.stage_of(self.chain.owner[id(variable)])

    def device(self, variable: keras.Variable) -> str:
        """The device of a variable."""
        return self.plan.devices[self.place(variable)]

    def parts(self, samples: int) -> int:
        """Parts of a micro-batch of ``samples``."""
        return parts_of(samples, self.plan.needs.micros)

    def join(self) -> None:
        """Have each block compute on its device, wherever the model is called from (evaluation, callbacks)."""
        for s, stage in enumerate(self.plan.stages):
            for i in stage:
                layer = self.chain.layers[i]
                if not hasattr(layer.call, _MARK):
                    wrapped = _on_device(layer.call, self.plan.devices[s], i == stage.start)
                    setattr(wrapped, _MARK, vars(layer).get("call"))
                    object.__setattr__(layer, "call", wrapped)

    def leave(self) -> None:
        """Undo `join`. The variables stay where they are: no one device may hold them all."""
        for layer in self.chain.layers:
            if hasattr(layer.call, _MARK):
                users = getattr(layer.call, _MARK)
                object.__delattr__(layer, "call") if users is None else object.__setattr__(layer, "call", users)

    def took(self, parts: int, times: tf.Tensor) -> None:
        """Keep when the slots of a call ended."""
        self._calls += 1
        if self._calls > WARM:
            self._times.append((parts, times))

    def describe(self) -> dict[str, str]:
        """For the summary: the cut, and the bubble as predicted and as measured."""
        words = f"{self.plan.bubble():.1%} of the devices' time predicted"
        seen = [measured_bubble(len(self.plan.stages), parts, float(t[0]), [float(x) for x in t[1:]])
                for parts, t in self._times if parts == self.plan.needs.micros]
        if seen:
            words += f", {statistics.median(seen):.1%} measured"
        return {"split": self.plan.words(), "bubble": words}

    def caveats(self, draws: bool, norms: bool) -> list[str]:
        """What of the model depends on how a micro-batch is cut into parts."""
        found = ["BatchNorm takes its statistics over each part of a micro-batch (split_micro_batches)"] * norms
        return found + ["dropout draws differ with the parts of a micro-batch (split_micro_batches)"] * draws


def _on_device(call: Callable[..., Any], device: str, first: bool) -> Callable[..., Any]:
    """A layer's ``call`` under ``device``; ``first`` of its stage: its input is copied there."""
    @functools.wraps(call)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        with tf.device(device):
            if first:
                args = tf.nest.map_structure(lambda x: _moved(x) if tf.is_tensor(x) else x, args)
            return call(*args, **kwargs)

    return on_device


def _moved(x: tf.Tensor) -> tf.Tensor:
    moved = tf.identity(x)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        moved._keras_mask = mask
    return moved


def _bytes(variable: keras.Variable) -> int:
    value = variable._value
    return (value.shape.num_elements() or 0) * value.dtype.size
