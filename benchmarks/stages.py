"""Evaluation of `benchmarks pipeline`: steps against each other, and the stages' idle shares.

Owns these numbers and their tables. Pure: measures and prints nothing. Idle shares are, as a run tells them at its
end, of a step's forwards and backwards: what a rank waits in them for other stages and what they send, and after its
last one for the others to end. Under a quota a rank that has waited computes faster than it may in the mean, as what it
did not use of its period is still there: the clock then sees more idle time than a device of that speed has. So the
share is estimated by processor time as well: what its ranks used of what the quota gave them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import standings
from benchmarks.estimates import StepWork
from benchmarks.standings import Times

HEADERS = ("contender", "wire", "ms a step", "quartiles", "ours to it", "quartiles", "processor ms a step")
STAGE_HEADERS = ("stage", "rank", "blocks", "busy ms a step", "predicted", "idle %", "predicted", "off by points",
                 "processor ms a step", "idle % by it")
RATIO, POINTS = 1.0, 3.0
"""To reach: a step in no more than this part of the peer's; idle shares within so many points of the predicted."""

Spent = Mapping[str, float]
"""One rank's seconds by phase (and ``cpu``, ``step``, and ``idle``: of ``wait`` between forwards and backwards), and
bytes (``sent``), over the steps of a round."""


def summary(times: Times, own: str, spent: Mapping[str, Sequence[Sequence[Spent]]], steps: int
            ) -> dict[str, dict[str, Any]]:
    """Of each contender: its step in ms, ``own``'s step as a part of it (by round), processor time of all ranks.

    ``spent``: of each contender by round and rank.
    """
    found = {}
    for name, ms in times.items():
        against = name != own and own in times
        cpu_s = [sum(rank.get("cpu", 0.0) for rank in ranks) for ranks in spent[name]]
        found[name] = {"median_ms": median(ms), "quartiles_ms": standings.quartiles(ms),
                       "ours_to_it": standings.ratio(times, own, name) if against else None,
                       "ours_to_it_quartiles": standings.quartiles(standings.ratios(times, own, name)) if against
                       else None, "cpu_ms": 1e3 * median(cpu_s) / steps}
    return found


def rows(found: Mapping[str, Mapping[str, Any]], wires: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the rows under `HEADERS`."""
    return [(name, wires[name], f"{s['median_ms']:.1f}", standings.between(s["quartiles_ms"], 1),
             standings.shown(s["ours_to_it"]), standings.between(s["ours_to_it_quartiles"]), f"{s['cpu_ms']:.1f}")
            for name, s in found.items()]


def totals(spent: Sequence[Sequence[Spent]]) -> list[dict[str, float]]:
    """Return the seconds of each rank in all rounds."""
    return [{key: sum(rank.get(key, 0.0) for rank in own) for key in own[0]} for own in zip(*spent)]


def stages(spent: Sequence[Sequence[Spent]], steps: int, pipeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each stage, by place: rank, blocks, seconds of a step that it computes and waits, measured and predicted.

    ``steps``: of a round. ``pipeline``: as the job told it: places, blocks of each chunk, predicted_busy_s by place and
    predicted_step_s.
    """
    ranks, counted = totals(spent), steps * len(spent)
    exchange_s = min(own["wait"] - own["idle"] for own in ranks)
    found = []
    for place, rank in enumerate(pipeline["places"]):
        own, busy_s = ranks[rank], pipeline["predicted_busy_s"][place]
        found.append({"rank": rank, "blocks": sum(map(len, pipeline["blocks"][place::len(pipeline["places"])])),
                      "busy_s": own["compute"] / counted, "idle_s": (own["wait"] - exchange_s) / counted,
                      "predicted_busy_s": busy_s, "predicted_idle_s": pipeline["predicted_step_s"] - busy_s,
                      "cpu_s": own["cpu"] / counted})
    return found


def shares(each: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """(measured, predicted) idle share in per cent of some stages together."""
    def share(idle_s: float, busy_s: float) -> float:
        return 100 * idle_s / (idle_s + busy_s) if idle_s + busy_s > 0 else 0.0

    sums = {key: sum(stage[key] for stage in each) for key in ("idle_s", "busy_s", "predicted_idle_s",
                                                               "predicted_busy_s")}
    return share(sums["idle_s"], sums["busy_s"]), share(sums["predicted_idle_s"], sums["predicted_busy_s"])


def share_by_processor(each: Sequence[Mapping[str, float]], quota: float) -> float:
    """Idle share in per cent of some stages together, each on ``quota`` of a core, by the processor time they used."""
    given_s = quota * sum(stage["idle_s"] + stage["busy_s"] for stage in each)
    return 100 * (1 - sum(stage["cpu_s"] for stage in each) / given_s) if given_s > 0 else 0.0


def stage_rows(each: Sequence[Mapping[str, Any]], quota: float) -> list[tuple[str, ...]]:
    """Return the rows under `STAGE_HEADERS`, the last of all stages together; ``quota``: of a core, for each rank."""
    def row(stage: str, rank: str, some: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        measured, predicted = shares(some)
        busy, said, cpu = (1e3 * sum(s[key] for s in some) for key in ("busy_s", "predicted_busy_s", "cpu_s"))
        return (stage, rank, str(sum(s["blocks"] for s in some)), f"{busy:.1f}", f"{said:.1f}", f"{measured:.1f}",
                f"{predicted:.1f}", f"{measured - predicted:.1f}", f"{cpu:.1f}",
                f"{share_by_processor(some, quota):.1f}")

    return [*(row(str(place), str(s["rank"]), [s]) for place, s in enumerate(each)), row("all", "-", each)]


def work(spent: Sequence[Sequence[Spent]], steps: int, pipeline: Mapping[str, Any], micro_batches: int,
         parameters: int, link_bytes_s: float) -> StepWork:
    """Return the input of `benchmarks.estimates`, as a job measured it; parameters of 4 bytes."""
    ranks, counted = totals(spent), steps * len(spent)
    own_s = [(rank["compute"] + rank["update"]) / counted for rank in ranks]
    cuts = len(pipeline["blocks"]) - 1
    cargo_bytes = sum(rank["sent"] for rank in ranks) / counted / (2 * cuts * micro_batches)
    return StepWork(len(ranks), sum(own_s), 4.0 * parameters, cargo_bytes, micro_batches, link_bytes_s,
                max(own_s) / sum(own_s))


def reached(found: Mapping[str, Mapping[str, Any]], peer: str, each: Sequence[Mapping[str, Any]],
            quota: float) -> list[str]:
    """Compare the result with the target; ``quota``: of a core, for each rank."""
    said = []
    ratio = found.get(peer, {}).get("ours_to_it")
    if ratio is not None:
        said.append(f"{ratio:.3f} of {peer}'s step, to reach: {RATIO:.2f}" + ("" if ratio <= RATIO else ", missed"))
    if each:
        measured, predicted = shares(each)
        off = measured - predicted
        said.append(f"idle share off by {off:+.1f} points, to reach: {POINTS:g}"
                    + ("" if abs(off) <= POINTS else ", missed")
                    + f"; by processor time {share_by_processor(each, quota) - predicted:+.1f}")
    return said
