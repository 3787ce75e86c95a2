"""How long a rank takes over b samples: a fixed cost and a cost per sample, fitted to measured points.

Owns the fit and the arithmetic on it; pure. Measures nothing: `hvdtrain.engine.balance_probe` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST_S = 1e-9
"""Least duration that counts: a clock may show 0."""

LEAST_SLOPE = 0.01
"""A sample costs at least this part of what the fastest measured micro-batch took per sample: a device that small
batches leave idle shows no cost per sample at all, and a plan needs one that is above 0."""


@dataclass(frozen=True)
class Line:
    """One micro-batch of b samples takes ``t(b) = a_s + c_s * b`` seconds, forward and backward; a >= 0, c > 0."""

    a_s: float
    c_s: float

    def seconds(self, samples: int, parts: int) -> float:
        """Seconds of ``samples`` in ``parts`` micro-batches; ``parts`` without samples cost ``a_s`` each."""
        return parts * self.a_s + self.c_s * samples

    def scaled(self, factor: float) -> Line:
        """The line of a device that takes ``factor`` times as long."""
        assert factor > 0
        return Line(self.a_s * factor, self.c_s * factor)

    def describe(self) -> str:
        """In words: "3.1 ms + 0.52 ms a sample"."""
        return f"{1e3 * self.a_s:.3g} ms + {1e3 * self.c_s:.3g} ms a sample"


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line nearest to micro-batches of ``sizes`` samples that took ``seconds``, with a_s >= 0 and c_s > 0.

    Least squares of the relative error ``(a + c b) / t - 1``, so that a small micro-batch counts as much as a large
    one. Where the free solution leaves those bounds, the nearest line on the bound is taken: the problem is convex.
    One size only says nothing of a fixed cost: it is 0.
    """
    assert len(sizes) == len(seconds) > 0 and min(sizes) >= 1, "a fit needs a time for each size of 1 or more"
    times_s = [max(float(t), SHORTEST_S) for t in seconds]
    us = [1.0 / t for t in times_s]
    vs = [b / t for b, t in zip(sizes, times_s)]
    uu, uv, vv = sum(u * u for u in us), sum(u * v for u, v in zip(us, vs)), sum(v * v for v in vs)
    u1, v1 = sum(us), sum(vs)
    through_zero = Line(0.0, v1 / vv)
    det = uu * vv - uv * uv
    if det <= 1e-12 * uu * vv:  # one size, or one time so short that its relative error is all that counts
        return through_zero
    a_s, c_s = (u1 * vv - v1 * uv) / det, (v1 * uu - u1 * uv) / det
    if a_s < 0:
        return through_zero
    least_s = LEAST_SLOPE * min(t / b for b, t in zip(sizes, times_s))
    if c_s >= least_s:
        return Line(a_s, c_s)
    return Line(max((u1 - least_s * uv) / uu, 0.0), least_s)


@dataclass(frozen=True)
class Speed:
    """What one rank found.

    ``line``: seconds of a micro-batch by its samples. ``ceiling``: largest micro-batch, 0 for no limit. ``sizes``,
    ``seconds``: what the line was fitted to. ``remembered``: it comes from an earlier run, confirmed in this one.
    """

    line: Line
    ceiling: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    remembered: bool = False


def least(*limits: int) -> int:
    """The smallest of limits of which 0 is none."""
    return min((limit for limit in limits if limit > 0), default=0)
