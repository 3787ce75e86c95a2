"""Collectives on one tensor or several, by Horovod's names: `allreduce`, `allgather`, `broadcast`, ...

Owns what a call means: factors, means, types, what one rank alone gets. Moving is a wire's (`basics.wire`). Gradients
flow through all of them where Horovod is the wire.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.tensorflow.collectives import peer_failures
from hvdtrain.errors import UserError
from hvdtrain.tensorflow import basics
from hvdtrain.tensorflow.basics import Adasum, Average, Max, Min, Product, Sum
from hvdtrain.tensorflow.compression import Compression, kind_of
from hvdtrain.tensorflow.nodes import node_name, refuse_xla, through_trace, unconverted, unfolded
from hvdtrain.tensorflow.process_sets import ProcessSet, global_process_set
from hvdtrain.tensorflow.wiretypes import Back, movable, summable

KINDS = {Average: "sum", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}
"""Reduction -> what a wire calls it; an average is a sum, divided."""


@unconverted
def allreduce(tensor: Any, average: bool | None = None, device_dense: str = '', device_sparse: str = '',
              compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
              ignore_name_scope: bool = False) -> Any:
    """Combine a tensor over the ranks: the mean by default (the sum, then divided), or what ``op`` says.

    The same shape on every rank; of `tf.IndexedSlices` rows are gathered instead. ``average`` is the old form of
    ``op``. Factors apply on this rank, before and after; they may differ between ranks. Where the graph's name scope
    is concerned nothing need be ignored: it never is part of a name. Collective.
    """
    op = reduction(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse(tensor, op, prescale_factor * postscale_factor, name, process_set)
    x = tf.convert_to_tensor(tensor)
    wire = basics.wire(process_set)
    if wire is None:
        return tf.identity(_times(x, prescale_factor * postscale_factor))
    if KINDS[op] != "sum" and KINDS[op] not in wire.reductions or op == Adasum and wire.size & (wire.size - 1):
        raise through_trace(UserError(f"a reduction by {KINDS[op]} over {wire.size} ranks by {wire.name}",
                                      "Adasum over 1, 2, 4, 8, ... ranks, all of the job, with a Horovod that was "
                                      "built with MPI", "use op=hvd.Average"))
    with tf.device(device_dense) if device_dense else nullcontext():
        own, back = _packed(_times(x, prescale_factor), compression, wire.size if op == Average else 1)
        total = _through(wire.allreduce, own, _name(f"allreduce.{KINDS[op]}", name, x), KINDS[op])
        return _times(back(total), postscale_factor)


def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = '',
                      device_sparse: str = '', compression: Any = Compression.none, op: int | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                      name: str | None = None) -> list[Any]:
    """`allreduce` of several tensors; those of one type travel as one. Collective."""
    op = reduction(op, average)
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    if op not in (Average, Sum) or any(isinstance(t, tf.IndexedSlices) for t in tensors) or compression not in (
            Compression.none, Compression.fp16, Compression.bf16):
        return [allreduce(t, None, device_dense, device_sparse, compression, op, name=f"{name or 'group'}.{i}",
                          process_set=process_set, **scale) for i, t in enumerate(tensors)]
    xs = [tf.convert_to_tensor(t) for t in tensors]
    out: list[Any] = [None] * len(xs)
    for dtype in dict.fromkeys(x.dtype for x in xs):
        members = [i for i, x in enumerate(xs) if x.dtype == dtype]
        flat_N = tf.concat([tf.reshape(xs[i], [-1]) for i in members], 0)
        sum_N = allreduce(flat_N, None, device_dense, device_sparse, compression, op, process_set=process_set,
                          name=f"{name or 'group'}.{dtype.name}", **scale)
        parts = tf.split(sum_N, [tf.size(xs[i]) for i in members])
        for i, part in zip(members, parts):
            out[i] = tf.ensure_shape(tf.reshape(part, tf.shape(xs[i])), xs[i].shape)
    return out


@unconverted
def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Every rank's rows, one rank behind the other: (R_r, ...) -> (sum R_r, ...).

    All dimensions but the first are the same on every rank. Collective.
    """
    x = tf.convert_to_tensor(tensor)
    if x.shape.rank == 0:
        raise ValueError("allgather of a scalar; expected at least one dimension, which rows are gathered along")
    wire = basics.wire(process_set)
    if wire is None:
        return tf.identity(x)
    moved, back = movable(x)
    return back(tf.ensure_shape(_through(wire.gather_rows, moved, _name("allgather", name, x)), [None, *x.shape[1:]]))


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """`allgather` of several tensors. Collective."""
    return [allgather(t, f"{name or 'group'}.{i}", ignore_name_scope, process_set) for i, t in enumerate(tensors)]


@unconverted
def broadcast(tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Rank ``root_rank``'s tensor, on every rank; the same shape everywhere. Collective."""
    x = tf.convert_to_tensor(tensor)
    check_root(root_rank, process_set)
    wire = basics.wire(process_set)
    if wire is None:
        return tf.identity(x)
    moved, back = movable(x)
    return back(_through(wire.broadcast, moved, _name(f"broadcast.{root_rank}", name, x), root_rank))


def broadcast_(variables: Sequence[Any], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[Any]:
    """Give ``variables`` the values of rank ``root_rank``, and return those. Collective."""
    from hvdtrain.tensorflow.objects import broadcast_variables

    broadcast_variables(variables, root_rank, process_set)
    return [tf.convert_to_tensor(v) for v in variables]


@unconverted
def alltoall(tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> Any:
    """Rows for every rank: ``splits[p]`` of them go to the p-th, the same number to each where ``splits`` is None.

    Returns what came, by source; with ``splits`` also int32 (P,): how many rows came from whom. Collective.
    """
    x, wire = tf.convert_to_tensor(tensor), basics.wire(process_set)
    given = None if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    if wire is None:
        return tf.identity(x) if given is None else (tf.identity(x), given)
    if given is None and x.shape[0] is not None and x.shape[0] % wire.size:
        raise through_trace(UserError(f"alltoall of {x.shape[0]} rows over {wire.size} ranks", "a multiple of it",
                                      "pass splits, rows for each rank"))
    even = tf.fill([wire.size], tf.shape(x)[0] // wire.size)
    moved, back = movable(x)
    refuse_xla("alltoall")
    out, received_P = wire.alltoall_rows(unfolded(moved), even if given is None else given,
                                         _name("alltoall", name, x)).wait()
    out = back(tf.ensure_shape(out, [None, *x.shape[1:]]))
    return out if given is None else (out, received_P)


@unconverted
def reducescatter(tensor: Any, device_dense: str = '', compression: Any = Compression.none, op: int = Average,
                  name: str | None = None, process_set: ProcessSet = global_process_set,
                  ignore_name_scope: bool = False, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Any:
    """This rank's rows of the mean (or sum) over the ranks: (R, ...) -> (R_r, ...).

    Where P does not divide R the first ranks get a row more. Collective.
    """
    if op not in (Average, Sum):
        raise UserError(f"reducescatter by {KINDS.get(op, op)}", "hvd.Average or hvd.Sum", "pass one of them")
    x, wire = tf.convert_to_tensor(tensor), basics.wire(process_set)
    if wire is None:
        return tf.identity(_times(x, prescale_factor * postscale_factor))
    with tf.device(device_dense) if device_dense else nullcontext():
        own, back = _packed(_times(x, prescale_factor), compression, wire.size if op == Average else 1)
        rows = _through(wire.scatter_rows, own, _name("reducescatter", name, x))
        return _times(back(tf.ensure_shape(rows, [None, *x.shape[1:]])), postscale_factor)


def grouped_reducescatter(tensors: Sequence[Any], device_dense: str = '', compression: Any = Compression.none,
                          op: int = Average, process_set: ProcessSet = global_process_set,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> list[Any]:
    """`reducescatter` of several tensors. Collective."""
    return [reducescatter(t, device_dense, compression, op, f"group.{i}", process_set, False, prescale_factor,
                          postscale_factor) for i, t in enumerate(tensors)]


def join() -> Any:
    """Wait until every rank has called it, and return the number of one that came last, an int32 scalar; collective.

    Over Horovod ranks that have not come yet go on with their `allreduce`s, in which those that wait count as zeros.
    Batches of unequal number are better given a weight: a mean over ranks counts a rank that waits.
    """
    wire = basics.wire()
    if wire is None:
        return tf.constant(0)
    if basics.world().hvd is None:
        raise UserError("join over plain MPI, where every rank enters every collective", "Horovod",
                        "run `python -m hvdtrain build`, or give every rank the same number of batches")
    with peer_failures():
        return basics.world().hvd.join()


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """`size`, of a process set, as an int32 tensor."""
    return tf.constant(basics.world().sets[process_set_id].size(), tf.int32, name=name or "size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 where this rank is in the process set and 0 where it is not, as an int32 tensor."""
    return tf.constant(int(bool(basics.world().sets[process_set_id].included())), tf.int32, name=name or "included")


def local_size_op(name: str | None = None) -> Any:
    """`local_size` as an int32 tensor."""
    return tf.constant(basics.local_size(), tf.int32, name=name or "local_size")


def rank_op(name: str | None = None) -> Any:
    """`rank` as an int32 tensor."""
    return tf.constant(basics.rank(), tf.int32, name=name or "rank")


def local_rank_op(name: str | None = None) -> Any:
    """`local_rank` as an int32 tensor."""
    return tf.constant(basics.local_rank(), tf.int32, name=name or "local_rank")


def reduction(op: int | None, average: bool | None) -> int:
    """The reduction that ``op`` and the old ``average`` mean together; `ValueError` where both are given."""
    if average is None:
        if op is not None and op not in KINDS:
            raise ValueError(f"op is {op!r}; expected hvd.Average, Sum, Adasum, Min, Max or Product")
        return Average if op is None else op
    if op is not None:
        raise ValueError("average is the old form of op; pass op alone")
    warnings.warn("average is the old form of op=hvd.Average and op=hvd.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def check_root(root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Raise `UserError` for a root that is not among the ranks of the set, which are counted over the whole job."""
    known = process_set.ranks or []
    if basics.is_initialized() and root_rank not in known and process_set.included():
        raise UserError(f"root_rank {root_rank} among ranks {known}", "one of them", "pass such a rank")


def _sparse(slices: tf.IndexedSlices, op: int, factor: float, name: str | None, process_set: ProcessSet) -> Any:
    """Rows and indices of all ranks."""
    if op not in (Average, Sum):
        raise UserError(f"a sparse tensor reduced by {KINDS[op]}", "hvd.Average or hvd.Sum",
                        "pass one of them, or tf.convert_to_tensor(slices)")
    wire = basics.wire(process_set)
    values = allgather(slices.values, f"{name or 'sparse'}.values", process_set=process_set)
    indices = allgather(slices.indices, f"{name or 'sparse'}.indices", process_set=process_set)
    if op == Average and wire is not None:
        values = values / tf.cast(wire.size, values.dtype)
    return tf.IndexedSlices(_times(values, factor), indices, slices.dense_shape)


def _through(collective: Any, x: tf.Tensor, name: str, *more: Any) -> tf.Tensor:
    """One collective, in a graph or outside."""
    refuse_xla(name.partition(".")[0])
    return collective(unfolded(x), name, *more).wait()


def _name(kind: str, name: str | None, x: tf.Tensor) -> str:
    """A node's name: the caller's, or in a graph that of the tensor."""
    if name is None and tf.inside_function():
        name = x.op.name
    return node_name(kind if name is None else f"{kind}.{name}")


def _times(x: tf.Tensor, factor: float) -> tf.Tensor:
    """x times factor, in float64 for whole numbers."""
    if factor == 1.0:
        return x
    if x.dtype.is_integer:
        return tf.cast(tf.cast(x, tf.float64) * factor, x.dtype)
    return x * tf.cast(factor, x.dtype)


def _packed(x: tf.Tensor, compression: Any, divisor: int) -> tuple[tf.Tensor, Back]:
    """(what is summed for ``x``, what makes the sum divided by ``divisor`` of it again).

    float16 is summed in float32 unless the caller asks for it as compression; the division has the digits of the sum.
    """
    kind = kind_of(compression)
    if kind in ("int8", "topk", "powersgd"):
        compression.compress(x)  # which says why not
    small, context = compression.compress(x)
    if kind in ("fp16", "bf16") and x.dtype != tf.float16:
        own, wide = (small, lambda y: y) if kind == "fp16" else summable(small)
        return own, lambda y: _over(compression.decompress(wide(y), context), divisor)
    own, narrow = summable(small)
    return own, lambda y: compression.decompress(narrow(_over(y, divisor)), context)


def _over(x: tf.Tensor, divisor: int) -> tf.Tensor:
    """x / divisor; whole numbers towards zero."""
    if divisor == 1:
        return x
    by = tf.cast(divisor, x.dtype)
    return tf.truncatediv(x, by) if x.dtype.is_integer else x / by
