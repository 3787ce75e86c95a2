"""Choice of the compressor from measurements: predictions, decision with its reason, check afterwards. Pure.

Let, for a step without compression::

    step_0, wait_0      measured: seconds of a step, and of it the wait for sums
    wire_0              predicted from the links: seconds of its requests
    shown = wait_0 / wire_0             fraction of the transport that the step waits for
    rest  = step_0 - shown * wire_0     what stays, whatever is sent: compute, update, data

Then, for a compressor c, whose requests take first_c seconds, and later_c for those that need an answer first::

    step_c = rest + codec_c + shown * first_c + later_c

as the simulator plays a step over a link of which ``shown`` counts.
If the transport works during backward, shown is at most 1: waiting beyond the transport (a thread without a core) would
stay, and later_c, issued after backward, is not hidden. If it works only while it is waited for, shown tells how much
slower it is in use than in the sweep, and may exceed 1; there, and inside a graph, which issues requests as early as it
can, later_c is multiplied by shown too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.core.terminal import as_text
from hvdtrain.core.units import MIB, format_ms
from hvdtrain.planning.linear import LinearTime, Link, Traffic, wire_seconds
from hvdtrain.planning.simulator import Exchange, Rank, Scene, step
from hvdtrain.planning.simulator.scene import RING

HEADERS = ("", "choice", "numerics", "MiB sent", "codec ms", "transport ms", "step ms", "over")

TIE = 0.02
"""Predicted steps this near to the shortest count as equal; of those the gentlest compressor is taken."""

BUCKET_TIE = 0.03
"""Costs of bucket sizes this near to the least count as equal; of those the largest bucket is taken."""

OFF = 0.25
"""A step this much longer than predicted is reported, even where it still wins."""


@dataclass(frozen=True)
class CompressorCost:
    """Measured cost of one compressor in a step, on the slowest rank.

    ``codec_s``: encoding and decoding of all buckets. ``wire_bytes``: sent by one rank in all. ``numerics``: effect on
    gradients, as text.
    """

    name: str
    codec_s: float
    traffic: tuple[Traffic, ...]
    wire_bytes: int
    numerics: str = "lossy"


@dataclass(frozen=True)
class CodecCost:
    """Compressor as the simulator plays it: ``codec_s``, ``ratio``, ``later_s`` and ``bucket_bytes`` as in `Exchange`.

    ``bucket_bytes``: (): those of a run without a compressor.
    """

    codec_s: float
    ratio: float
    later_s: float = 0.0
    bucket_bytes: tuple[int, ...] = ()


def codec_of(cost: CompressorCost, plain: CompressorCost, links: Mapping[str, Link], sums: Link,
             buckets: Sequence[int], plain_buckets: Sequence[int]) -> CodecCost:
    """Return a measured compressor for an exchange over ``sums``, the link of sums in a step.

    ``links``: by kind of call. ``plain``: no compressor; ``buckets``: bytes of each in a run with either. The ratio of
    requests' seconds on ``links`` counts on ``sums`` too, less the starts of buckets, which the simulator adds.
    """
    first_s, later_s = wire_seconds(cost.traffic, links)
    plain_s = sum(wire_seconds(plain.traffic, links))
    plain_sums_s = len(plain_buckets) * sums.alpha_s + sum(plain_buckets) * sums.beta_s_per_byte
    travel_s = sum(buckets) * sums.beta_s_per_byte
    ratio = (first_s / plain_s * plain_sums_s - len(buckets) * sums.alpha_s) / travel_s if plain_s and travel_s else (
        cost.wire_bytes / plain.wire_bytes if plain.wire_bytes else 1.0)
    return CodecCost(cost.codec_s, max(0.0, ratio), later_s, tuple(buckets))


@dataclass(frozen=True)
class Baseline:
    """Seconds of a step without compression, and of it the seconds that wait for sums; measured."""

    step_s: float
    wait_s: float


@dataclass(frozen=True)
class CompressorPrediction:
    """The prediction for one compressor; ``wire_s`` is all of its wire, hidden or not. ``wire``: which, where there are
    several.
    """

    name: str
    wire_bytes: int
    codec_s: float
    wire_s: float
    step_s: float
    wire: str = ""
    numerics: str = "lossy"


@dataclass(frozen=True)
class CompressorChoice:
    """The decision: a compressor's name, its predicted step, and why. ``wire``: another one to go over to, or ""."""

    name: str
    step_s: float
    reason: str
    wire: str = ""


def predict(costs: Sequence[CompressorCost], links: Mapping[str, Link], base: Baseline, overlaps: bool,
            in_graph: bool = False, wire: str = "",
            in_use: Mapping[str, Link] | None = None) -> list[CompressorPrediction]:
    """Return a row for each of ``costs``, of which "none" must be one, by the formula above.

    ``overlaps``: the transport works during backward. ``in_graph``: requests are issued by a graph, not after backward.
    ``wire``: another transport, whose ``links`` these are; ``in_use``: links of the one that was measured in use.
    """
    wire_0 = sum(wire_seconds(next(c for c in costs if c.name == "none").traffic, in_use or links))
    wires = {c.name: wire_seconds(c.traffic, links) for c in costs}
    shown = base.wait_s / wire_0 if wire_0 > 0 else 0.0
    if overlaps:
        shown = min(1.0, shown)
    rest_s = base.step_s - shown * wire_0
    rows = []
    for cost in costs:
        first_s, later_s = wires[cost.name]
        exchange = Exchange(RING, (1,), Link(0.0, shown * (wire_0 or 1.0)), codec_s=cost.codec_s,
                            ratio=first_s / (wire_0 or 1.0), later_s=later_s * (
                                1.0 if overlaps and not in_graph else shown))
        step_s = step(Scene((Rank(0, LinearTime(rest_s, 0.0), 0),) * 2, exchange)).mid_s
        rows.append(CompressorPrediction(cost.name, cost.wire_bytes, cost.codec_s, first_s + later_s, step_s, wire,
                                         cost.numerics))
    return rows


def best_wires(rows: Sequence[CompressorPrediction], margin: float = 0.05) -> list[CompressorPrediction]:
    """Of each compressor's rows that of the current transport (""), or of another one which saves ``margin`` of it."""
    found: dict[str, CompressorPrediction] = {}
    for row in rows:
        at_hand = found.setdefault(row.name, row)
        if row.step_s < at_hand.step_s * (1 - margin * (at_hand.wire == "")):
            found[row.name] = row
    return list(found.values())


def decide(rows: Sequence[CompressorPrediction], margin: float) -> CompressorChoice:
    """Return the compressor with the shortest predicted step, if it saves more than ``margin`` of the step without;
    else none.

    ``rows`` have the gentlest compressor first, which wins ties (within `TIE`). Each takes its best transport
    (`best_wires`).
    """
    rows = best_wires(rows)
    none = next(row for row in rows if row.name == "none")
    others = [row for row in rows if row.name != "none"]
    if not others:
        return CompressorChoice("none", none.step_s, "none: there is no compressor to compare", none.wire)
    shortest_s = min(row.step_s for row in others)
    best = next(row for row in others if row.step_s <= shortest_s * (1 + TIE))
    saved = 1.0 - best.step_s / none.step_s if none.step_s > 0 else 0.0
    over = f" over {best.wire}" if best.wire else ""
    against = (f"{best.name}{over} is predicted to take {format_ms(best.step_s)} a step against "
               f"{format_ms(none.step_s)} uncompressed")
    if saved > margin:
        return CompressorChoice(best.name, best.step_s, f"{against}, {saved:.0%} less, and is used from now on; "
                      f"gradients are no longer exact ({best.numerics})", best.wire)
    short = f"saves {saved:.1%}" if saved > 0 else "saves nothing"
    moves = f"; uncompressed, over {none.wire} from now on" if none.wire else ""
    return CompressorChoice("none", none.step_s, f"none: {against}, which {short}; the margin is {margin:.0%}{moves}",
                            none.wire)


def verdict(choice: CompressorChoice, base: Baseline, measured_s: float) -> tuple[bool, str]:
    """(whether to keep ``choice``, why), from the measured step with it: it must be shorter than without."""
    numbers = (f"{format_ms(measured_s)} a step, predicted were {format_ms(choice.step_s)}, "
               f"without compression {format_ms(base.step_s)}")
    if measured_s >= base.step_s:
        return False, f"none from now on: {choice.name} took {numbers}; the prediction was wrong"
    late = measured_s / choice.step_s - 1.0 if choice.step_s > 0 else 0.0
    remark = f"; {late:.0%} longer than predicted, and still shorter than without" if late > OFF else ""
    return True, f"{choice.name} stays: it took {numbers}{remark}"


def table(rows: Sequence[CompressorPrediction], refused: Mapping[str, str], chosen: str, size: int,
          wire: str = "") -> str:
    """Return the table of what a rank of ``size`` sends and how long it takes; the chosen row is marked."""
    cells = [[">" if (row.name, row.wire) == (chosen, wire) else "", row.name, row.numerics,
              f"{row.wire_bytes / MIB:.3f}", *(f"{1e3 * s:.2f}" for s in (row.codec_s, row.wire_s, row.step_s)),
              row.wire]
             for row in rows]
    return "\n".join([f"compression auto: a step on each of {size} ranks, predicted", as_text(HEADERS, cells),
                      *(f"   {name} not considered: {why}" for name, why in refused.items())])


def pick_bucket(totals_s: Mapping[float, float], tails_s: Mapping[float, float],
                overlaps: bool) -> tuple[float, str]:
    """Return the bucket size in MiB whose exchange costs least, and the numbers as text.

    ``totals_s``: seconds of a whole exchange by size; ``tails_s``: of the last bucket alone, which backward cannot
    hide. Cost: the total, plus the tail if the rest ``overlaps`` backward. The larger bucket wins ties (within
    `BUCKET_TIE`).
    """
    costs_s = {mb: total_s + (tails_s[mb] if overlaps else 0.0) for mb, total_s in totals_s.items()}
    least_s = min(costs_s.values())
    best = max(mb for mb, cost_s in costs_s.items() if cost_s <= least_s * (1 + BUCKET_TIE))
    numbers = ", ".join(f"{mb:g} MiB {format_ms(costs_s[mb])}" for mb in sorted(costs_s))
    return best, numbers + (" (plus the last bucket, which nothing hides)" if overlaps else "")
