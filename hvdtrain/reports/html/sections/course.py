"""The run on one time line: attempts, evaluations, checkpoints, decisions and trouble."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.log import RunAttempt
from hvdtrain.reports.html.shapes import Lane, Lanes, Section, TimeAxis, TimelineSpan, near_joined
from hvdtrain.reports.html.words import count, cut, duration, listed, metric, number, size

LEGEND = (("starting", "starting"), ("training", "training"), ("ending", "ending"), ("failed", "failed"),
          ("again", "lost and repeated later"))
QUIET = 12.0
"""A pause between two records of this many usual ones, and of `LEAST_QUIET_S`, is drawn as quiet."""

LEAST_QUIET_S = 5.0
TROUBLE = {"non_finite": "step skipped: not finite", "out_of_memory": "out of memory", "failed": "failed"}
DECIDED = {"balance": "shares", "wire": "transport", "compression": "compression", "compile": "compile",
           "memory_fit": "micro-batch"}


def axis_of(facts: RunFacts) -> TimeAxis:
    """Return the time axis that all figures over time of a run share."""
    return TimeAxis([(one.begin_s, facts.end_s if facts.alive and one is facts.attempts[-1] else one.end_s)
                     for one in facts.attempts])


def make(facts: RunFacts) -> Section | None:
    if not facts.attempts:
        return None
    axis = axis_of(facts)
    lanes = [_attempts(facts, axis), _trouble(facts, axis), _evaluations(facts, axis), _checkpoints(facts, axis),
             _decisions(facts, axis)]
    many = count(len(facts.attempts), "attempt")
    lead = f"{many}. Hover over a mark to read it."
    block = Lanes([lane for lane in lanes if lane.spans or lane.ticks], axis.breaks(), axis.ticks(), _legend(lanes))
    return Section("course", "Timeline", lead, [block])


def _attempts(facts: RunFacts, axis: TimeAxis) -> Lane:
    lane = Lane("attempts")
    for one in facts.attempts:
        going = facts.alive and one is facts.attempts[-1]
        end_s = facts.end_s if going else one.end_s
        trained_s = one.trained_s if math.isfinite(one.trained_s) else end_s
        which = f"attempt {one.number}, {count(one.ranks, 'rank')}"
        label = str(one.number) if len(facts.attempts) > 1 else ""
        _span(lane, axis, one.begin_s, trained_s, "starting", f"{which}: starting, {duration(trained_s - one.begin_s)}",
              label if not math.isfinite(one.trained_s) else "")
        steps = f"steps {max(0, one.step_begin):,} to {max(0, one.step_end):,}"
        stop_s = _stop(one, end_s, going)
        _span(lane, axis, trained_s, stop_s, "training", f"{which}: {steps}, {duration(stop_s - trained_s)}", label)
        _span(lane, axis, max(trained_s, stop_s), end_s, "ending",
              f"{which}: shutdown after the last step, {duration(end_s - stop_s)}")
        again_s = _time_at(facts, one.order, one.step_end - one.lost) if one.lost else math.nan
        if math.isfinite(again_s):
            _span(lane, axis, again_s, stop_s, "again", f"{count(one.lost, 'step')} of attempt {one.number} that were "
                  "in no checkpoint and were repeated")
        if not one.ended_well and not going:
            words = f"{one.fault}: {one.words}" if one.cause else "ended without a message"
            lane.ticks.append(TimelineSpan(axis.at(one.fault_s), 0.0, "failed",
                                           f"attempt {one.number}: {cut(words, 200)}"))
    return lane


def _stop(one: RunAttempt, end_s: float, going: bool) -> float:
    """Return when an attempt's training ended: last save, export and ends of processes follow."""
    if going:
        return end_s
    stop_s = one.seen_s if one.ended_well else one.fault_s
    return min(end_s, stop_s) if math.isfinite(stop_s) else end_s


def _legend(lanes: Sequence[Lane]) -> list[tuple[str, str]]:
    there = {span.kind for lane in lanes for span in (*lane.spans, *lane.ticks)}
    return [(kind, words) for kind, words in LEGEND if kind in there]


def _span(lane: Lane, axis: TimeAxis, begin_s: float, end_s: float, kind: str, words: str, label: str = "") -> None:
    left, right = axis.at(begin_s), axis.at(end_s)
    if right > left:
        lane.spans.append(TimelineSpan(left, right - left, kind, words, label if right - left > 2.5 else ""))


def _time_at(facts: RunFacts, order: int, step: int) -> float:
    """Return when an attempt had reached ``step``, as near as its records tell; NaN where they do not."""
    own = facts.log.steps["order"] == order
    times, steps = facts.log.steps["time"][own], facts.log.steps["step"][own]
    after = np.searchsorted(steps, step, side="right")
    return float(times[max(0, after - 1)]) if len(times) else math.nan


def _trouble(facts: RunFacts, axis: TimeAxis) -> Lane:
    """Return steps without update, memory that ran out, and times without any record."""
    ticks = []
    ends = {one.order: one.fault_s for one in facts.attempts if one.order and not one.ended_well}
    for event in facts.log.events:
        if event.name in TROUBLE:
            ranks = event.values.get("ranks") or [event.values.get("rank")]
            who = listed([f"rank {r}" for r in ranks if isinstance(r, int) and r >= 0])
            at_s = ends.get(event.order, event.time_s) if event.name == "failed" else event.time_s
            ticks.append((axis.at(at_s), "trouble", f"step {event.step:,}: {TROUBLE[event.name]}"
                          + (f" ({who})" if who else "")))
        elif event.name == "saved" and event.values.get("error"):
            ticks.append((axis.at(event.time_s), "trouble", f"step {event.step:,}: not saved: "
                          f"{cut(event.values['error'], 120)}"))
    spans = [TimelineSpan(axis.at(a), max(0.3, axis.at(b) - axis.at(a)), "quiet", f"no record for {duration(b - a)}")
             for a, b in quiet(facts)]
    return Lane("trouble", spans, near_joined(ticks, "times"))


def quiet(facts: RunFacts) -> list[tuple[float, float]]:
    """Return the stretches of training without a record that last much longer than usual: (begin, end), unix s."""
    found: list[tuple[float, float]] = []
    for one in facts.attempts:
        if not one.order:
            continue
        own = facts.log.steps["order"] == one.order
        times = np.sort(np.concatenate([facts.log.steps["time"][own],
                                        [e.time_s for e in facts.log.events if e.order == one.order]]))
        times = times[np.isfinite(times)]
        end_s = facts.end_s if facts.alive and one is facts.attempts[-1] else one.end_s
        end_s = (
            times[-1] if len(times) and one.ended_well else end_s
        )  # then only its processes end after its last words
        gaps = np.diff([*times, max(end_s, times[-1])]) if len(times) else np.zeros(0)
        usual = float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 0.0
        long = np.nonzero(gaps > max(LEAST_QUIET_S, QUIET * usual))[0] if len(times) > 4 else ()
        found += [(float(times[i]), float(times[i] + gaps[i])) for i in long]
    return sorted(found, key=lambda one: one[0] - one[1])[:20]


def _evaluations(facts: RunFacts, axis: TimeAxis) -> Lane:
    rows = []
    for event in facts.log.all("eval"):
        found = event.values.get("metrics")
        told = [f"{name} {metric(number(value))}" for name, value in found.items()] if isinstance(found, dict) else []
        rows.append((axis.at(event.time_s), "evaluation", f"step {event.step:,}: test {', '.join(told)}"))
    return Lane("evaluations", [], near_joined(rows, "evaluations"))


def _checkpoints(facts: RunFacts, axis: TimeAxis) -> Lane:
    """Checkpoints as they came to the disk; in older logs as they were due."""
    saved = [e for e in facts.log.all("saved") if not e.values.get("error")]
    rows = [(axis.at(e.time_s), "checkpoint", f"step {e.values.get('at_step', e.step)}: saved, "
             f"{size(number(e.values.get('bytes')))}") for e in saved]
    rows = rows or [
        (axis.at(e.time_s), "checkpoint", f"step {e.step:,}: checkpoint") for e in facts.log.all("checkpoint")
    ]
    return Lane("checkpoints", [], near_joined(rows, "checkpoints"))


def _decisions(facts: RunFacts, axis: TimeAxis) -> Lane:
    rows: list[tuple[float, str, str]] = []
    for event in facts.log.events:
        if event.name in DECIDED:
            rows.append((axis.at(event.time_s), "decision", f"step {event.step:,}: {DECIDED[event.name]}: "
                         f"{_decision(event.values)}"))
    return Lane("decisions", [], near_joined(rows, "decisions"))


def _decision(values: dict[str, object]) -> str:
    samples = values.get("samples")
    if isinstance(samples, Sequence) and not isinstance(samples, str):
        return f"{values.get('stage', 'plan')} {', '.join(str(one) for one in samples[:8])}"
    return cut(str(values.get("choice") or values.get("option") or "by memory"), 60)
