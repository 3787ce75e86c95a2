"""Curves of training and test over steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hvdtrain.reports.html.curves import Chart, Series, along, chart, steps_in_short
from hvdtrain.reports.html.facts import RunFacts
from hvdtrain.reports.html.shapes import Charts, Section
from hvdtrain.reports.html.words import metric, number, short

MOST_FAINT = 12
"""Stretches that were computed again and are still drawn, faintly."""


def make(facts: RunFacts) -> Section | None:
    tests = evaluations(facts)
    train = standing(facts, "loss")
    both = [Series("train", *train, "k0"), *superseded(facts, "loss")]
    if "loss" in tests:
        both.append(Series("test", *tests["loss"], "k1", dots=True))
    restarts = marks(facts)
    last = _last(facts)
    axis = along(0.0, last, words=steps_in_short) if last > 0 else None
    charts = [chart("Loss", "", both, marks=restarts, x_axis=axis, last=_latest(train[1]))]
    for i, (name, points) in enumerate(tests.items()):
        if name != "loss":
            title = name if "/" in name else f"Test {name}"
            charts.append(chart(title, "", [Series(name, *points, f"k{i % 4 + 1}", dots=True)], marks=restarts,
                                x_axis=axis, last=_latest(points[1])))
    for name, title, unit, zero in (("samples_per_s", "Speed", "samples/s", True),
                                    ("percent_of_solo", "Scaling efficiency", "%", True),
                                    ("grad_norm", "Gradient norm", "L2", False),
                                    ("lr", "Learning rate", "", True)):
        x, y = standing(facts, name)
        color = {"samples_per_s": "k2", "percent_of_solo": "k2"}.get(name, "k3")
        charts.append(chart(title, unit, [Series(title, x, y, color)], zero=zero, marks=restarts, x_axis=axis,
                            words=short, last=_latest(y, short)))
    drawn: list[Chart] = [one for one in charts if one is not None]
    if not drawn:
        return None
    lead = "Over the steps of the final training trajectory."
    if facts.restarts:
        lead += " Vertical lines are restarts; faint lines are repeated steps."
    if len(facts.log.steps["step"]) > 240:
        lead += " Lines show the mean of several steps, bands their minimum and maximum."
    return Section("learning", "Learning", lead, [Charts(drawn)])


def standing(facts: RunFacts, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a column without what a later attempt computed again, in order of steps."""
    parts = _parts(facts)
    steps, values = facts.log.steps["step"], facts.log.steps[name]
    kept = [own[steps[own] <= limit] for own, limit in parts]
    chosen = np.concatenate(kept) if kept else np.zeros(0, dtype=int)
    return steps[chosen], values[chosen]


def superseded(facts: RunFacts, name: str) -> list[Series]:
    """Return what was computed again, as faint lines."""
    steps, values = facts.log.steps["step"], facts.log.steps[name]
    lines = []
    for own, limit in _parts(facts):
        gone = own[steps[own] > limit]
        if len(gone):
            lines.append(Series("", steps[gone], values[gone], "k0", faint=True))
    return lines[-MOST_FAINT:]


def _parts(facts: RunFacts) -> list[tuple[np.ndarray, float]]:
    """(rows of an attempt, the last step of it that stands), in order."""
    order, parts, limit = facts.log.steps["order"], [], math.inf
    for one in reversed([one for one in facts.attempts if one.order]):
        parts.append((np.nonzero(order == one.order)[0], limit))
        if one.step_begin >= 0:
            limit = min(limit, float(one.step_begin))
    first = np.nonzero(order == 0)[0]
    return [*([(first, limit)] if len(first) else []), *reversed(parts)]


def marks(facts: RunFacts) -> list[tuple[float, str]]:
    """Return the steps at which an attempt went on."""
    found = {one.step_begin: f"attempt {one.number} resumed at step {one.step_begin:,}"
             for one in facts.attempts[1:] if one.order and one.step_begin > 0}
    return [(float(step), words) for step, words in sorted(found.items())][-40:]


def evaluations(facts: RunFacts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return metric -> (steps, values), the latest of each step."""
    rows: dict[str, dict[int, float]] = {}
    for event in facts.log.all("eval"):
        found = event.values.get("metrics")
        for name, value in found.items() if isinstance(found, dict) else ():
            rows.setdefault(str(name), {})[event.step] = number(value)
    return {name: (np.array(sorted(points), dtype=float), np.array([points[step] for step in sorted(points)]))
            for name, points in rows.items()}


def _last(facts: RunFacts) -> float:
    steps = [float(event.step) for event in facts.log.all("eval")[-1:]]
    return max([*steps, *facts.log.steps["step"][-1:]], default=0.0)


def _latest(values: np.ndarray, words: Callable[[float], str] = metric) -> str:
    finite = values[np.isfinite(values)]
    return words(float(finite[-1])) if len(finite) else ""
