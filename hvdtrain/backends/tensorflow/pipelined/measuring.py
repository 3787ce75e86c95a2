"""What a Keras model must be that is cut over ranks, and what its blocks cost on this rank's device.

Owns the proof that a task needs nothing of the model but its outputs. Everything is as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.keras import compiled
from hvdtrain.backends.keras.metrics import zeros_like_one
from hvdtrain.backends.keras.task import Phase
from hvdtrain.backends.misfit import told
from hvdtrain.backends.tensorflow import costs, placement
from hvdtrain.backends.tensorflow.chain import Chain, check_same
from hvdtrain.backends.tensorflow.pipeline import _seam
from hvdtrain.backends.tensorflow.pipelined.cargo import Crossing
from hvdtrain.backends.tensorflow.pipelined.deferred import present, reads
from hvdtrain.backends.tensorflow.pipelined.ends import UNDO, First, Last, input_of
from hvdtrain.backends.tensorflow.trial import Trial
from hvdtrain.config import Config
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.core.protocols import Batch, Control
from hvdtrain.parallel.pipeline.partition import measured_samples
from hvdtrain.planning.pipeline.blocks import DeviceProfile, Needs

CALLS = 2
"""Of the model for a batch of an evaluation: by the task, and by the model file's metrics."""


def check(chain: Chain, spec: Any, task: Any, batch: Batch) -> None:
    """Raise `UserError` unless the blocks one after the other are the model, and ``task`` needs its outputs alone.

    What the outputs of a compiled model look like is kept, since nobody can call it later.
    """
    tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
    with told(spec.model, batch), tf.device(placement.HOST):
        check_same(chain, _input(chain, task, tensors))
        Trial(chain.model, lambda given: _check_task(chain, task, given))(tensors)
        if spec.task is not None and spec.metrics is not None:
            last = Last(chain.model, lambda x, came, training: Crossing(chain.model(x, training=training), []))
            last.take(Crossing(None, []), CALLS)
            task(last, tensors, False)
            Phase(spec.metrics, last)(tensors, training=False)
        if spec.task is None and compiled.is_compiled(chain.model):
            outputs = chain.model(compiled.split(chain.model, tensors)[0], training=False)
            compiled.setup_of(chain.model).outputs = zeros_like_one(outputs)


def _input(chain: Chain, task: Any, batch: tuple[Any, ...]) -> Any:
    """What the task gives to the model; `UserError` where that is another each time."""
    one, other = (input_of(task, First(chain.model), batch, True) for _ in range(2))
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other)):
        if not np.array_equal(a, b):
            raise UserError("the task gives the model another x for the same batch, which the first and the last rank "
                            "of a pipeline would draw apart", "a task whose x depends on the batch alone",
                            f"draw random numbers in the data or in a block, or {UNDO}")
    return one


def _check_task(chain: Chain, task: Any, batch: tuple[Any, ...]) -> list[tf.Tensor]:
    """Run the task on outputs through which nothing goes back: what it does with them alone is left."""
    def run(x: Any, came: Crossing, training: bool) -> Crossing:
        before = len(found)
        with tape.stop_recording():
            y = chain.model(x, training=training)
            losses = [tf.convert_to_tensor(loss) for loss in chain.model.losses]
        del found[before:]
        return Crossing(tf.nest.map_structure(_seam, y), losses)

    last = Last(chain.model, run)
    last.take(Crossing(None, []))
    with tf.GradientTape() as tape, reads() as found:
        loss_sum, weight = task(last, batch, True)
    if not last.called:
        raise UserError("the task does not call the model", "a task that calls model(x)", "mend the model file's task")
    if found or tape.watched_variables():
        raise UserError("the task reads parameters of a model that is cut over ranks", "a loss of the outputs of "
                        "model(x) and the batch alone: the rank that has it has only the last blocks",
                        f"add what it takes from them by add_loss or a regularizer in their layers, or {UNDO}")
    return [loss_sum, weight]


def measure(chain: Chain, task: Any, config: Config, control: Control, mesh: Mesh, slots: float,
            sample: Callable[[int], Sequence[Any]]) -> DeviceProfile:
    """Return what this rank finds of the blocks, one at a time on its device. ``slots``: an optimizer's slots.
    Errors: `UserError` if one sample of one block does not fit.
    """
    device = placement.HOST if placement.in_host_memory() else "/GPU:0"
    samples = measured_samples(config, mesh)
    blocks, why = costs.profile(chain, sample, samples, device, lambda batch: _input(chain, task, batch), apart=True,
                                around=present)
    (capacity,), _ = placement.capacity_bytes((device,), control.local_size)
    buckets = float(len(mesh.copies) > 1)
    return DeviceProfile(blocks, samples, capacity, Needs(1.0 + buckets, slots), device.lstrip("/"), why=why)
