"""Start of a job for TensorFlow, and its transports; the job itself is `hvdtrain.job`'s, for all frameworks."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain import job
from hvdtrain.cluster import horovod
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.comm.collectives.shared import SharedCollectives
from hvdtrain.core.errors import UserError, WrongMode
from hvdtrain.core.process_sets import ProcessSet, global_process_set
from hvdtrain.job import World


class _TensorFlow:
    """`hvdtrain.job.JobFramework` of TensorFlow."""

    name = "tensorflow"

    def check(self) -> None:
        import tensorflow as tf

        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise UserError("TensorFlow in graph mode (tf.compat.v1.disable_eager_execution)",
                            "TensorFlow 2's eager mode with tf.function", "leave that call out")

    def has_gpu(self) -> bool:
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))

    def horovod_wire(self, world: World, process_set: ProcessSet, theirs: Any) -> Any:
        from hvdtrain.backends.tensorflow.collectives import HorovodCollectives

        return HorovodCollectives(world.hvd, world.device, theirs, horovod.stall_bound(os.environ))

    def plain_wire(self, mpi: MpiCollectives, process_set: ProcessSet) -> Any:
        from hvdtrain.tensorflow.transports import PlainMpi

        return PlainMpi(mpi, process_set.ranks or [])


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the job for TensorFlow: `hvdtrain.job.init`. Collective."""
    job.init(_TensorFlow(), comm, process_sets)


def wire(process_set: ProcessSet = global_process_set) -> Any:
    """Return `hvdtrain.job.wire`; `UserError` while a graph of TensorFlow 1 is built."""
    job.world()
    _refuse_sessions()
    return job.wire(process_set)


def shared_wire(process_set: ProcessSet) -> SharedCollectives | None:
    """Return the transport of dense gradients of ``process_set`` in shared memory, or None. Collective."""
    return job.shared_wire(process_set, not _TensorFlow().has_gpu())


def _refuse_sessions() -> None:
    """Raise `UserError` in a `tf.Graph` that is no function's: its nodes run in a session, in an order of its own."""
    import tensorflow as tf

    if not tf.executing_eagerly() and not tf.inside_function():
        raise WrongMode("a collective in a tf.Graph (tf.Graph().as_default(), or a session of TensorFlow 1)",
                        "eager TensorFlow 2, or a tf.function",
                        "call it outside of that graph, or write the graph as a tf.function")
