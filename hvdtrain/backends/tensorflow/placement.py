"""Where a rank's Keras model lives, how many threads it computes with, and its random seeds."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.cluster.devices import DeviceFacts, cpu_facts, own_memory_bytes
from hvdtrain.errors import UserError

_STRIDE = 1_000_003
"""Distance of two ranks' seeds."""


def in_host_memory() -> bool:
    """False: gradients come out of a graph, and are best summed inside it."""
    return False


def device_facts() -> DeviceFacts:
    """What this rank computes on: its first GPU, else the CPU."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return cpu_facts()
    details = tf.config.experimental.get_device_details(gpus[0])
    name = str(details.get("device_name", "GPU"))
    capability = details.get("compute_capability")
    if capability is None:
        return DeviceFacts("rocm", name, str(details.get("gcn_arch_name", "")), own_memory_bytes())
    return DeviceFacts("cuda", name, f"sm_{capability[0]}{capability[1]}", own_memory_bytes())


def setup(threads: int, deterministic: bool) -> bool:
    """Set the compute threads of this process (0: TensorFlow's choice) and, if asked, deterministic kernels.

    GPU memory is taken as it is needed. Returns False where TensorFlow had started already, so that threads and
    memory stayed as they were. Raises `UserError` where Keras runs on another backend.
    """
    require_tensorflow()
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    try:
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        if threads > 0:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        return False
    return True


def require_tensorflow() -> None:
    """Raise `UserError` unless Keras computes with TensorFlow."""
    name = keras.backend.backend()
    if name != "tensorflow":
        raise UserError(f"Keras runs on its {name} backend", "tensorflow",
                        "unset KERAS_BACKEND or set it to tensorflow (also in keras.json)")


def on_gpu(model: keras.Model) -> bool:
    """True if a variable of ``model`` lives on a GPU."""
    return any("GPU" in (getattr(v.value, "device", "") or "") for v in model.weights)


def seed(seed: int, rank: int) -> None:
    """Give this rank its own stream of TensorFlow's random numbers; rank 0 of seed s is `tf.random.set_seed(s)`.

    Python's and numpy's generators belong to the core (`hvdtrain.rng`), those inside a model to `seed_model`.
    """
    tf.random.set_seed(seed + _STRIDE * rank)


def seed_model(states: dict[str, Any], rank: int) -> None:
    """Move a model's seed generators (dropout) to a stream of this rank; rank 0 keeps its own.

    ``states``: Keras variables of shape (2,): seed and counter, the same on every rank before this call.
    """
    for variable in states.values():
        start, counter = (int(n) for n in variable.numpy())
        variable.assign([(start + _STRIDE * rank) % (2**31), counter])
