"""Decision which compile options are kept, from the ranks' times. Pure.

Ranks with one kind of device decide alike, by the slowest of them, so that one can repeat another's step to the bit
(`hvdtrain.engine.recompute`).
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
    """Times of one rank with an option.

    ``kind``: text of what computes. ``base_s``, ``tried_s``: seconds of a micro-batch without and with the option,
    interleaved; () on a rank without samples. ``why``: why it cannot be used, or "". ``left``: what of the model is
    excluded.
    """

    kind: str
    base_s: tuple[float, ...] = ()
    tried_s: tuple[float, ...] = ()
    why: str = ""
    left: str = ""


@dataclass(frozen=True)
class OptionVerdict:
    """Decision of the ranks of a kind. ``ratio``: time with the option over the time without; NaN: not timed."""

    kept: bool
    ratio: float
    base_s: float
    tried_s: float
    why: str


def verdict(rows: Sequence[Tried]) -> OptionVerdict:
    """Decide about an option for the ranks of one kind: the slowest rank of each repeat counts, and all must be able to
    use it.
    """
    why = next((row.why for row in rows if row.why), "")
    timed = [row for row in rows if row.base_s]
    if not why and len({row.left for row in timed}) > 1:
        why = f"its ranks would compile different parts; {next(row.left for row in timed if row.left)}"
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
    """Return the decisions about ``option`` and their reasons, a sentence for each kind."""
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
        left = f"; not compiled: {left}" if left else ""
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
