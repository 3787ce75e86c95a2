"""Bytes and operations that a Keras model costs while it trains, planned and measured.

Owns the count of optimizer state without making it for the whole model, and of operations in a traced graph; loops with
products, and unknown shapes, have no count.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.optim import alike
from hvdtrain.backends.tensorflow.optimizer import Optimizer
from hvdtrain.backends.tensorflow.state import nbytes
from hvdtrain.backends.tensorflow.transforms.sync_batchnorm import norms
from hvdtrain.core.protocols.types import itemsize
from hvdtrain.core.timeline.spans import KERNEL, Marks, Span
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.planning.memory.forecast import Model, Slots

SMALL = 3
"""Elements of the vectors that stand in for variables."""


def model_bytes(parts: ModelParts) -> Model:
    """Return what is known of a model and its optimizer before the first step."""
    params, optimizer = parts.params, parts.optimizer
    assert isinstance(optimizer, Optimizer)
    own = {id(v) for v in parts.model.trainable_variables}
    others = [v for v in parts.model.variables if id(v) not in own]
    slot, common = Slots(0.0), state_now(parts)  # state of other shapes than the variables': as it was made
    if optimizer.elementwise:
        slot, common = _by_vectors(optimizer.own)
    channels = tuple(int(layer.moving_mean.shape[0]) for layer in norms(parts.model) if layer.built)
    return Model(params.specs, nbytes(others), [slot] * len(params.specs), common, optimizer.elementwise,
                 "tensorflow", norm_channels=channels)


def _by_vectors(own: Any) -> tuple[Slots, int]:
    """Return (what an optimizer like ``own`` keeps of each variable, bytes that it keeps once), by small vectors."""
    made = [alike(own) for _ in range(2)]
    held = []
    for n_variables, optimizer in enumerate(made, 1):
        optimizer.build([keras.Variable(keras.ops.zeros((SMALL,))) for _ in range(n_variables)])
        held.append(optimizer.variables)
    one, two = held
    shaped = sum(itemsize(keras.backend.standardize_dtype(v.dtype)) for v in one if tuple(v.shape) == (SMALL,))
    fixed = nbytes(two) - nbytes(one) - shaped * SMALL
    common = nbytes(one) - shaped * SMALL - fixed
    return Slots(float(shaped), fixed), common


def state_now(parts: ModelParts) -> int:
    """Return the bytes of the optimizer's state that are there already."""
    assert isinstance(parts.optimizer, Optimizer)
    return nbytes(parts.optimizer.own.variables)


def traced(parts: ModelParts, batch: object) -> None:
    """Do nothing: a graph's memory is its executor's affair, and is measured."""


def held(parts: ModelParts) -> dict[str, int | None]:
    """Return bytes of variables and of this rank's optimizer state; gradients, in graphs or buckets, are None."""
    model: Any = parts.model
    return {"parameters": nbytes(model.variables), "gradients": None, "state": state_now(parts)}


def allocators() -> list[dict[str, Any]]:
    """Return allocator statistics of each GPU of this process; [] without one. Reserved and gaps are unknown."""
    found = []
    for i in range(len(tf.config.list_physical_devices("GPU"))):
        told = tf.config.experimental.get_memory_info(f"GPU:{i}")
        found.append({"allocated_bytes": int(told["current"]), "reserved_bytes": None, "peak_bytes": int(told["peak"]),
                      "fragmentation": None, "retries": None})
    return found


_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHING = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
_HIDDEN = ("CudnnRNN", "BlockLSTM", "GRUBlock")
"""Beginnings of operations that hold products of their own."""

REMAT = "remat/"
"""Scope of recomputed operations (`recompute`), which do not count."""


class Unknown(Exception):
    """The operations cannot be counted; its text says why."""


def product_type(parts: ModelParts) -> str:
    """Return the type of most products: "bf16", "fp16", "tf32" or "fp32"; "" for another one."""
    if parts.precision.own != "fp32":
        return parts.precision.own
    model: Any = parts.model
    kind = str(getattr(model, "compute_dtype", "float32"))
    if kind != "float32":
        return {"bfloat16": "bf16", "float16": "fp16"}.get(kind, "")
    return "tf32" if tf.config.experimental.tensor_float_32_execution_enabled() else "fp32"


def flops_of_pass(parts: ModelParts, batch: object) -> tuple[None, str]:
    """Return nothing: `flops_of_graphs` counts a graph that has been traced for training."""
    return None, ""


def flops_of_graphs(parts: ModelParts, dp: Any) -> tuple[float | None, str]:
    """Return (operations of one sample's forward and backward, "") or (None, why), by a graph for a known size."""
    if getattr(dp, "compression", "") == "powersgd":
        return None, "PowerSGD multiplies matrices in the same graph"
    stage: Any = parts.stage
    found = stage.calls.exact()
    if not found:
        return None, "no graph is for a known number of samples"
    samples, graph = max(found, key=lambda row: row[0])
    try:
        total = count(graph)
    except Unknown as error:
        return None, str(error)
    return (total / samples, "") if total else (None, "the graph has no matrix product")


def count(graph: Any) -> float:
    """Return the operations of matrix products and convolutions in ``graph`` and what it calls, or `Unknown`."""
    total = 0.0
    for op in _run(graph):
        if op.name.startswith(REMAT) or f"/{REMAT}" in op.name:
            continue
        if op.type in _COUNTED:
            total += _COUNTED[op.type](op)
        elif op.type in _CALLS:
            total += count(_function(graph, op.get_attr("f").name))
        elif op.type in _BRANCHING:
            _without_products(graph, op)
        elif op.type.startswith(_HIDDEN):
            raise Unknown(f"operations within {op.type} are not known")
    return total


def _run(graph: Any) -> list[Any]:
    """Return the operations that a call of ``graph`` runs, without those that nobody reads."""
    todo = [t.op for t in graph.outputs] + list(graph.control_outputs)
    todo += [op for op in graph.get_operations() if op.op_def is not None and op.op_def.is_stateful]
    found: dict[str, Any] = {}
    while todo:
        op = todo.pop()
        if op.name not in found:
            found[op.name] = op
            todo += [*(t.op for t in op.inputs), *op.control_inputs]
    return list(found.values())


def _function(graph: Any, name: str) -> Any:
    while graph is not None:
        found = graph._functions.get(name)
        if found is not None:
            return found.graph
        graph = getattr(graph, "outer_graph", None)
    raise Unknown(f"the function {name} is not in the graph")


def _without_products(graph: Any, op: Any) -> None:
    """Raise `Unknown` if a loop or a branch has products: how often they are made is not known."""
    for name in ("body", "then_branch", "else_branch"):
        if any(attribute == name for attribute in op.node_def.attr):
            if count(_function(graph, op.get_attr(name).name)):
                raise Unknown(f"the graph has products in a loop or branch ({op.name})")
    if op.type.endswith("Case"):
        raise Unknown(f"the graph has branches ({op.name})")


def _dims(tensor: Any) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise Unknown(f"the shape of {tensor.name} is not known")
    return [int(n) for n in tensor.shape]


def _product(op: Any) -> float:
    a, transposed = _dims(op.inputs[0]), op.get_attr("transpose_a")
    return 2.0 * math.prod(_dims(op.outputs[0])) * a[0 if transposed else 1]


def _batched(op: Any) -> float:
    a = _dims(op.inputs[0])
    return 2.0 * math.prod(_dims(op.outputs[0])) * a[-2 if op.get_attr("adj_x") else -1]


def _einsum(op: Any) -> float:
    """Count a multiplication for each combination of all letters; none for a sum over one tensor."""
    if len(op.inputs) < 2:
        return 0.0
    left = op.get_attr("equation").decode().split("->")[0].split(",")
    lengths: dict[str, int] = {}
    for letters, tensor in zip(left, op.inputs):
        dims = _dims(tensor)
        named = letters.replace("...", "")
        broadcast = len(dims) - len(named)
        before = letters.index("...") if "..." in letters else len(named)
        names = [*named[:before], *(f"...{broadcast - i}" for i in range(broadcast)), *named[before:]]
        for name, n in zip(names, dims):
            lengths[name] = max(n, lengths.get(name, 1))
    return 2.0 * math.prod(lengths.values())


def _filter(tensor: Any) -> list[int]:
    """Return the lengths of a convolution's filter, which is given itself or by its lengths."""
    if tensor.dtype != tf.int32:
        return _dims(tensor)
    if tensor.op.type in ("Shape", "ShapeN"):
        return _dims(tensor.op.inputs[tensor.value_index])
    known = tf.get_static_value(tensor)
    if known is None:
        raise Unknown(f"the lengths {tensor.name} are not known")
    return [int(n) for n in known]


def _convolution(filters: int, result: Callable[[Any], Any], depthwise: bool = False) -> Callable[[Any], float]:
    """Return a counter of convolutions: input ``filters`` holds the filter, or its shape; ``result`` gives forward's
    output.

    Forward and both parts of backward cost the same: each output element by each element of its filter.
    """
    def counted(op: Any) -> float:
        dims = _filter(op.inputs[filters])
        return 2.0 * math.prod(_dims(result(op))) * math.prod(dims[:-2] if depthwise else dims[:-1])
    return counted


_COUNTED: dict[str, Callable[[Any], float]] = {
    "MatMul": _product, "BatchMatMul": _batched, "BatchMatMulV2": _batched, "BatchMatMulV3": _batched,
    "Einsum": _einsum, "XlaEinsum": _einsum,
}
for _name in ("Conv2D", "Conv3D"):
    _COUNTED[_name] = _convolution(1, lambda op: op.outputs[0])
    _backward = _name + "Backprop"
    _version = "V2" if _name == "Conv3D" else ""
    _COUNTED[_backward + "Input" + _version] = _convolution(1, lambda op: op.inputs[2])
    _COUNTED[_backward + "Filter" + _version] = _convolution(1, lambda op: op.inputs[2])
_COUNTED["DepthwiseConv2dNative"] = _convolution(1, lambda op: op.outputs[0], True)
_COUNTED["DepthwiseConv2dNativeBackpropInput"] = _convolution(1, lambda op: op.inputs[2], True)
_COUNTED["DepthwiseConv2dNativeBackpropFilter"] = _convolution(1, lambda op: op.inputs[2], True)


_MARK = "hvdtrain mark"


class Profiler:
    """Implements `hvdtrain.core.timeline.spans.Profiler` for TensorFlow."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-profile-")
        self._marks = Marks(lambda: tf.profiler.experimental.Trace(_MARK))
        self.within_s = 0.0

    def start(self) -> None:
        tf.profiler.experimental.start(self._folder.name)
        self._marks.put()

    def stop(self) -> list[Span]:
        self._marks.put()
        tf.profiler.experimental.stop()
        with self._folder:
            found = [event for path in Path(self._folder.name).rglob("*.xplane.pb") for event in _events(path)]
        shift_s, self.within_s = self._marks.shift([begin_s for name, _, begin_s, _, _ in found if name == _MARK])
        return [Span(name, lane, begin_s + shift_s, end_s + shift_s, cause)
                for name, lane, begin_s, end_s, cause in found if name != _MARK]


def ranges() -> tuple[Callable[[str], Any], Callable[[], Any]] | None:
    """Return functions that begin and end an NVTX range, which Nsight Systems shows; None without CUDA's library for
    it.

    TensorFlow has none of its own; CUDA's toolkit has, and pip's nvidia-nvtx.
    """
    try:
        library = ctypes.CDLL(ctypes.util.find_library("nvToolsExt") or "libnvToolsExt.so.1")
    except OSError:
        return None
    library.nvtxRangePushA.argtypes = [ctypes.c_char_p]
    return lambda name: library.nvtxRangePushA(name.encode()), library.nvtxRangePop


def _events(path: Path) -> list[tuple[str, str, float, float, str]]:
    """Return (name, lane, begin, end, cause) of each event in a file of TensorFlow's, in seconds since 1970."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # its own readers are in no package that it needs

    space: Any = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    found = []
    threads: dict[str, str] = {}  # TensorFlow's own names of them are long numbers
    for plane in space.planes:
        device = plane.name.startswith("/device:")
        if not device and not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:
            name = line.display_name or line.name or str(line.id)
            kind = name.partition("/")[0]
            threads.setdefault(name, f"{kind} {sum(other.startswith(kind) for other in threads) + 1}")
            lane = f"{plane.name.removeprefix('/device:')} {name}" if device else f"tensorflow {threads[name]}"
            for event in line.events:
                if not event.duration_ps:
                    continue
                begin_s = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
                found.append((plane.event_metadata[event.metadata_id].name, lane, begin_s,
                              begin_s + event.duration_ps / 1e12, KERNEL if device else "tensorflow"))
    return found
