"""Axes: from values to percent of a figure's side, with ticks at round numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.reports.html.words import duration, short

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
    """An axis that holds ``low`` to ``high``, ending at ticks; ``zero``: it begins at 0."""
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
    """An axis from exactly ``low`` to exactly ``high``, ticks at round numbers between."""
    if not high > low:
        low, high = low - 0.5, low + 0.5
    step = round_step((high - low) / about)
    first = math.ceil(low / step - 1e-9)
    values = [_clean(i * step, step) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, tuple((100.0 * (value - low) / (high - low), words(value)) for value in values))


def logarithmic(low: float, high: float) -> Axis:
    """A logarithmic axis; ticks at 1, 2 and 5 times powers of ten, or fewer where there are many."""
    low, high = low / 1.1, high * 1.1
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    wide = last - first
    factors: Sequence[int] = (1, 2, 5) if wide <= 2 else (1, 3) if wide <= 3 else (1,)
    every = max(1, wide // 5)
    values = [factor * 10.0 ** power for power in range(first, last + 1) if power % every == 0 for factor in factors]
    axis = Axis(low, high, (), True)
    return Axis(low, high, tuple((axis.at(v), short(v)) for v in values if low <= v <= high), True)


def fitting(low: float, high: float, zero: bool) -> Axis:
    """The axis for a curve's values: from 0 where asked for, logarithmic where they are positive and far apart."""
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
    """A multiple of ``step`` without the rounding of its sum."""
    return round(value, max(0, 2 - math.floor(math.log10(step))))
