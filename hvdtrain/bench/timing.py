"""From seconds measured to numbers told: the spread of repeats, and a number for a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def spread(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median, quartiles, smallest and largest of at least one sample, in the samples' own unit."""
    low, p25, median, p75, high = np.percentile(np.asarray(samples, np.float64), [0, 25, 50, 75, 100])
    return {"median": float(median), "p25": float(p25), "p75": float(p75), "min": float(low), "max": float(high)}


def shown(value: Any) -> str:
    """A number for a table: about four digits, never an exponent above one thousandth."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000 or value == 0:
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.4f}"
