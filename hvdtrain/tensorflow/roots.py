"""Roots of broadcasts, compared over the ranks: another root on another rank is an error on all of them, at once.

Owns the comparison and its text. A wire that compares roots itself (`compares_roots`) fails on every rank alike, and
only then do the ranks tell each other what each was given; over other wires, and in graphs, where nobody catches what
a wire raises, they tell each other first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.core.errors import UserError
from hvdtrain.tensorflow.basics import is_initialized
from hvdtrain.tensorflow.errors import InvalidArgument, Mismatch
from hvdtrain.tensorflow.nodes import through_trace, unfolded
from hvdtrain.tensorflow.process_sets import ProcessSet

DO = "pass the same root_rank on every rank: all of them get that rank's value"


def check(root_rank: int, process_set: ProcessSet) -> None:
    """Raise `UserError` for a root that is not among the ranks of the set, which are counted over the whole job."""
    known = process_set.ranks or []
    if is_initialized() and root_rank not in known:
        raise through_trace(InvalidArgument(f"root_rank {root_rank} among ranks {known}", "one of them",
                                            "pass such a rank"))


def check_alike(roots_P: Sequence[int], process_set: ProcessSet) -> None:
    """Raise `UserError` where the members' roots differ, or are none of them. Pure."""
    if len(set(roots_P)) > 1:
        raise through_trace(_differing(roots_P, process_set))
    check(roots_P[0], process_set)


def stand_in(root_rank: int, process_set: ProcessSet) -> int:
    """``root_rank``, or a member where it is none: a rank that was given a wrong one still has to come, for the others
    wait for it."""
    ranks = process_set.ranks or []
    return root_rank if root_rank in ranks else ranks[-1]


@contextmanager
def compared(wire: Any, root_rank: int, process_set: ProcessSet) -> Iterator[int]:
    """The root for one broadcast outside of graphs; `UserError` on every rank where roots differ. Collective."""
    if not wire.compares_roots:
        check_alike(_gathered(wire, root_rank, "broadcast.roots").numpy().tolist(), process_set)
        yield root_rank
        return
    try:
        yield stand_in(root_rank, process_set)
    except tf.errors.FailedPreconditionError as error:
        if "root rank" not in str(error.message):
            raise
        roots_P = _gathered(wire, root_rank, "broadcast.roots").numpy().tolist()
        raise _differing(roots_P, process_set) from None
    check(root_rank, process_set)


def assertion(wire: Any, root_rank: int, process_set: ProcessSet, name: str) -> tf.Operation:
    """A node that fails, on every rank, where roots differ or are no member. Collective."""
    roots_P = _gathered(wire, root_rank, f"{name}.roots")
    ranks = process_set.ranks or []
    alike = tf.reduce_all(roots_P == roots_P[0]) & tf.reduce_any(roots_P[0] == tf.constant(ranks, tf.int32))
    said = f"broadcast with a root_rank that is not the same on all ranks, or none of them: ranks {ranks} have"
    return tf.debugging.Assert(alike, [said, roots_P, f"; expected one of them. {DO[0].upper()}{DO[1:]}."], 2**31 - 1)


def _gathered(wire: Any, root_rank: int, name: str) -> tf.Tensor:
    """Every member's root, int32 (P,)."""
    return wire.gather_rows(unfolded(tf.constant([root_rank], tf.int32)), name).wait()


def _differing(roots_P: Sequence[int], process_set: ProcessSet) -> UserError:
    ranks = process_set.ranks or []
    having = {root: [r for r, other in zip(ranks, roots_P) if other == root] for root in dict.fromkeys(roots_P)}
    said = ", ".join(f"{root} on rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}" for root, own in having.items())
    return Mismatch(f"a broadcast with root_rank {said}", "one root_rank on all ranks", DO)
