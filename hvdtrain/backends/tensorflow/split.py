"""A `DevicePlan` carried out on a Keras model: variables and optimizer slots on their devices.

Owns where things live. The graphs are in `pipeline`, the measuring is in `costs`; that blocks compute where their
variables are is `transforms.placement`'s.
"""

from __future__ import annotations

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
from hvdtrain.config import Config
from hvdtrain.core.protocols import Control
from hvdtrain.parallel.pipeline.plan import DevicePlan
from hvdtrain.planning.pipeline.blocks import DeviceProfile, Needs, part_samples, parts_of
from hvdtrain.planning.pipeline.orders import measured_bubble

KEPT = 32
"""Steps whose times are kept for the measured bubble; the first calls, which trace and warm up, are not among them."""

WARM = 2


def measured(chain: Chain, optimizer: Any, config: Config, control: Control,
             sample: Callable[[int], Sequence[Any]]) -> list[DeviceProfile]:
    """Return a profile of each device, with ``sample(n)`` giving n samples as numpy arrays; nothing remains of it.

    Errors: `UserError` for too few devices, and for a model whose blocks are not all of it.
    """
    devices = placement.split_devices(config.model_parallel)
    with tf.device(placement.HOST):
        check_same(chain, sample(2)[0])
    samples = part_samples(config, control.rank, control.size)
    blocks, _ = costs.profile(chain, sample, samples, devices[0], lambda batch: batch[0])
    capacity, together = placement.capacity_bytes(devices, control.local_size)
    needs = _needs(chain, optimizer, config, control.size)
    return [DeviceProfile(blocks, samples, own, needs, device, together_bytes=together)
            for device, own in zip(devices, capacity)]


def _needs(chain: Chain, optimizer: Any, config: Config, ranks: int) -> Needs:
    """Bytes beside parameters, from the optimizer's own state."""
    weights = sum(_bytes(v) for v in chain.model.weights)
    slots = sum(_bytes(v) for v in optimizer.variables)
    sums = int(config.in_parts)
    return Needs(1.0 + sums + int(ranks > 1), slots / max(1, weights))


class Split:
    """One model, spread over the devices of ``plan``. Making it moves the variables."""

    def __init__(self, chain: Chain, plan: DevicePlan, optimizer: Any) -> None:
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
        return self.plan.stage_of(self.chain.owner[id(variable)])

    def device(self, variable: keras.Variable) -> str:
        """The device of a variable."""
        return self.plan.devices[self.place(variable)]

    def parts(self, samples: int) -> int:
        """Parts of a micro-batch of ``samples``."""
        return parts_of(samples, self.plan.micros)

    def took(self, parts: int, times: tf.Tensor) -> None:
        """Keep when the slots of a call ended."""
        self._calls += 1
        if self._calls > WARM:
            self._times.append((parts, times))

    def describe(self) -> dict[str, str]:
        """For the summary: the cut, and the bubble as predicted and as measured."""
        words = f"{self.plan.step.idle_share:.1%} of the devices' time predicted"
        seen = [measured_bubble(self.plan.devices, parts, float(t[0]), [float(x) for x in t[1:]])
                for parts, t in self._times if parts == self.plan.micros]
        if seen:
            words += f", {statistics.median(seen):.1%} measured"
        return {"split": self.plan.words(), "bubble": words}


def _bytes(variable: keras.Variable) -> int:
    value = variable._value
    return (value.shape.num_elements() or 0) * value.dtype.size
