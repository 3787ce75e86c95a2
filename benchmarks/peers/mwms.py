"""TensorFlow's MultiWorkerMirroredStrategy in a custom loop: ring collectives on CPUs, NCCL on GPUs."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

from benchmarks.peers import IDLE_S, Prepared, Setup
from benchmarks.peers import tensorflow_common as common
from benchmarks.peers.torch_common import free_port, own_address

PATIENCE_MS = int(IDLE_S * 1000)
"""Of the coordination service: a suspended job must not be taken for a dead one."""


def prepare(setup: Setup) -> Prepared:
    """Make a worker a rank; Keras' optimizer sums the replicas' gradients, so each loss is divided by their number."""
    import tensorflow as tf

    control = setup.control
    setup.begin()
    if control.size > 1:
        _describe_cluster(setup)
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    kind = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(implementation=kind.NCCL if on_gpu else kind.RING)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    replicas = strategy.num_replicas_in_sync
    assert replicas == control.size, "the strategy did not find the ranks"
    with strategy.scope():
        model, loss, optimizer = common.build(setup)

    @tf.function(jit_compile=False)
    def train(batch: Any) -> Any:
        def replica(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss(model, batch)
                share = value / replicas
            optimizer.apply(tape.gradient(share, model.trainable_variables), model.trainable_variables)
            return value

        return strategy.run(replica, args=(batch,))

    return common.prepared(setup, model, train, "nccl" if on_gpu else "grpc ring")


def _describe_cluster(setup: Setup) -> None:
    """Set TF_CONFIG, and have the strategy ask for a coordination service that waits; collective."""
    from tensorflow.python.eager import context  # the bound is no option of the strategy

    control = setup.control
    address = own_address(setup.iface) if setup.iface or control.local_size < control.size else "127.0.0.1"
    workers = control.gather(f"{address}:{free_port()}")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers},
                                          "task": {"type": "worker", "index": control.rank}})
    runtime = context.context()
    runtime.configure_coordination_service = partial(runtime.configure_coordination_service,
                                                     heartbeat_timeout_in_ms=PATIENCE_MS)
