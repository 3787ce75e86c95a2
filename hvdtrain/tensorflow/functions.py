"""Variables and Python objects from one rank to all, and from all to all: ``horovod.tensorflow.functions``.

Owns how they are packed. Other names that Horovod's module imports are `hvdtrain.tensorflow`'s.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvdtrain.tensorflow
from hvdtrain import job
from hvdtrain.core.process_sets import ProcessSet, global_process_set
from hvdtrain.tensorflow import ops
from hvdtrain.tensorflow.nodes import (
    Mismatch,
    check_root,
    check_roots,
    label_of,
    movable,
    node_name,
    through_trace,
    unconverted,
)

__all__ = "allgather_object broadcast_object broadcast_object_fn broadcast_variables".split()

PIECE_BYTES = 1 << 26
"""Variables travel together up to about so much, so that a large model needs little more memory."""


def __getattr__(name: str) -> Any:
    """Return a name of `hvdtrain.tensorflow`, as Horovod's module has those that it uses."""
    if name not in hvdtrain.tensorflow.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(hvdtrain.tensorflow, name)


def __dir__() -> list[str]:
    return __all__


@unconverted
def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> None:
    """Give variables of Keras or TensorFlow the values of rank ``root_rank``; collective.

    The same variables in the same order on every rank, which is compared first. ``inplace`` needs nothing: memory is
    bounded either way. Errors: `UserError` on every rank where they or ``root_rank`` differ.
    """
    variables = list(tf.nest.flatten(variables))
    wire = ops.member_wire(process_set)
    if wire is None:
        check_root(root_rank, process_set.ranks)
        return
    with tf.init_scope():
        _check_variables(variables, root_rank, process_set)
    for piece in _pieces(variables):
        moved, backs = zip(*(movable(tf.convert_to_tensor(_raw(v))) for v in piece))
        flat_N = tf.concat([tf.reshape(x, [-1]) for x in moved], 0)
        whole_N = ops.sent(wire.broadcast, flat_N, node_name("broadcast.variables"), root_rank)
        parts = tf.split(whole_N, [int(np.prod(x.shape, dtype=np.int64)) for x in moved])
        for variable, x, back, part in zip(piece, moved, backs, parts):
            _raw(variable).assign(back(tf.reshape(part, x.shape)))


def broadcast_object(obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return rank ``root_rank``'s object, on every rank; collective. ``session`` has no meaning in TensorFlow 2."""
    if ops.member_wire(process_set) is None:
        check_root(root_rank, process_set.ranks)
        return obj
    is_root = job.rank() == root_rank
    data = np.frombuffer(pickle.dumps(obj, protocol=5) if is_root else b"", np.uint8)
    label = f"{name or 'object'}"
    size = int(ops.broadcast(tf.constant([data.size], tf.int64), root_rank, f"{label}.size", False, process_set)[0])
    whole = ops.broadcast(tf.constant(data if is_root else np.zeros(size, np.uint8)), root_rank, f"{label}.data", False,
                          process_set)
    return obj if is_root else pickle.loads(whole.numpy().tobytes())


def allgather_object(obj: Any, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, by rank; collective. ``session`` has no meaning in TensorFlow 2."""
    if ops.member_wire(process_set) is None:
        return [obj]
    data, label = np.frombuffer(pickle.dumps(obj, protocol=5), np.uint8), f"{name or 'object'}"
    sizes_P = ops.allgather(tf.constant([data.size], tf.int64), f"{label}.sizes", False, process_set).numpy()
    whole = ops.allgather(tf.constant(data), f"{label}.all", False, process_set).numpy()
    return [pickle.loads(part.tobytes()) for part in np.split(whole, np.cumsum(sizes_P)[:-1])]


def gathered(obj: Any, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every member's small object, by rank, over the control plane, or in a smaller set over its transport."""
    if process_set.process_set_id == 0:
        return job.world().control.gather(obj)
    return allgather_object(obj, name="gathered", process_set=process_set)


def broadcast_(variables: Sequence[Any], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[Any]:
    """Give ``variables`` the values of rank ``root_rank``, and return those; as `broadcast_variables`. Collective."""
    broadcast_variables(variables, root_rank, process_set)
    return [tf.convert_to_tensor(v) for v in variables]


def _raw(variable: Any) -> Any:
    """Return Keras' variable as TensorFlow's, which no autocast changes when it is read."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def _pieces(variables: Sequence[Any]) -> list[list[Any]]:
    """Return lists of variables that travel together: of one type, in order."""
    pieces: list[list[Any]] = []
    left: dict[Any, tuple[list[Any], int]] = {}
    for variable in variables:
        raw = _raw(variable)
        nbytes = raw.dtype.size * int(np.prod(raw.shape, dtype=np.int64))
        piece, used = left.get(raw.dtype, ([], PIECE_BYTES))
        if used + nbytes > PIECE_BYTES:
            piece, used = [], 0
            pieces.append(piece)
        piece.append(variable)
        left[raw.dtype] = piece, used + nbytes
    return pieces


def _check_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> None:
    """Raise `UserError` that names the roots, or the first variable, that differ between ranks; collective."""
    own = [(label_of(v), tuple(_raw(v).shape), _raw(v).dtype.name) for v in variables]
    roots_P, rows_P = zip(*gathered((root_rank, own), process_set))
    check_roots(roots_P, process_set.ranks)
    ranks = process_set.ranks or []
    for rank, theirs in zip(ranks[1:], rows_P[1:]):
        here, there = ([row[1:] for row in rows] for rows in (rows_P[0], theirs))
        if here == there:
            continue
        n = next((n for n, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
        texts = [f"{rows[n][0]} ({rows[n][2]} {list(rows[n][1])})" if n < len(rows) else "nothing"
                 for rows in (rows_P[0], theirs)]
        raise through_trace(Mismatch(f"variables to broadcast differ: at place {n} rank {rank} has {texts[1]}, rank "
                                     f"{ranks[0]} has {texts[0]}", "the same variables in the same order on every rank",
                                     "build the model and its optimizer on every rank before the broadcast"))
