"""Evaluation of `benchmarks step`: ratios within rounds, and contenders with other results.

Owns what a ratio is and whom a contender is compared with. Pure: measures and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.peers import Contender
from hvdtrain.core.terminal import spread

BASES = ("hvdtrain", "hvdtrain/whole")
"""What "x hvdtrain" is relative to, the first that takes part: as it comes, uncompressed; with Adam."""

HEADERS = ("contender", "wire", "ms a step", "quartiles", "x hvdtrain", "x best peer", "quartiles", "best peer")
TOLERANCE = 1e-3
"""Of --check: largest relative difference of a contender that sums gradients as they are from the median of those."""

Times = dict[str, list[float]]
"""Milliseconds a step of each contender, by round; the same rounds for all."""


def summarise(times: Times, contenders: Sequence[Contender], ranks: int) -> dict[str, dict[str, Any]]:
    """Of each contender: median, quartiles, min, max in ms, best_peer, and its ratios to hvdtrain and to that peer.

    A ratio is the median over rounds of (its time / the other's time in that round): below 1 is faster; None where
    there is no other. ``ranks``: as asked for.
    """
    known = {c.name: c for c in contenders}
    found = {}
    for name, ms in times.items():
        best = best_peer(times, known[name], contenders, ranks)
        found[name] = {"median_ms": median(ms), "quartiles_ms": quartiles(ms), "min_ms": min(ms), "max_ms": max(ms),
                       "to_hvdtrain": ratio(times, name, base(times)), "best_peer": best,
                       "to_best_peer": ratio(times, name, best),
                       "to_best_peer_quartiles": quartiles(ratios(times, name, best))}
    return found


def base(times: Times) -> str | None:
    """Return the contender that others are compared with as hvdtrain; None where it takes no part."""
    return next((name for name in BASES if name in times), None)


def best_peer(times: Times, own: Contender, contenders: Sequence[Contender], ranks: int) -> str | None:
    """Return the peer with the smallest median of those with equal compression, ranks, compilation and partition."""
    alike = [c.name for c in contenders if c.name in times and c.peer and c.compression == own.compression != ""
             and c.compiled == own.compiled and c.cuts == own.cuts and c.ranks(ranks) == own.ranks(ranks)]
    return min(alike, key=lambda name: median(times[name]), default=None)


def ratio(times: Times, name: str, other: str | None) -> float | None:
    """Median over rounds of the ratio of two contenders' times; None without the other."""
    found = ratios(times, name, other)
    return median(found) if found else None


def ratios(times: Times, name: str, other: str | None) -> list[float]:
    """Return the ratio of two contenders' times in each round; [] without the other."""
    return [] if other is None or other not in times else [a / b for a, b in zip(times[name], times[other])]


def quartiles(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the first and third quartile; None of nothing."""
    return (spread(samples)["p25"], spread(samples)["p75"]) if samples else None


def rows(found: Mapping[str, Mapping[str, Any]], about: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table's rows, under `HEADERS`."""
    return [(name, about[name]["wire"], f"{s['median_ms']:.2f}", between(s["quartiles_ms"], 2),
             shown(s["to_hvdtrain"]), shown(s["to_best_peer"]), between(s["to_best_peer_quartiles"]),
             s["best_peer"] or "-") for name, s in found.items()]


def shown(value: float | None, digits: int = 3) -> str:
    """Return a number with so many decimals; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def between(pair: tuple[float, float] | None, digits: int = 3) -> str:
    """Two numbers with so many decimals; "-" for None."""
    return "-" if pair is None else f"{pair[0]:.{digits}f} to {pair[1]:.{digits}f}"


def remarks(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Each note once, with the contenders that made it."""
    told: dict[str, list[str]] = {}
    for name, texts in notes.items():
        for text in texts:
            told.setdefault(text, []).append(name)
    return [f"{'all' if len(names) == len(notes) > 1 else ', '.join(names)}: {text}" for text, names in told.items()]


def disagreements(found: Mapping[str, Mapping[str, Any]], contenders: Sequence[Contender],
                  ranks: int) -> dict[str, str]:
    """{contender: what is wrong with it} of results after the same steps (loss, moved, equal).

    Contenders that sum gradients as they are ought to be at the median of those. Where there are two, none is right.
    """
    present = [c for c in contenders if c.name in found]
    alike = [c.name for c in present if c.exact and c.ranks(ranks) == ranks]
    wrong: dict[str, list[str]] = {c.name: [] for c in present}
    for key in ("loss", "moved"):
        finite = [found[name][key] for name in alike if math.isfinite(found[name][key])]
        middle = median(finite) if finite else math.nan
        for c in present:
            value = found[c.name][key]
            if not math.isfinite(value):
                wrong[c.name].append(f"{key} is not finite")
            elif c.name in alike and not abs(value - middle) <= TOLERANCE * abs(middle):
                wrong[c.name].append(f"{key} unlike the median, {middle:.6f}")
    for c in present:
        if found[c.name]["equal"] is False and c.options.get("wire") != "null":
            wrong[c.name].append("ranks differ")
    return {name: "; ".join(texts) for name, texts in wrong.items() if texts}
