"""Curves over steps or time, and axes with ticks at round numbers.

A curve is thinned so that a million points fit a page: where several fall together, the line is their mean and a band
shows the least and the greatest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.reports.html.words import duration, metric, short

WIDE = 40.0
"""Greatest over least value from which on an axis of positive values is logarithmic."""


@dataclass(frozen=True)
class Axis:
    """``low`` and ``high`` at 0 and 100 percent; ``ticks``: (percent, words). ``log``: powers of ten are alike far."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Percent of the side at which ``value`` lies; NaN for NaN."""
        if self.log:
            if not value > 0:
                return math.nan
            return 100.0 * (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return 100.0 * (value - self.low) / (self.high - self.low)


def linear(low: float, high: float, zero: bool = False, about: int = 4,
           words: Callable[[float], str] = short) -> Axis:
    """Return an axis that holds ``low`` to ``high``, ending at ticks; ``zero``: it begins at 0."""
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    low = min(0.0, low) if zero else low
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        low, high = (min(0.0, low), high or 1.0) if zero or low >= 0 else (low - abs(low), high + abs(high))
        low, high = (low, low + 1.0) if high <= low else (low, high)
    step = round_step((high - low) / about)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    count = round((high - low) / step)
    ticks = tuple((100.0 * i / count, words(_clean(low + i * step, step))) for i in range(count + 1))
    return Axis(low, high, ticks)


def along(low: float, high: float, about: int = 5, words: Callable[[float], str] = short) -> Axis:
    """Return an axis from exactly ``low`` to exactly ``high``, ticks at round numbers between."""
    if not high > low:
        low, high = low - 0.5, low + 0.5
    step = round_step((high - low) / about)
    first = math.ceil(low / step - 1e-9)
    values = [_clean(i * step, step) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, tuple((100.0 * (value - low) / (high - low), words(value)) for value in values))


def logarithmic(low: float, high: float) -> Axis:
    """Return a logarithmic axis; ticks at 1, 2 and 5 times powers of ten, or fewer where there are many."""
    low, high = low / 1.1, high * 1.1
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    wide = last - first
    factors: Sequence[int] = (1, 2, 5) if wide <= 2 else (1, 3) if wide <= 3 else (1,)
    every = max(1, wide // 5)
    values = [factor * 10.0 ** power for power in range(first, last + 1) if power % every == 0 for factor in factors]
    axis = Axis(low, high, (), True)
    return Axis(low, high, tuple((axis.at(v), short(v)) for v in values if low <= v <= high), True)


def fitting(low: float, high: float, zero: bool) -> Axis:
    """Return the axis for a curve's values: from 0 with ``zero``, logarithmic where they are positive and far apart."""
    if not zero and low > 0 and high > WIDE * low:
        return logarithmic(low, high)
    return linear(low, high, zero)


def round_step(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten, the next above ``size``."""
    if not size > 0 or not math.isfinite(size):
        return 1.0
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))


def time_step(size_s: float) -> float:
    """Return the round number of seconds, minutes, hours or days next above ``size_s``."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    if size_s < 1:
        return round_step(size_s)
    return float(next((step for step in steps if step >= size_s), 86400 * round_step(size_s / 86400)))


def steps_in_short(value: float) -> str:
    """Say a step's number on an axis: "800", "12k", "1.5M"."""
    for unit, words in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= (unit if unit > 1e3 else 1e4):
            return f"{value / unit:.4g}{words}"
    return f"{value:,g}"


def clock_words(seconds: float) -> str:
    """Say a time since the begin on an axis: "0", "90 s", "5 min", "1.5 h", "2 d"."""
    for unit, words in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= (2 * unit if unit == 60.0 else unit):
            return f"{seconds / unit:.3g} {words}"
    return "0" if not seconds else f"{seconds:g} s" if seconds >= 1 else duration(seconds)


def _clean(value: float, step: float) -> float:
    """Return a multiple of ``step`` without the rounding of its sum."""
    return round(value, max(0, 2 - math.floor(math.log10(step))))


MOST = 240
"""Points of a line."""


@dataclass(frozen=True)
class Series:
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


def chart(title: str, unit: str, lines: Sequence[Series], *, zero: bool = False,
          marks: Sequence[tuple[float, str]] = (),
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
            series.append({"n": line.name, "c": line.color, "x": [_digits(v) for v in x],
                           "y": [_digits(v) for v in mean]})
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


def _draw(drawn: Chart, line: Series, x: np.ndarray, mean: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
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
    """Return a closed path between least and greatest, for each stretch without NaN."""
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
    return float(f"{value:.5g}") if math.isfinite(value) else None
