"""Whether the weights of the ranks have come apart: the verdict from fingerprints. Numpy only; gathers nothing.

A fingerprint of a variable is its sum under pseudo-random weights, beside its norm (`hvdtrain.keras.guard` and
`hvdtrain.engine.guards.fingerprint` take both). With such weights the difference of two fingerprints is, in the mean
square, the distance of the two variables (Johnson and Lindenstrauss), so one number per variable tells both that ranks
differ and by how much. How much matters where ranks run on unlike devices: the same update may round otherwise there,
and that is no fault. Like devices make the same bits; where those are known, they are compared (`Bits`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hvdtrain.core.errors import UserError

ROUNDINGS = 16.0
"""Roundings of one update that are forgiven: the differences of unlike devices walk, so they grow with sqrt(steps)."""


class Diverged(UserError):
    """The ranks train different models. ``variable`` is the first that differs, ``ranks`` those that stand apart."""

    def __init__(self, got: str, expected: str = "", do: str = "", variable: str = "", ranks: tuple[int, ...] = ()):
        self.variable, self.ranks = variable, ranks
        super().__init__(got, expected, do)

    def __reduce__(self) -> tuple:
        return type(self), (self.got, self.expected, self.do, self.variable, self.ranks)


@dataclass(frozen=True)
class Rows:
    """What the ranks have gathered, each (P, V): fingerprints at the last good check or the start, now, and norms."""

    before_PV: np.ndarray
    now_PV: np.ndarray
    norm_PV: np.ndarray

    @classmethod
    def unpack(cls, rows_PK: np.ndarray) -> Rows:
        """From rows of K = 3V numbers: ``before``, ``now`` and ``norm`` side by side."""
        return cls(*np.split(np.asarray(rows_PK, np.float64), 3, axis=1))


@dataclass(frozen=True)
class Bits:
    """Digests (P, V) of the variables' bytes; ranks of one of the ``kinds`` (P texts) have to have the same."""

    digest_PV: np.ndarray
    kinds: Sequence[str]

    def unequal(self, v: int) -> np.ndarray:
        """Return (P, P): pairs of ranks of one kind whose variable ``v`` has other bits."""
        digest_P, kinds_P = self.digest_PV[:, v], np.asarray(self.kinds)
        return (kinds_P[:, None] == kinds_P[None]) & (digest_P[:, None] != digest_P[None])


Cause = Callable[["Rows", int, bool, bool], str]
"""(rows, the first variable apart, whether it was apart before, whether some are apart only since) -> what to do."""


def tolerance(steps: int, eps: float) -> float:
    """Distance, relative to a variable's norm, that rounding may make in ``steps`` updates in a type with ``eps``."""
    return ROUNDINGS * eps * float(np.sqrt(max(1, steps)))


def apart(print_P: np.ndarray, norm_P: np.ndarray, within: float,
          unequal_PP: np.ndarray | None = None) -> tuple[int, ...]:
    """Ranks whose fingerprint is not that of the largest group (of the lowest rank, among equals); () if all agree.

    Two NaN agree, and so do two equal infinities; a NaN and a number do not. ``unequal_PP``: pairs that do not agree
    whatever their fingerprints.
    """
    scale = np.where(np.isfinite(norm_P), norm_P, 0.0).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        close_PP = np.abs(print_P[:, None] - print_P[None, :]) <= within * scale
    same_PP = close_PP | (print_P[:, None] == print_P[None, :]) | (np.isnan(print_P)[:, None] & np.isnan(print_P)[None])
    reference = int(np.argmax(same_PP.sum(axis=1)))
    out_P = ~same_PP[reference]
    if unequal_PP is not None and unequal_PP.any() and not out_P.any():
        others_P = unequal_PP.sum(axis=1)  # of the ranks that are apart the one that agrees with most of its kind
        out_P = unequal_PP[int(np.argmin(np.where(others_P > 0, others_P, others_P.size)))]
    return tuple(int(r) for r in np.flatnonzero(out_P))


def judge(rows: Rows, names: Sequence[str], step: int, eps: float = 2.0**-23, distributed: bool = True,
          ranks: Sequence[int] | None = None, bits: Bits | None = None, updates: int | None = None,
          cause: Cause | None = None) -> Diverged | None:
    """The error that stops the run, or None where the ranks agree.

    ``names``: V variables. ``step``: updates so far. ``eps``: of the variables' type. ``distributed``: whether the
    optimizer is known to exchange gradients. ``ranks``: global numbers of the P rows, 0 to P-1 unless given. ``bits``:
    what like devices have to have alike. ``updates``: since the ranks were equal, ``step`` unless given. ``cause``:
    tells what to do, in place of the words for `hvdtrain.keras`.
    """
    assert rows.now_PV.shape[1] == len(names), (rows.now_PV.shape, len(names))
    within = tolerance(step if updates is None else updates, eps)
    found = {v: out for v in range(len(names))
             if (out := apart(rows.now_PV[:, v], rows.norm_PV[:, v], within, bits.unequal(v) if bits else None))}
    if not found:
        return None
    first, out = next(iter(found.items()))
    numbers = list(ranks) if ranks is not None else list(range(len(rows.now_PV)))
    who = tuple(numbers[r] for r in out)
    others = f", the first of {len(found)} of {len(names)} variables that do" if len(found) > 1 else ""
    got = (f"after update {step} the ranks no longer hold the same weights: {names[first]!r} differs on "
           f"{_named(who, numbers)}{_by(rows, first, out)}{others}")
    before = {v for v in found if apart(rows.before_PV[:, v], rows.norm_PV[:, v], within)}
    spoken = cause or partial(_cause, distributed)
    do = _not_finite(rows, first) or spoken(rows, first, first in before, len(before) < len(found))
    return Diverged(got, "equal weights on every rank, apart from rounding", do, names[first], who)


def _named(who: tuple[int, ...], ranks: Sequence[int]) -> str:
    size = len(ranks)
    if len(who) == size - 1 and size > 2:
        return f"every rank (against each other, {size} ranks)"
    of = str(size) if list(ranks) == list(range(size)) else f"ranks {', '.join(map(str, ranks))}"
    return ("rank " if len(who) == 1 else "ranks ") + ", ".join(map(str, who)) + f" of {of}"


def _by(rows: Rows, v: int, out: tuple[int, ...]) -> str:
    """By how much of its norm the variable differs, where that is a number."""
    inside = next(r for r in range(len(rows.now_PV)) if r not in out)
    far = np.abs(rows.now_PV[list(out), v] - rows.now_PV[inside, v]).max()
    norm = rows.norm_PV[inside, v]
    return f" by {far / norm:.1g} of its norm" if np.isfinite(far) and np.isfinite(norm) and norm * far > 0 else ""


def _not_finite(rows: Rows, v: int) -> str:
    """What to think where some ranks hold numbers and others do not, or ""."""
    finite_P = np.isfinite(rows.now_PV[:, v])
    if not finite_P.any() or finite_P.all():
        return ""
    return (f"rank {int(np.argmin(finite_P))} holds a value that is not finite and others do not: something other "
            "than the exchanged gradients wrote it")


def _cause(distributed: bool, rows: Rows, v: int, began: bool, some_since: bool) -> str:
    if not distributed and some_since:
        return ("likely the optimizer of model.compile is not hvd.DistributedOptimizer(...), or the gradients of a "
                "train_step of your own do not pass through hvd.DistributedGradientTape")
    if began:
        return ("the weights differed before the first update: add hvd.callbacks.BroadcastGlobalVariablesCallback(0) "
                "to the callbacks of fit (or hvd.broadcast_variables(model.variables, root_rank=0) to a loop of your "
                "own), and load weights before it or on every rank")
    return ("the weights were equal before, so something else than this optimizer's exchanged gradients changes them: "
            "a callback or train_step that assigns weights on some ranks, an optimizer that is not distributed, unlike "
            "learning rates or optimizer states, or layers meant to be local, which belong into "
            "hvd.PartialDistributedOptimizer(local_layers=...)")
