"""Horovod's collectives for TensorFlow. Sums only (law 1); names are given by the caller (law 5).

Owns the nodes of Horovod's operations. Graphs that carry names outside of a trace are `nodes`'.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.tensorflow import graphs
from hvdtrain.backends.tensorflow.nodes import NamedCalls, raised
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import pulse
from hvdtrain.comm.collectives.base import ReadyHandle, WithoutMemory
from hvdtrain.core.errors import PeerFailed, UserError
from hvdtrain.core.mesh import Group
from hvdtrain.core.protocols import Collectives, Control
from hvdtrain.core.protocols.transport import Counts
from hvdtrain.core.timeline import blocked

KINDS = {"sum": "Sum", "adasum": "Adasum", "min": "Min", "max": "Max", "product": "Product", "mean": "Average"}
"""Name of a reduction here -> Horovod's."""
MOST_DIMENSIONS = 200
"""Of a tensor; TensorFlow has 254."""


class HorovodCollectives(WithoutMemory):
    """Implements `hvdtrain.core.protocols.Collectives` over ``horovod.tensorflow``, as graph nodes that are ordered by
    data only.

    Horovod pairs operations of different ranks by the name of their node. In a function that is being traced the node
    gets the given name, which is checked, and Horovod ignores the prefix that inlining adds; outside, each name gets a
    small graph of its own. ``device``: "cpu" puts every node on the CPU, where Horovod uses MPI (or Gloo) and
    TensorFlow copies to and from the device through pinned memory; "" leaves the place to TensorFlow. ``process_set``:
    Horovod's object for the ranks that take part, all if None; ``rank`` and ``size`` are those within it, a broadcast's
    root is counted over all ranks. ``timeout_s``: longest time of one outside a graph (`deadline`). Beside the
    protocol: `gather_rows`, `alltoall_rows` and `scatter_rows`, for tensors of any shape whose rows belong to ranks.
    """

    dtypes = frozenset({"float16", "float32", "float64", "int32", "int64", "uint8", "int8"})
    overlaps = True
    in_graph = True
    host = False
    compares_roots = has_each = True

    def __init__(self, hvd: Any, device: str = "", process_set: Any = None, timeout_s: float = 600.0) -> None:
        assert device in ("", "cpu"), device
        self.timeout_s = timeout_s
        self.name = "horovod over host memory" if device else "horovod"
        self._place = "/CPU:0" if device else ""
        self._ops = __import__(f"{hvd.__name__}.mpi_ops", fromlist=["mpi_ops"])
        self._among = {"process_set": process_set or hvd.global_process_set, "ignore_name_scope": True}
        self.rank, self.size = (process_set or hvd).rank(), (process_set or hvd).size()
        self.hierarchical = bool(hvd.nccl_built()) and not device
        adds = {"adasum"} if hvd.mpi_enabled() and process_set is None else set()
        self.reductions = frozenset({"min", "max", "product", *adds})
        self.halves = not self.size & (self.size - 1)
        self._named = NamedCalls()

    def among(self, group: Group) -> HorovodCollectives:
        """Raise `UserError`: Horovod is started for all ranks."""
        raise UserError("a pipeline over ranks with collectives horovod", "a transport for groups of ranks",
                        "set collectives: auto, shared or mpi")

    def allreduce(self, flat_N: tf.Tensor, name: str, op: str = "sum") -> ReadyHandle:
        how = getattr(self._ops, KINDS[op])
        return self._call(lambda name, x: self._ops._allreduce(x, name=name, op=how, **self._among), name, op, flat_N)

    def allgather(self, x_K: tf.Tensor, name: str) -> ReadyHandle:
        return self.gather_rows(x_K[None], name)

    def gather_rows(self, x: tf.Tensor, name: str) -> ReadyHandle:
        """Return every rank's rows, by rank: (R_r, ...) -> (sum R_r, ...); ranks may have different numbers of rows."""
        return self._call(lambda name, x: self._ops.allgather(x, name=name, **self._among), name, "gather", x)

    def alltoall(self, x_PK: tf.Tensor, name: str) -> ReadyHandle:
        out = self._call(lambda name, x: self._ops.alltoall(x, name=name, **self._among), name, "alltoall", x_PK)
        return ReadyHandle(tf.ensure_shape(out.wait(), x_PK.shape))

    def alltoall_rows(self, x: tf.Tensor, splits_P: tf.Tensor, name: str) -> ReadyHandle:
        """Send ``splits_P[p]`` rows to rank p: (R, ...), int32 (P,) -> ((R', ...), int32 (P,) rows by their source)."""
        def operate(name: str, x: tf.Tensor, splits_P: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._ops.alltoall(x, splits=splits_P, name=name, **self._among)

        return self._call(operate, name, "alltoall_rows", x, splits_P)

    def alltoallv(self, flat_N: tf.Tensor, sent_P: Counts, got_P: Counts, name: str) -> ReadyHandle:
        if not tf.is_tensor(sent_P):
            rows, _ = self.alltoall_rows(flat_N, tf.constant(list(sent_P), tf.int32), name).wait()
            return ReadyHandle(tf.ensure_shape(rows, [sum(got_P)]))

        def operate(name: str, packed: tf.Tensor) -> tf.Tensor:
            splits_P = packed[:self.size]
            sent = packed[self.size:self.size + tf.reduce_sum(splits_P)]  # of a rank that enters zeros nothing
            return self._ops.alltoall(sent, splits=splits_P, name=name, **self._among)[0]

        return self._call(operate, name, "alltoallv", tf.concat([sent_P, flat_N], 0))

    def reducescatter(self, flat_N: tf.Tensor, name: str) -> ReadyHandle:
        return self.scatter_rows(flat_N, name)

    def scatter_rows(self, x: tf.Tensor, name: str) -> ReadyHandle:
        """Return this rank's rows of the sum: (R, ...) -> (R_r, ...); the first R mod P ranks get one more."""
        sum_op = self._ops.Sum
        return self._call(lambda name, x: self._ops._reducescatter(x, name=name, op=sum_op, **self._among), name,
                          "scatter", x)

    def reducescatterv(self, flat_N: tf.Tensor, sizes_P: Sequence[int], name: str) -> ReadyHandle:
        """Return this rank's shard of the sum: shards are exchanged and added in rank order; P times its memory."""
        assert flat_N.shape[0] == sum(sizes_P), f"reducescatterv of {flat_N.shape[0]} elements into {list(sizes_P)}"
        if not sum(sizes_P):  # on every rank, which all know
            return ReadyHandle(flat_N)
        rows, _ = self.alltoall_rows(flat_N, tf.constant(list(sizes_P), tf.int32), name).wait()
        # Fails where ranks disagree about the parts, and so sent other numbers of elements.
        return ReadyHandle(_sum_rows(tf.reshape(rows, [self.size, sizes_P[self.rank]])))

    def allgatherv(self, part_K: tf.Tensor, sizes_P: Sequence[int], name: str) -> ReadyHandle:
        assert part_K.shape[0] == sizes_P[self.rank], f"allgatherv of {part_K.shape[0]} as one of {list(sizes_P)}"
        if not sum(sizes_P):
            return ReadyHandle(part_K)
        return ReadyHandle(tf.ensure_shape(self.gather_rows(part_K, name).wait(), [sum(sizes_P)]))

    def broadcast(self, x_N: tf.Tensor, name: str, root: int = 0) -> ReadyHandle:
        return self._call(lambda name, x: self._ops.broadcast(x, root, name=name, **self._among), name,
                          ("broadcast", root), x_N)

    def allreduce_each(self, xs: Sequence[tf.Tensor], name: str, ops: Sequence[str]) -> ReadyHandle:
        """Run `allreduce` of each tensor by its op, as ``name.0``, ``name.1``, ..., all at the same time; not in a
        graph.

        The first tensor travels with a dimension more for each tensor, so that Horovod, which compares shapes, fails if
        ranks bring other numbers of them: at once on those with the fewest; one with more waits with the rest of its
        tensors until the others have ended.
        """
        def operate(name: str, *xs: tf.Tensor) -> tuple[tf.Tensor, ...]:
            counted = tf.reshape(xs[0], [-1, *[1] * (len(xs) % MOST_DIMENSIONS)])
            sent = zip((counted, *xs[1:]), ops)
            first, *rest = (self.allreduce(x, f"{name}.{i}", op).wait() for i, (x, op) in enumerate(sent))
            return (tf.reshape(first, tf.shape(xs[0])), *rest)

        return self._run(operate, name, ("allreduce_each", *ops), xs)

    def gather_rows_each(self, xs: Sequence[tf.Tensor], name: str) -> ReadyHandle:
        """Run `gather_rows` of each tensor, named as by `allreduce_each`, all at the same time; not in a graph."""
        return self._each(self.gather_rows, xs, name)

    def scatter_rows_each(self, xs: Sequence[tf.Tensor], name: str) -> ReadyHandle:
        return self._each(self.scatter_rows, xs, name)

    def _each(self, collective: Callable[..., ReadyHandle], xs: Sequence[tf.Tensor], name: str) -> ReadyHandle:
        def operate(name: str, *xs: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return tuple(collective(x, f"{name}.{i}").wait() for i, x in enumerate(xs))

        return self._run(operate, name, collective.__name__, xs)

    def _call(self, operate: Callable[..., Any], name: str, kind: Hashable, *xs: tf.Tensor) -> ReadyHandle:
        """Add ``operate(name, *xs)`` to the traced graph, or run it at once; ``kind``: apart from its namesakes."""
        def placed(name: str, *xs: tf.Tensor) -> Any:
            with _placed(self._place):
                return _named(operate(name, *xs), name)

        if not tf.inside_function():
            return self._run(placed, name, kind, xs)
        out = placed(name, *xs)
        graphs.note_after(out, lambda value: self._run(placed, name, kind, graphs.poison(xs, value)), self._place)
        return ReadyHandle(out)

    def _run(self, operate: Callable[..., Any], name: str, kind: Hashable, xs: Sequence[tf.Tensor]) -> ReadyHandle:
        what = f"Horovod's {kind[0] if isinstance(kind, tuple) else kind} {name!r}"
        with peer_failures(), deadline(self.timeout_s, what), pulse.waiting(what), blocked(name):
            return ReadyHandle(self._named.run(operate, [tf.convert_to_tensor(x) for x in xs], name, kind))


def _placed(place: str) -> AbstractContextManager[Any]:
    """Return the scope of nodes. Not ``tf.device(None)``, which would lift a place that a caller has chosen."""
    return tf.device(place) if place else nullcontext()


def _named(out: Any, name: str) -> Any:
    """Return ``out`` if its node carries exactly ``name``, by which Horovod will find its peers."""
    node = (out[0] if isinstance(out, tuple) else out).op.name
    assert node.rpartition("/")[2] == name, f"the graph named a collective {node!r} instead of {name!r}"
    return out


def _sum_rows(rows_PK: tf.Tensor) -> tf.Tensor:
    """Return the sum of the rows in their order, float16 in float32."""
    wide_PK = tf.cast(rows_PK, tf.float32) if rows_PK.dtype == tf.float16 else rows_PK
    rows = tf.unstack(wide_PK)
    total_K = rows[0]
    for row_K in rows[1:]:
        with tf.control_dependencies([total_K]):  # else TensorFlow makes one AddN of them, which adds in eights
            total_K = total_K + row_K
    return tf.cast(total_K, rows_PK.dtype)


class peer_failures:
    """Context that raises `PeerFailed` for TensorFlow's report of a collective that another rank left, and the original
    of a Python node's error.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        own = raised(error.message) if isinstance(error, tf.errors.OpError) else None
        if own is not None:
            raise own from None
        if isinstance(error, tf.errors.OpError) and "Horovod" in error.message:
            said = next((line for line in error.message.splitlines() if "Horovod" in line), error.message)
            raise PeerFailed(f"Horovod could not complete a collective: {said.strip()}") from error


def collectives(kind: str, control: Control, exchange: Any, start_horovod: Callable[..., Any],
                over_host: bool = False) -> HorovodCollectives | None:
    """Return Horovod's started collectives, ``over_host`` from host memory; None for a kind of the core."""
    if kind != "horovod":
        return None
    return HorovodCollectives(start_horovod("tensorflow", exchange), "cpu" if over_host else "",
                              timeout_s=control.timeout_s)


def stage(wire: Collectives, control: Control) -> Collectives:
    """Return the transport itself: what leaves a graph for a transport of host memory is in host memory already."""
    return wire
