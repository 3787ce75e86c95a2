"""Curves over steps or time: thinned so that a million points fit a page and no peak is lost.

Owns thinning, paths and what a cursor over the figure is told. Where several points fall together, the line is their
mean and a band shows the least and the greatest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.reports.html.figures.scale import Axis, along, fitting, steps_in_short
from hvdtrain.reports.html.words import metric

MOST = 240
"""Points of a line."""


@dataclass(frozen=True)
class Line:
    """Values ``y`` [N] at ascending ``x`` [N]; NaN breaks the line. ``dots``: marked where they are, few.

    ``color``: a CSS class, "k0", "k1", ... ``faint``: no longer stands, such as steps that were computed again.
    """

    name: str
    x: Any
    y: Any
    color: str = "k0"
    dots: bool = False
    faint: bool = False


@dataclass
class Chart:
    """A figure to draw: paths in a square of 1000, ticks and marks in percent, ``cursor`` for who points at it."""

    title: str
    unit: str
    x: Axis
    y: Axis
    paths: list[dict[str, str]] = field(default_factory=list)
    dots: list[dict[str, Any]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    cursor: dict[str, Any] = field(default_factory=dict)
    latest: str = ""
    x_name: str = ""
    note: str = ""


def chart(title: str, unit: str, lines: Sequence[Line], *, zero: bool = False, marks: Sequence[tuple[float, str]] = (),
          x_axis: Axis | None = None, x_words: Callable[[float], str] = steps_in_short, x_name: str = "step",
          words: Callable[[float], str] = metric, last: str = "") -> Chart | None:
    """Draw ``lines`` over one axis; None where no value is finite. ``marks``: (x, words) of upright lines."""
    thinned = [(line, *thin(line.x, line.y)) for line in lines]
    values = [np.concatenate([low, high]) for line, _, _, low, high in thinned if len(low)]
    joined = np.concatenate(values) if values else np.zeros(0)
    joined = joined[np.isfinite(joined)]
    if not len(joined):
        return None
    xs = [x for _, x, *_ in thinned if len(x)]
    x_axis = x_axis or along(min(float(x[0]) for x in xs), max(float(x[-1]) for x in xs), words=x_words)
    y_axis = fitting(float(joined.min()), float(joined.max()), zero)
    drawn = Chart(title, unit, x_axis, y_axis, latest=last)
    drawn.marks = [(x_axis.at(x), text) for x, text in marks if x_axis.low <= x <= x_axis.high]
    series = []
    for line, x, mean, low, high in thinned:
        _draw(drawn, line, x, mean, low, high)
        if not line.faint and len(x):
            series.append(
                {"n": line.name, "c": line.color, "x": [_digits(v) for v in x], "y": [_digits(v) for v in mean]}
            )
    named = {line.name: line.color for line in lines if not line.faint and line.name}
    drawn.legend = list(named.items()) if len(named) > 1 else []
    drawn.x_name = {"step": "steps"}.get(x_name, "")
    drawn.note = "log scale" if y_axis.log else ""
    drawn.cursor = {"x0": x_axis.low, "x1": x_axis.high, "xn": x_name, "s": series}
    return drawn


def thin(x: Any, y: Any, most: int = MOST) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (x, mean, least, greatest), each of at most ``most`` numbers, of runs of neighbours; NaN where all are."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) <= most:
        return x, y, y, y
    bounds = np.linspace(0, len(x), most + 1).astype(int)[:-1]
    finite = np.isfinite(y)
    many = np.add.reduceat(finite.astype(int), bounds)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(finite, y, 0.0), bounds) / many
    low = np.minimum.reduceat(np.where(finite, y, np.inf), bounds)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), bounds)
    empty = many == 0
    low[empty] = high[empty] = mean[empty] = math.nan
    sizes = np.diff([*bounds, len(x)])
    return np.add.reduceat(x, bounds) / sizes, mean, low, high


def _draw(drawn: Chart, line: Line, x: np.ndarray, mean: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Add a line's paths or dots."""
    faint = " faint" if line.faint else ""
    if line.dots and len(x) <= 60:
        drawn.dots += [{"left": drawn.x.at(a), "bottom": drawn.y.at(b), "color": line.color + faint}
                       for a, b in zip(x, mean) if math.isfinite(b)]
    elif len(x) == 1 and np.isfinite(mean[0]):
        drawn.dots.append({"left": drawn.x.at(x[0]), "bottom": drawn.y.at(mean[0]), "color": line.color + faint})
    points = [place(drawn, a, b) for a, b in zip(x, mean)]
    if np.any(high > low) and not line.faint:
        drawn.paths.append({"kind": f"band {line.color}", "d": _band(drawn, x, low, high)})
    drawn.paths.append({"kind": f"line {line.color}{faint}", "d": path(points)})


def place(drawn: Chart, x: float, y: float) -> tuple[float, float] | None:
    """Return a point in the square of 1000, y downwards; None for NaN."""
    across, up = drawn.x.at(float(x)), drawn.y.at(float(y))
    return (10 * across, 1000 - 10 * up) if math.isfinite(across) and math.isfinite(up) else None


def path(points: Sequence[tuple[float, float] | None]) -> str:
    """Return an SVG path through ``points``, broken at None."""
    words, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        words.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    return "".join(words)


def _band(drawn: Chart, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """A closed path between least and greatest, for each stretch without NaN."""
    upper = [place(drawn, a, b) for a, b in zip(x, high)]
    lower = [place(drawn, a, b) for a, b in zip(x, low)]
    words, begin = [], 0
    for i in range(len(upper) + 1):
        if i < len(upper) and upper[i] is not None and lower[i] is not None:
            continue
        if i > begin:
            words.append(path([*upper[begin:i], *reversed(lower[begin:i])]) + "Z")
        begin = i + 1
    return "".join(words)


def _digits(value: float) -> float | None:
    """A number short enough for a page; None for NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
