"""Decide which ways of computing are kept, from the ranks' times; pure.

Ranks that compute alike (one kind of device) choose alike: by the slowest of them, which the others wait for, and so
that what one computes another can compute again to the bit (`hvdtrain.engine.recompute`). Unlike ranks choose
each for their kind: nothing of the choice is seen in what they exchange but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MARGIN = 0.05
"""Part of the time of a micro-batch that an option has to save to be kept."""


@dataclass(frozen=True)
class Tried:
    """What one rank found of an option.

    ``kind``: text of what computes. ``base_s``, ``tried_s``: seconds of a micro-batch without and with the option, in
    turns, as many of each; () on a rank that has no samples. ``why``: why it cannot be, in words; "" where it can.
    ``left``: what of the model stays as it was, in words.
    """

    kind: str
    base_s: tuple[float, ...] = ()
    tried_s: tuple[float, ...] = ()
    why: str = ""
    left: str = ""


@dataclass(frozen=True)
class OptionVerdict:
    """Whether an option is kept by the ranks of a kind. ``ratio``: its time over the time without; NaN: not timed."""

    kept: bool
    ratio: float
    base_s: float
    tried_s: float
    why: str


def verdict(rows: Sequence[Tried]) -> OptionVerdict:
    """Judge an option from what all ranks of one kind found.

    Of each turn the slowest rank counts. An option that one of the ranks cannot use none of them uses.
    """
    why = next((row.why for row in rows if row.why), "")
    timed = [row for row in rows if row.base_s]
    if not why and len({row.left for row in timed}) > 1:
        why = f"its ranks would compute unlike parts in it; {next(row.left for row in timed if row.left)}"
    if why or not timed:
        return OptionVerdict(False, math.nan, math.nan, math.nan, why or "no rank of the kind has samples")
    base_s = [max(turn) for turn in zip(*(row.base_s for row in timed))]
    tried_s = [max(turn) for turn in zip(*(row.tried_s for row in timed))]
    ratio = median(t / b for b, t in zip(base_s, tried_s))
    return OptionVerdict(ratio <= 1.0 - MARGIN, ratio, median(base_s), median(tried_s), "")


def verdicts(rows: Sequence[Tried]) -> dict[str, OptionVerdict]:
    """Judge an option for each kind, from what every rank found; in the order of the ranks."""
    return {kind: verdict([row for row in rows if row.kind == kind]) for kind in dict.fromkeys(r.kind for r in rows)}


def words(option: str, rows: Sequence[Tried], found: dict[str, OptionVerdict]) -> list[str]:
    """Tell what was decided of ``option`` and why, a sentence for each kind; the kind is named where there are more."""
    told = []
    for kind, one in found.items():
        ranks = [r for r, row in enumerate(rows) if row.kind == kind]
        who = f" on {_ranks(ranks)}" if len(found) > 1 else ""
        if one.why:
            told.append(f"{option} is left{who}: {one.why}")
            continue
        times = f"{1e3 * one.base_s:.3g} ms without and {1e3 * one.tried_s:.3g} ms with it, {one.ratio:.2f}"
        if not one.kept:
            told.append(f"{option} is left{who}: a micro-batch takes {times}; to be kept it has to save "
                        f"{MARGIN:.0%}")
            continue
        left = next((row.left for row in rows if row.kind == kind and row.left), "")
        left = f"; left as they are: {left}" if left else ""
        told.append(f"{option} is used{who}: a micro-batch takes {times}{left}")
    return told


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def shortened(error: BaseException) -> str:
    """Return what an error says in a line: compilers print pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "rror" in line), lines[0] if lines else "")
    name = type(error).__name__
    said = said if len(said) <= 160 else said[:157] + "..."
    return said if said.startswith(name) else f"{name}: {said}" if said else name
