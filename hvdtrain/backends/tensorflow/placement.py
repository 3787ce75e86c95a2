"""Where a rank's Keras model lives, how many threads it computes with, and its random seeds."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.cluster.devices import DeviceFacts, cpu_facts
from hvdtrain.cluster.machine.memory import DEVICE_PART, host_budget_bytes
from hvdtrain.cluster.machine.usage import total_bytes
from hvdtrain.core.errors import UserError, count

_STRIDE = 1_000_003
"""Distance of two ranks' seeds."""

HOST = "/CPU:0"
"""Host memory; on a machine without GPUs also the first device of a split model."""


def in_host_memory() -> bool:
    """Return whether this rank computes on the CPU: memory that ranks share sums faster than a graph's collectives."""
    return not tf.config.list_physical_devices("GPU")


def device_facts() -> DeviceFacts:
    """What this rank computes on: its first GPU, else the CPU."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return cpu_facts()
    details = tf.config.experimental.get_device_details(gpus[0])
    name = str(details.get("device_name", "GPU"))
    capability = details.get("compute_capability")
    if capability is None:
        return DeviceFacts("rocm", name, str(details.get("gcn_arch_name", "")), total_bytes())
    return DeviceFacts("cuda", name, f"sm_{capability[0]}{capability[1]}", total_bytes())


def free_bytes() -> int | None:
    """Bytes of this rank's first GPU beside what its tensors take, 0 where it cannot be told; None of a CPU.

    What other processes take of that GPU is not known here.
    """
    if in_host_memory():
        return None
    try:
        return max(0, total_bytes() - int(tf.config.experimental.get_memory_info("GPU:0")["current"]))
    except (ValueError, RuntimeError):  # a device that does not tell
        return 0


def setup(threads: int, deterministic: bool, devices: int = 1) -> bool:
    """Set the compute threads of this process (0: TensorFlow's choice) and, if asked, deterministic kernels.

    ``devices``: without a GPU the CPU is made to be so many logical devices, each of which computes on its own. GPU
    memory is taken as it is needed. Returns False where TensorFlow had started already, so that threads and memory
    stayed as they were. Raises `UserError` where Keras runs on another backend.
    """
    require_tensorflow()
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    try:
        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if devices > 1 and not gpus:
            own = tf.config.list_physical_devices("CPU")[0]
            if len(tf.config.get_logical_device_configuration(own) or [None]) < devices:
                tf.config.set_logical_device_configuration(own, [tf.config.LogicalDeviceConfiguration()] * devices)
        if threads > 0:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(max(threads, devices))
    except RuntimeError:
        return False
    return True


def keep_sums() -> None:
    """Have gradients that are summed stay as they are traced, on hosts without a GPU.

    TensorFlow's memory optimizer otherwise takes sums of three and more tensors apart where it believes that a graph
    needs most of a device's memory, so that a gradient's bits depend on what else is in memory: on the blocks that are
    recomputed, say. It believes a CPU to have 256 MiB.
    """
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
    from tensorflow.python.eager import context

    if tf.config.list_physical_devices("GPU"):  # there it also moves to the host what has no room
        return
    own = context.context()
    config = tf.compat.v1.ConfigProto()
    if own._config is not None:
        config.CopyFrom(own._config)
    config.graph_options.rewrite_options.memory_optimization = RewriterConfig.NO_MEM_OPT
    own._config = config
    tf.config.optimizer.set_experimental_options({})  # it forgets the options that calls have had


def split_devices(n: int) -> tuple[str, ...]:
    """``n`` devices of this rank for a split model: its GPUs, or logical devices of the CPU. Starts TensorFlow.

    Errors: `UserError` where there are fewer, saying how many and what to do.
    """
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    found = tf.config.list_logical_devices(kind)
    if len(found) >= n:
        return tuple(f"/{kind}:{i}" for i in range(n))
    if kind == "GPU":
        raise UserError(f"model_parallel is {n} and this rank has {count(len(found), 'GPU')}",
                        f"{n} of them", "start fewer ranks on each host, or set model_parallel accordingly")
    raise UserError(f"model_parallel is {n} and TensorFlow has started with {len(found)} logical CPU "
                    f"device{'s' * (len(found) != 1)}", f"{n} of them, made before TensorFlow starts",
                    "train with `python -m hvdtrain train --model_parallel`, or call "
                    f"hvdtrain.backends.tensorflow.setup(0, False, {n}) before the model is built")


def capacity_bytes(devices: tuple[str, ...], local_size: int) -> tuple[tuple[int, ...], int]:
    """(bytes that each device may hold, bytes that they may hold together); 0 where unknown or without a limit.

    Logical devices of a CPU share the host's memory, and that with the other ranks of the host.
    """
    if "CPU" in devices[0]:
        budget = host_budget_bytes(local_size)
        return (budget,) * len(devices), budget
    limits = []
    for i, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        parts = tf.config.get_logical_device_configuration(gpu) or [None]
        limits += [int((part.memory_limit or 0) * 2**20) if part else gpu_memory_bytes(i) for part in parts]
    return tuple(int(DEVICE_PART * limit) for limit in limits[:len(devices)]), 0


def gpu_memory_bytes(index: int) -> int:
    """Memory of a GPU that this process sees; 0 where that cannot be told. The driver is asked for the first one."""
    own = total_bytes()
    details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    alike = details and details[index] == details[0]
    return own if alike or index == 0 else 0


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

    Python's and numpy's generators belong to the core (`hvdtrain.core.rng`), those inside a model to `seed_model`.
    """
    tf.random.set_seed(seed + _STRIDE * rank)


def seed_model(states: dict[str, Any], rank: int) -> None:
    """Move a model's seed generators (dropout) to a stream of this rank; rank 0 keeps its own.

    ``states``: Keras variables of shape (2,): seed and counter, the same on every rank before this call.
    """
    for variable in states.values():
        start, counter = (int(n) for n in variable.numpy())
        variable.assign([(start + _STRIDE * rank) % (2**31), counter])
