"""Tensors of users on their way into collectives: types in transit, names of nodes, roots, and calls that are refused.

Owns the errors of these checks, which are Horovod's too. Moves nothing.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.core.errors import UserError, through_trace

Back = Callable[[tf.Tensor], tf.Tensor]

MOVED = {"bfloat16": tf.int16, "uint16": tf.int16, "uint32": tf.int32, "uint64": tf.int64, "complex64": tf.int64}
"""Types that Horovod does not move -> types of as many bits that every transport moves."""
KNOWN = frozenset({"float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"})
SAME_ROOT = "pass the same root_rank on every rank: all of them get that rank's value"

unconverted = tf.autograph.experimental.do_not_convert
"""Decorates what a user's tf.function calls: AutoGraph would rewrite this package's code, generators included."""

_scratch: dict[str, tf.Variable] = {}
_uses: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


class _OfTensorFlow(UserError):
    """A `UserError` that is one of `tf.errors` too, for scripts that catch those; without their operation."""

    def __init__(self, got: str, expected: str = "", do: str = "") -> None:
        self.got, self.expected, self.do = got, expected, do
        super(UserError, self).__init__(None, None, UserError.__str__(self))  # type: ignore[call-arg]


class InvalidArgument(_OfTensorFlow, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """An argument that is wrong on this rank: its process set, its root, its splits, its type."""


class Mismatch(_OfTensorFlow, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """Arguments that differ between ranks; raised on all of them."""


def refuse_xla(what: str) -> None:
    """Raise `UserError` in a function that XLA will compile: it knows no collectives of this kind."""
    graph: Any = tf.compat.v1.get_default_graph() if tf.inside_function() else None
    while graph is not None:
        context = getattr(graph, "_get_control_flow_context", lambda: None)()
        if context is not None and context.IsXLAContext():
            raise through_trace(InvalidArgument(
                f"{what} in a function that XLA compiles",
                "jit_compile=False: XLA knows no collectives between processes",
                "set jit_compile=False in model.compile or tf.function"))
        graph = getattr(graph, "outer_graph", None)


def node_name(base: str) -> str:
    """Return ``base`` as a valid name of a node, numbered within the graph that is being traced.

    Ranks trace the same program, though not always at the same time, so a graph numbers its own nodes. Outside of
    graphs there is no number: calls come one after another.
    """
    clean = re.sub("[^A-Za-z0-9_.]", "_", base)
    if not tf.inside_function():
        return clean
    uses = _uses.setdefault(tf.compat.v1.get_default_graph(), Counter())
    uses[clean] += 1
    return clean if uses[clean] == 1 else f"{clean}.{uses[clean] - 1}"


def label_of(variable: Any) -> str:
    """Return a variable's name for messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "a tensor")


def unfolded(x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` as something TensorFlow takes for no constant, without a copy.

    Horovod's operations are not marked stateful: fed a constant they would run while the graph is optimised, once, on
    this rank only. The beginning of this slice is a variable's, so it cannot be folded; a slice of all shares memory.
    """
    if not tf.inside_function():
        return x
    row = tf.reshape(x, [1]) if x.shape.rank == 0 else x
    begin = tf.fill([row.shape.rank], scratch("zero", tf.int32).read_value())
    out = tf.slice(row, begin, [-1] * row.shape.rank)
    out = tf.reshape(out, []) if x.shape.rank == 0 else out
    out.set_shape(x.shape)
    return out


def scratch(name: str, dtype: tf.DType) -> tf.Variable:
    """Return a scalar variable of this process, 0 at first, in host memory."""
    if name not in _scratch:
        with tf.init_scope(), tf.device("/CPU:0"):
            _scratch[name] = tf.Variable(0, dtype=dtype, trainable=False, name=name)
    return _scratch[name]


def summable(x: tf.Tensor) -> tuple[tf.Tensor, Back]:
    """Return ``x`` in the type of its sum, and the way back: 16-bit floats in float32, which cannot overflow."""
    dtype = x.dtype
    if dtype in (tf.float16, tf.bfloat16):
        return tf.cast(x, tf.float32), lambda y: tf.cast(y, dtype)
    if dtype in (tf.int16, tf.bool) or dtype.name not in KNOWN:
        raise through_trace(InvalidArgument(f"a sum of {dtype.name} over ranks",
                                            "floating point, int8, uint8, int32 or int64", "cast the tensor first"))
    return x, lambda y: y


def movable(x: tf.Tensor) -> tuple[tf.Tensor, Back]:
    """Return ``x`` with its bits read as a type that every transport moves, of the same shape, and the way back."""
    dtype = x.dtype
    if dtype.name in KNOWN:
        return x, lambda y: y
    if dtype.name not in MOVED:
        raise through_trace(InvalidArgument(f"a collective of {dtype.name}", "numbers or booleans",
                                            "use hvd.broadcast_object or hvd.allgather_object for anything else"))
    return tf.bitcast(x, MOVED[dtype.name]), lambda y: tf.bitcast(y, dtype)


def differentiable(x: tf.Tensor) -> tuple[tf.Tensor, Back]:
    """Return ``x`` in a type that every transport moves and that gradients flow through, and the way back.

    Whole numbers as in `movable`, bfloat16 as float32, complex numbers as two parts in one dimension more.
    """
    dtype = x.dtype
    if dtype == tf.bfloat16:
        return tf.cast(x, tf.float32), lambda y: tf.cast(y, dtype)
    if dtype.is_complex:
        return tf.stack([tf.math.real(x), tf.math.imag(x)], -1), lambda y: tf.complex(y[..., 0], y[..., 1])
    return movable(x)


def check_root(root_rank: int, ranks: Sequence[int] | None) -> None:
    """Raise `UserError` for a root that is not among ``ranks``; nothing before `init`, when there are none."""
    if ranks and root_rank not in ranks:
        raise through_trace(InvalidArgument(f"root_rank {root_rank} among ranks {ranks}", "one of them",
                                            "pass such a rank"))


def check_roots(roots_P: Sequence[int], ranks: Sequence[int] | None) -> None:
    """Raise `UserError` where the members' roots differ, or are not among ``ranks``. Pure."""
    if len(set(roots_P)) > 1:
        raise through_trace(_differing(roots_P, ranks or []))
    check_root(roots_P[0], ranks)


def member_root(root_rank: int, ranks: Sequence[int] | None) -> int:
    """Return ``root_rank``, or a member where it is none: a rank with a wrong one must enter, for the others wait."""
    members = ranks or []
    return root_rank if root_rank in members else members[-1]


@contextmanager
def same_root(wire: Any, root_rank: int, ranks: Sequence[int] | None) -> Iterator[int]:
    """Yield the root for one broadcast outside of graphs; `UserError` on every rank where roots differ. Collective.

    A transport that compares roots itself (`compares_roots`) fails on every rank, and only then are roots gathered for
    the message; over other transports they are gathered first.
    """
    if not wire.compares_roots:
        check_roots(_gathered(wire, root_rank, "broadcast.roots").numpy().tolist(), ranks)
        yield root_rank
        return
    try:
        yield member_root(root_rank, ranks)
    except tf.errors.FailedPreconditionError as error:
        if "root rank" not in str(error.message):
            raise
        roots_P = _gathered(wire, root_rank, "broadcast.roots").numpy().tolist()
        raise _differing(roots_P, ranks or []) from None
    check_root(root_rank, ranks)


def assert_same_root(wire: Any, root_rank: int, ranks: Sequence[int] | None, name: str) -> tf.Operation:
    """Return a node that fails, on every rank, where roots differ or are no member. Collective.

    In a graph nobody catches what the transport raises, so roots are gathered first.
    """
    roots_P = _gathered(wire, root_rank, f"{name}.roots")
    advice = SAME_ROOT[0].upper() + SAME_ROOT[1:]
    same = tf.reduce_all(roots_P == roots_P[0]) & tf.reduce_any(roots_P[0] == tf.constant(ranks, tf.int32))
    text = f"broadcast with a root_rank that is not the same on all ranks, or none of them: ranks {ranks} have"
    return tf.debugging.Assert(same, [text, roots_P, f"; expected one of them. {advice}."], 2**31 - 1)


def _gathered(wire: Any, root_rank: int, name: str) -> tf.Tensor:
    """Return every member's root, int32 (P,)."""
    return wire.gather_rows(unfolded(tf.constant([root_rank], tf.int32)), name).wait()


def _differing(roots_P: Sequence[int], ranks: Sequence[int]) -> UserError:
    owners = {root: [r for r, other in zip(ranks, roots_P) if other == root] for root in dict.fromkeys(roots_P)}
    text = ", ".join(f"{root} on rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}" for root, own in owners.items())
    return Mismatch(f"a broadcast with root_rank {text}", "one root_rank on all ranks", SAME_ROOT)
