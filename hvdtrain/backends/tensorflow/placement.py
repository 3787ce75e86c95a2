"""Devices of a rank's Keras model: variables and operations, threads, memory, random seeds, and moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """Return facts of this rank's first GPU, else of the CPU."""
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
    """Return the first GPU's bytes beside this rank's tensors, 0 if unknown; None for a CPU."""
    if in_host_memory():
        return None
    try:
        return max(0, total_bytes() - int(tf.config.experimental.get_memory_info("GPU:0")["current"]))
    except (ValueError, RuntimeError):  # a device that does not tell
        return 0


def setup(threads: int, deterministic: bool, devices: int = 1) -> bool:
    """Set the compute threads of this process (0: TensorFlow's choice) and, if asked, deterministic kernels.

    ``devices``: without a GPU the CPU becomes so many logical devices, each of which computes on its own. GPU memory is
    taken as it is needed. Return False if TensorFlow had started already, so that threads and memory stayed as they
    were. Raise `UserError` if Keras runs on another backend.
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
    """Keep sums of gradients as they are traced, on hosts without a GPU.

    TensorFlow's memory optimizer otherwise splits sums of three and more tensors if it believes that a graph needs most
    of a device's memory, so that a gradient's bits depend on other memory. It assumes a CPU of 256 MiB.
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
    """Return ``n`` devices of this rank for a split model: its GPUs, or logical devices of the CPU. Starts TensorFlow.

    Errors: `UserError` for fewer devices, with their number and the next step.
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
    """Return (bytes that each device may hold, bytes that they may hold together); 0: unknown or without a limit.

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
    """Return the memory of a GPU of this process; 0 if unknown. The driver is asked for the first one."""
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
    """Return whether a variable of ``model`` lives on a GPU."""
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


def follow() -> None:
    """Place operations without a device, from here to the end of the traced graph, on that of their largest input.

    TensorFlow would put them all on the first device and copy every variable there and back (Keras' optimizers,
    compressors). A variable counts by its value. Operations without inputs stay open: TensorFlow puts them beside their
    reader. No scope, because TensorFlow adds an operation for each result after the traced function's end.
    """
    graph = tf.compat.v1.get_default_graph()
    scope = graph.device(lambda op: op.device or _largest(op))
    scope.__enter__()
    graph._hvdtrain_following = scope  # would be left when it is collected; TensorFlow ends it with the graph


def _largest(op: Any) -> str:
    """Return the device of the input with the most elements, among those with a device; the first of equals."""
    best, most = "", -1
    for tensor in op.inputs:
        where = device_of(tensor)
        size = _elements(tensor)
        if where and size > most:
            best, most = where, size
    return best


def device_of(tensor: Any) -> str:
    """Return the device of a graph's tensor, if the graph knows it; of a capture, its device outside."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return str(tensor.device)
    if tensor.op.device:
        return str(tensor.op.device)
    if tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        captured = next((outer for outer, inner in captures if inner.name == tensor.name), None)
        return "" if captured is None else device_of(captured)
    return device_of(tensor.op.inputs[0]) if len(tensor.op.inputs) == 1 else ""


def _elements(tensor: Any) -> int:
    """Return the elements of a tensor, or of the variable behind a handle; unknown sizes count as large."""
    data = getattr(tensor, "_handle_data", None) if tensor.dtype == tf.resource else None
    shape = tf.TensorShape(data.shape_and_type[0].shape) if data is not None and data.is_set else tensor.shape
    n = shape.num_elements()
    return 1 << 60 if n is None else int(n)


def move(variable: keras.Variable, device: str) -> None:
    """Move a Keras variable to ``device`` with its value. Keras' object stays; its `tf.Variable` is a new one."""
    old = variable._value
    if _short(old.device) == _short(device):
        return
    with tf.init_scope(), tf.device(device):
        variable._value = tf.Variable(old.read_value(), dtype=old.dtype, trainable=old.trainable,
                                      name=variable.name, aggregation=old.aggregation,
                                      synchronization=old.synchronization)


@contextmanager
def lent(variables: Sequence[keras.Variable], device: str) -> Iterator[None]:
    """Have copies of ``variables`` on ``device`` within, and restore them afterwards."""
    own = [v._value for v in variables]
    try:
        for variable in variables:
            move(variable, device)
        yield
    finally:
        for variable, value in zip(variables, own):
            variable._value = value


def move_slots(optimizer: Any, variables: Sequence[keras.Variable], old_keys: dict[Any, keras.Variable]) -> None:
    """Move an optimizer's state, built for ``variables``, beside each of them, and register their new keys.

    Keras' optimizers hold one list for each kind of slot, in the variables' order. ``old_keys``: the keys of the
    optimizer for the variables before they were moved.
    """
    own = {id(v) for v in optimizer.variables} - {id(optimizer.iterations)}
    for name, held in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(held, (list, tuple)):
            continue
        if len(held) == len(variables):
            for slot, variable in zip(held, variables):
                if id(slot) in own:
                    move(slot, variable._value.device)
    for i, variable in enumerate(variables):
        optimizer._trainable_variables_indices[optimizer._var_key(variable)] = i
    keep_excluded(optimizer, old_keys)


def keep_excluded(optimizer: Any, old_keys: dict[Any, keras.Variable]) -> None:
    """Exclude from an optimizer's weight decay what it excluded under ``old_keys``."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded:
        now = {key: optimizer._var_key(variable) for key, variable in old_keys.items()}
        optimizer._exclude_from_weight_decay = type(excluded)(now.get(key, key) for key in excluded)
        optimizer._exclude_from_weight_decay_cache = {}


def _short(device: str) -> str:
    return device.rpartition("/")[2].removeprefix("device:")
