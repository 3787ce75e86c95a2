"""Horovod's collectives for TensorFlow. Sums only (law 1); names are given by the caller (law 5).

Horovod pairs operations of different ranks by the name of their graph node. Inside a function that is being traced
the node gets the given name, which is checked, and Horovod is told to ignore the prefix that inlining adds. Outside,
where TensorFlow would not pass a name on, each name gets a small function of its own.

A node that is placed on the CPU uses Horovod's MPI (or Gloo) operations. TensorFlow then copies its input and its
result between the devices, through pinned memory of its own, as soon as each is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.errors import PeerFailed
from hvdtrain.protocols import Collectives


class _Result:
    """A collective's result: symbolic inside a graph, complete outside."""

    def __init__(self, value: tf.Tensor) -> None:
        self._value = value

    def wait(self) -> tf.Tensor:
        return self._value


class HorovodCollectives:
    """`hvdtrain.protocols.Collectives` over ``horovod.tensorflow``: graph nodes, ordered by data dependency only.

    ``device``: "cpu" puts every node on the CPU; "" leaves the place to TensorFlow.
    """

    dtypes = frozenset({"float16", "float32", "float64", "int32", "int64", "uint8", "int8"})
    overlaps = True
    in_graph = True
    host = False

    def __init__(self, hvd: Any, device: str = "") -> None:
        assert device in ("", "cpu"), device
        self.name = "horovod over host memory" if device else "horovod"
        self._place = "/CPU:0" if device else ""
        self._ops = __import__(f"{hvd.__name__}.mpi_ops", fromlist=["mpi_ops"])
        self.rank, self.size = hvd.rank(), hvd.size()
        self.hierarchical = bool(hvd.nccl_built()) and not device
        self.reductions = frozenset({"adasum"} if hvd.mpi_enabled() else ())
        self._functions: dict[tuple[str, tf.DType], Callable[[tf.Tensor], tf.Tensor]] = {}

    def buffer(self, n: int, dtype: str) -> None:
        return None

    def allreduce(self, flat_N: tf.Tensor, name: str, op: str = "sum") -> _Result:
        how = self._ops.Adasum if op == "adasum" else self._ops.Sum
        return self._call(flat_N, name, lambda x: self._ops._allreduce(x, name=name, op=how, ignore_name_scope=True))

    def allgather(self, x_K: tf.Tensor, name: str) -> _Result:
        return self._call(x_K[None], name, lambda x: self._ops.allgather(x, name=name, ignore_name_scope=True))

    def alltoall(self, x_PK: tf.Tensor, name: str) -> _Result:
        return self._call(x_PK, name, lambda x: self._ops.alltoall(x, name=name, ignore_name_scope=True), x_PK.shape)

    def reducescatter(self, flat_N: tf.Tensor, name: str) -> _Result:
        sum_op = self._ops.Sum
        return self._call(flat_N, name,
                          lambda x: self._ops._reducescatter(x, name=name, op=sum_op, ignore_name_scope=True))

    def broadcast(self, x_N: tf.Tensor, name: str, root: int = 0) -> _Result:
        return self._call(x_N, name, lambda x: self._ops.broadcast(x, root, name=name, ignore_name_scope=True))

    def _call(self, x: tf.Tensor, name: str, operate: Callable[[tf.Tensor], tf.Tensor], shape: Any = None) -> _Result:
        """Add the operation to the graph that is being traced, or run it at once."""
        if tf.inside_function():
            with self._placed():
                out = _named(operate(x), name)
        else:
            out = self._run(tf.convert_to_tensor(x), name, operate)
        if shape is not None:
            out = tf.ensure_shape(out, shape)
        return _Result(out)

    def _run(self, x: tf.Tensor, name: str, operate: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        key = (f"{name}/{x.shape.rank}", x.dtype)
        if key not in self._functions:
            spec = tf.TensorSpec([None] * x.shape.rank, x.dtype)

            def graph(t: tf.Tensor) -> tf.Tensor:
                with self._placed():
                    return _named(operate(t), name)
            self._functions[key] = tf.function(graph, input_signature=[spec], jit_compile=False, autograph=False)
        with peer_failures():
            return self._functions[key](x)

    def _placed(self) -> AbstractContextManager[Any]:
        """Where nodes go. Not ``tf.device(None)``, which would lift a place that a caller has chosen."""
        return tf.device(self._place) if self._place else nullcontext()


def _named(out: tf.Tensor, name: str) -> tf.Tensor:
    """Pass ``out`` on if its node carries exactly ``name``, by which Horovod will find its peers."""
    assert out.op.name.rpartition("/")[2] == name, f"the graph named a collective {out.op.name!r} instead of {name!r}"
    return out


class peer_failures:
    """Turns TensorFlow's report of a collective that another rank left into `PeerFailed`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, tf.errors.OpError) and "Horovod" in error.message:
            said = next((line for line in error.message.splitlines() if "Horovod" in line), error.message)
            raise PeerFailed(f"Horovod could not complete a collective: {said.strip()}") from error


def collectives(kind: str, control: Any, exchange: Any, start_horovod: Callable[..., Any],
                over_host: bool = False) -> HorovodCollectives | None:
    """Horovod's collectives for TensorFlow, started; None for a kind the core provides.

    ``over_host``: from host memory, also where tensors lie on a GPU.
    """
    if kind != "horovod":
        return None
    return HorovodCollectives(start_horovod("tensorflow", exchange), "cpu" if over_host else "")


def stage(wire: Collectives, control: Any) -> Collectives:
    """The wire itself: what leaves a graph for a wire of host memory is there already."""
    return wire
