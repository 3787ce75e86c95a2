"""Collectives on one tensor or several, by Horovod's names: `allreduce`, `allgather`, `broadcast`, ...

Owns the meaning of a call: factors, means, types, and the result of a rank alone. Transports are `basics.wire`'s.
Gradients flow through all of them over Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain import job
from hvdtrain.backends.tensorflow.collectives import peer_failures
from hvdtrain.comm.compression import kind_of
from hvdtrain.core.errors import NotSupported, WrongMode, through_trace
from hvdtrain.core.process_sets import KINDS, Adasum, Average, ProcessSet, Sum, global_process_set, reduction
from hvdtrain.tensorflow import basics
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.nodes import (
    Back,
    InvalidArgument,
    assert_same_root,
    check_root,
    differentiable,
    member_root,
    node_name,
    refuse_xla,
    same_root,
    summable,
    unconverted,
    unfolded,
)


@unconverted
def allreduce(tensor: Any, average: bool | None = None, device_dense: str = '', device_sparse: str = '',
              compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
              ignore_name_scope: bool = False) -> Any:
    """Combine a tensor over the ranks: the mean by default (the sum, then divided), or by ``op``.

    The same shape on every rank; of `tf.IndexedSlices` rows are gathered instead. ``average`` is the old form of
    ``op``. Factors multiply on this rank, before and after; they may differ between ranks. They keep their own digits:
    float16 and bfloat16 are multiplied, summed and divided in float32 and rounded once, at the end (Horovod rounds
    after each of the three); whole numbers are multiplied in float64 and truncated after each factor, an average's
    division and ``postscale_factor`` being one. ``ignore_name_scope`` has no effect: scopes are never part of a name.
    Collective. Errors: `UserError` on a rank outside of ``process_set``.
    """
    op = reduction(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse(tensor, op, prescale_factor * postscale_factor, name, process_set)
    x = tf.convert_to_tensor(tensor)
    wire = member_wire(process_set)
    if wire is None:
        own, back = _packed(x, Compression.none, prescale_factor, postscale_factor)
        return tf.identity(back(own))
    if KINDS[op] != "sum" and KINDS[op] not in wire.reductions or op == Adasum and wire.size & (wire.size - 1):
        raise through_trace(NotSupported(f"a reduction by {KINDS[op]} over {wire.size} ranks by {wire.name}",
                                         "Adasum over 1, 2, 4, 8, ... ranks, all of the job, with a Horovod that was "
                                         "built with MPI", "use op=hvd.Average"))
    with tf.device(device_dense) if device_dense else nullcontext():
        own, back, kind = _reduced(wire, x, compression, op, prescale_factor, postscale_factor)
        return back(sent(wire.allreduce, own, _name(f"allreduce.{KINDS[op]}", name, x), kind))


def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = '',
                      device_sparse: str = '', compression: Any = Compression.none, op: int | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                      name: str | None = None) -> list[Any]:
    """Run `allreduce` of several tensors, which travel together. Collective."""
    op = reduction(op, average)
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    if op == Adasum or any(isinstance(t, tf.IndexedSlices) for t in tensors) or compression not in (
            Compression.none, Compression.fp16, Compression.bf16):
        return [allreduce(t, None, device_dense, device_sparse, compression, op, name=f"{name or 'group'}.{i}",
                          process_set=process_set, **scale) for i, t in enumerate(tensors)]
    each = _each(process_set, "allreduce_each", tensors)
    if each is not None:
        with tf.device(device_dense) if device_dense else nullcontext():
            return _sums(each, tensors, compression, op, prescale_factor, postscale_factor, name or "group")
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
    """Return every rank's rows, one rank behind the other: (R_r, ...) -> (sum R_r, ...).

    All dimensions but the first are the same on every rank. Collective.
    """
    x = _rows(tensor)
    wire = member_wire(process_set)
    if wire is None:
        return tf.identity(x)
    moved, back = differentiable(x)
    return back(tf.ensure_shape(sent(wire.gather_rows, moved, _name("allgather", name, x)), [None, *moved.shape[1:]]))


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """Run `allgather` of several tensors, all at the same time. Collective."""
    label, each = name or "group", _each(process_set, "gather_rows_each", tensors)
    if each is None:
        return [allgather(t, f"{label}.{i}", ignore_name_scope, process_set) for i, t in enumerate(tensors)]
    moved, backs = zip(*(differentiable(_rows(t)) for t in tensors))
    parts = each(moved, node_name(f"allgather.{label}")).wait()
    return [back(_any_gradient(part)) for back, part in zip(backs, parts)]


@unconverted
def broadcast(tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return rank ``root_rank``'s tensor, on every rank; the same shape everywhere. Collective.

    Errors: `UserError` on every rank if ``root_rank`` is not the same on all of them, with each rank's; inside of a
    tf.function `tf.errors.InvalidArgumentError` with the same text.
    """
    x = tf.convert_to_tensor(tensor)
    wire = member_wire(process_set)
    if wire is None:
        check_root(root_rank, process_set.ranks)
        return tf.identity(x)
    moved, back = differentiable(x)
    label = _name("broadcast", name, x)
    if not tf.inside_function():
        with same_root(wire, root_rank, process_set.ranks) as root:
            return back(sent(wire.broadcast, moved, label, root))
    refuse_xla("broadcast")
    with tf.control_dependencies([assert_same_root(wire, root_rank, process_set.ranks, label)]):
        moved = tf.identity(moved)
    return back(sent(wire.broadcast, moved, label, member_root(root_rank, process_set.ranks)))


@unconverted
def alltoall(tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows to every rank: ``splits[p]`` of them to the p-th, the same number to each if ``splits`` is None.

    Return the received rows, by source; with ``splits`` also int32 (P,): how many came from each rank. Collective.
    """
    x, wire = tf.convert_to_tensor(tensor), member_wire(process_set)
    given = None if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    if wire is None:
        return tf.identity(x) if given is None else (tf.identity(x), given)
    if given is None and x.shape[0] is not None and x.shape[0] % wire.size:
        raise through_trace(InvalidArgument(f"alltoall of {x.shape[0]} rows over {wire.size} ranks", "a multiple of it",
                                            "pass splits, rows for each rank"))
    rows = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
    even = tf.fill([wire.size], rows // wire.size)
    moved, back = differentiable(x)
    refuse_xla("alltoall")
    out, received_P = wire.alltoall_rows(unfolded(moved), even if given is None else given,
                                         _name("alltoall", name, x)).wait()
    out = back(_any_gradient(tf.ensure_shape(out, [None, *moved.shape[1:]])))
    return out if given is None else (out, received_P)


@unconverted
def reducescatter(tensor: Any, device_dense: str = '', compression: Any = Compression.none, op: int = Average,
                  name: str | None = None, process_set: ProcessSet = global_process_set,
                  ignore_name_scope: bool = False, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Any:
    """Return this rank's rows of the mean (or sum) over the ranks: (R, ...) -> (R_r, ...).

    If P does not divide R the first ranks get a row more. Factors as in `allreduce`. Collective.
    """
    if op not in (Average, Sum):
        raise through_trace(InvalidArgument(f"reducescatter by {KINDS.get(op, op)}", "hvd.Average or hvd.Sum",
                                            "pass one of them"))
    x, wire = _rows(tensor), member_wire(process_set)
    if wire is None:
        own, back = _packed(x, Compression.none, prescale_factor, postscale_factor)
        return tf.identity(back(own))
    with tf.device(device_dense) if device_dense else nullcontext():
        own, back = _packed(x, compression, prescale_factor, postscale_factor, wire.size if op == Average else 1)
        rows = sent(wire.scatter_rows, own, _name("reducescatter", name, x))
        return back(tf.ensure_shape(rows, [None, *x.shape[1:]]))


def grouped_reducescatter(tensors: Sequence[Any], device_dense: str = '', compression: Any = Compression.none,
                          op: int = Average, process_set: ProcessSet = global_process_set,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> list[Any]:
    """Run `reducescatter` of several tensors, all at the same time. Collective."""
    each = _each(process_set, "scatter_rows_each", tensors) if op in (Average, Sum) else None
    if each is None:
        return [reducescatter(t, device_dense, compression, op, f"group.{i}", process_set, False, prescale_factor,
                              postscale_factor) for i, t in enumerate(tensors)]
    divisor = (process_set.size() or 1) if op == Average else 1
    with tf.device(device_dense) if device_dense else nullcontext():
        owns, backs = zip(*(_packed(_rows(t), compression, prescale_factor, postscale_factor, divisor)
                            for t in tensors))
        parts = each(owns, node_name("reducescatter.group")).wait()
        return [back(_any_gradient(part)) for back, part in zip(backs, parts)]


def join() -> Any:
    """Wait until every rank has called it, and return the number of one that came last, an int32 scalar; collective.

    Over Horovod ranks that have not come yet continue with their `allreduce`s, in which those that wait count as zeros.
    Batches of unequal number are better given a weight: a mean over ranks counts a rank that waits.
    """
    wire = basics.wire()
    if wire is None:
        return tf.constant(0)
    if job.world().hvd is None:
        raise WrongMode("join over plain MPI, where every rank enters every collective", "Horovod",
                        "run `python -m hvdtrain build`, or give every rank the same number of batches")
    with peer_failures():
        return job.world().hvd.join()


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return `size`, of a process set, as an int32 tensor."""
    return tf.constant(job.world().sets[process_set_id].size(), tf.int32, name=name or "size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in the process set, else 0, as an int32 tensor."""
    return tf.constant(int(bool(job.world().sets[process_set_id].included())), tf.int32, name=name or "included")


def local_size_op(name: str | None = None) -> Any:
    """Return `local_size` as an int32 tensor."""
    return tf.constant(job.local_size(), tf.int32, name=name or "local_size")


def rank_op(name: str | None = None) -> Any:
    """Return `rank` as an int32 tensor."""
    return tf.constant(job.rank(), tf.int32, name=name or "rank")


def local_rank_op(name: str | None = None) -> Any:
    """Return `local_rank` as an int32 tensor."""
    return tf.constant(job.local_rank(), tf.int32, name=name or "local_rank")


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return `reduction`, by Horovod's name."""
    return reduction(op, average)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether ``num_rank`` is 1, 2, 4, 8, ..., as Adasum needs it."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def member_wire(process_set: ProcessSet) -> Any:
    """Return `basics.wire`; `UserError` if the set leaves this rank out."""
    wire = basics.wire(process_set)
    if not process_set.included():
        raise through_trace(InvalidArgument(
            f"a collective among ranks {process_set.ranks} on rank {job.rank()}, which is not one of them",
            "a process set that this rank is in", "call it under `if process_set.included():`"))
    return wire


def _each(process_set: ProcessSet, collective: str, tensors: Sequence[Any]) -> Any:
    """Return the transport's ``collective`` of several tensors at once; None if it has none, and in a graph, whose
    operations run at the same time anyway.
    """
    wire = None if tf.inside_function() or not tensors else member_wire(process_set)
    return None if wire is None or not wire.has_each else getattr(wire, collective)


def _sums(each: Any, tensors: Sequence[Any], compression: Any, op: int, before: float, after: float,
          name: str) -> list[tf.Tensor]:
    owns, backs, kinds = zip(*(_reduced(each.__self__, tf.convert_to_tensor(t), compression, op, before, after)
                               for t in tensors))
    parts = each(owns, node_name(f"allreduce.{KINDS[op]}.{name}"), kinds).wait()
    return [back(_any_gradient(part)) for back, part in zip(backs, parts)]


def _reduced(wire: Any, x: tf.Tensor, compression: Any, op: int, before: float, after: float) -> tuple[
        tf.Tensor, Back, str]:
    """Return (the tensor that is reduced for ``x``, the way back to the result, the transport's reduction).

    A transport that can divide without other bits does, which saves a pass over memory. Factors do not decide that:
    they may differ between ranks.
    """
    if op == Average and compression is Compression.none and wire.halves:
        own, back = _packed(x, compression, before, after)
        if own.dtype.is_floating:
            return own, back, "mean"
    return *_packed(x, compression, before, after, wire.size if op == Average else 1), KINDS[op]


def _rows(tensor: Any) -> tf.Tensor:
    """Return a tensor with rows; `ValueError` for a scalar."""
    x = tf.convert_to_tensor(tensor)
    if x.shape.rank == 0:
        raise ValueError("a scalar to gather or scatter; expected at least one dimension, along which its rows lie")
    return x


def _sparse(slices: tf.IndexedSlices, op: int, factor: float, name: str | None, process_set: ProcessSet) -> Any:
    if op not in (Average, Sum):
        raise through_trace(NotSupported(f"a sparse tensor reduced by {KINDS[op]}", "hvd.Average or hvd.Sum",
                                         "pass one of them, or tf.convert_to_tensor(slices)"))
    wire = member_wire(process_set)
    values = allgather(slices.values, f"{name or 'sparse'}.values", process_set=process_set)
    indices = allgather(slices.indices, f"{name or 'sparse'}.indices", process_set=process_set)
    divisor = wire.size if op == Average and wire is not None else 1
    if values.dtype.is_integer and divisor > 1:  # a mean of whole numbers is none, as in Horovod
        values, divisor = values / tf.cast(divisor, values.dtype), 1
    own, back = _packed(values, Compression.none, 1.0, factor, divisor)
    return tf.IndexedSlices(back(own), indices, slices.dense_shape)


def sent(collective: Any, x: tf.Tensor, name: str, *more: Any) -> tf.Tensor:
    """Return the result of a transport's ``collective`` for ``x``, in a graph or outside."""
    refuse_xla(name.partition(".")[0])
    return _any_gradient(collective(unfolded(x), name, *more).wait())


def _any_gradient(y: tf.Tensor) -> tf.Tensor:
    """Return ``y`` with a cast to its own type, which costs nothing forward.

    On the way back it casts the gradient to that type, the only one that the function of a collective takes.
    """
    return tf.raw_ops.Cast(x=y, DstT=y.dtype) if y.dtype.is_floating else y


def _name(kind: str, name: str | None, x: tf.Tensor) -> str:
    """Return a node's name: the caller's, or in a graph that of the tensor."""
    if name is None and tf.inside_function():
        name = x.op.name
    return node_name(kind if name is None else f"{kind}.{name}")


def _packed(x: tf.Tensor, compression: Any, before: float, after: float, divisor: int = 1) -> tuple[tf.Tensor, Back]:
    """Return (the sum's input for ``before * x``, the way from the sum to ``after / divisor`` times it, of x's type).

    float16 is summed in float32 unless the caller asks for it as compression; factors have the digits of the sum, and
    if the caller compresses those of ``x``.
    """
    # A script's own class has no such attribute.
    narrow = compression.narrow if kind_of(compression, Compression) else None
    if narrow is not None and x.dtype not in (tf.float16, tf.bfloat16):
        small, context = compression.compress(_times(x, before))
        own, wide = (small, lambda y: y) if narrow == tf.float16 else summable(small)
        return own, lambda y: _part(compression.decompress(wide(y), context), after, divisor)
    small, context = compression.compress(x)
    own, narrow = summable(small)
    return _times(own, before), lambda y: compression.decompress(narrow(_part(y, after, divisor)), context)


def _times(x: tf.Tensor, factor: float) -> tf.Tensor:
    """Return x times factor; whole numbers in float64, towards zero."""
    if factor == 1.0:
        return x
    if x.dtype.is_integer:
        return tf.cast(tf.cast(x, tf.float64) * float(factor), x.dtype)
    return x * tf.constant(float(factor), x.dtype)


def _part(x: tf.Tensor, factor: float, divisor: int) -> tf.Tensor:
    """Return x times factor / divisor; whole numbers towards zero, once."""
    if divisor == 1 or factor != 1.0:
        return _times(x, factor / divisor)
    by = tf.cast(divisor, x.dtype)
    return tf.truncatediv(x, by) if x.dtype.is_integer else x / by
