"""Numbers as people read them: durations, counts, bytes, percent, times of day. Pure."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.core.errors import count as count  # noqa: F401  (for the report's sections)
from hvdtrain.core.units import format_bytes

NOT_KNOWN = "not known"


def number(value: Any) -> float:
    """Return ``value`` as a float; NaN for what is no finite number, so that no odd log ends a page."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def whole(value: Any, default: int = -1) -> int:
    """Return ``value`` as an int; ``default`` for what is no finite number."""
    found = number(value)
    return int(found) if math.isfinite(found) else default


def duration(seconds: float) -> str:
    """Say how long something took.

    >>> [duration(s) for s in (0.00042, 0.085, 4.25, 75, 3720, 200000)]
    ['0.42 ms', '85 ms', '4.2 s', '1 min 15 s', '1 h 02 min', '2 d 07 h']
    """
    if not math.isfinite(seconds):
        return NOT_KNOWN
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.9995:
        return f"{short(1e3 * seconds)} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    left = round(seconds)
    if left < 60:
        return f"{left} s"
    if left < 3600:
        return f"{left // 60} min {left % 60:02d} s"
    if left < 86400:
        return f"{left // 3600} h {left % 3600 // 60:02d} min"
    return f"{left // 86400} d {left % 86400 // 3600:02d} h"


def short(value: float) -> str:
    """Say a number with about three digits.

    >>> [short(x) for x in (0, 0.0301, 2.5, 1234.4, 0.00001, 31400000, float("nan"))]
    ['0', '0.0301', '2.5', '1,234', '1e-05', '3.14e+07', 'not known']
    """
    if not math.isfinite(value):
        return NOT_KNOWN if math.isnan(value) else str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}"


def metric(value: float) -> str:
    """Say a loss or a metric with four digits, as the summary does."""
    return f"{value:.4g}" if math.isfinite(value) else NOT_KNOWN


def times(n: int) -> str:
    """Say how often: "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(n, f"{n:,} times")


def percent(part: float, places: int = 0) -> str:
    """Say a percentage; "under 1 %" for what is there but rounds to nothing."""
    if not math.isfinite(part):
        return NOT_KNOWN
    least = 10.0 ** -places
    return f"under {least:g} %" if 0 < part < least / 2 else f"{part:.{places}f} %"


def size(n_bytes: float) -> str:
    """Say how many bytes."""
    return format_bytes(n_bytes) if math.isfinite(n_bytes) else NOT_KNOWN


def listed(parts: Sequence[str]) -> str:
    """Join as prose: "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def begin(text: str) -> str:
    """Return ``text`` as the begin of a sentence."""
    return text[:1].upper() + text[1:]


def moment(unix_s: float) -> str:
    """Say a time of day in UTC, "23 Nov 2026, 04:10:33 UTC"."""
    try:
        return f"{datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc):%-d %b %Y, %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return NOT_KNOWN


def time_of_day(unix_s: float) -> str:
    """Say a time of day alone, "04:10:33 UTC"."""
    return moment(unix_s).rsplit(", ", 1)[-1]


def cut(text: str, most: int = 400) -> str:
    """Return at most ``most`` characters of ``text`` in one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else line[:most - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def clock(seconds: float) -> str:
    """Say a time since the begin as "h:mm:ss".

    >>> clock(75), clock(90061)
    ('0:01:15', '25:01:01')
    """
    if not math.isfinite(seconds):
        return ""
    left = max(0, round(seconds))
    return f"{left // 3600}:{left % 3600 // 60:02d}:{left % 60:02d}"
