"""What a wire costs: a start-up time and a time per byte for each kind of call, fitted to measured points.

Owns the fit and the arithmetic on it; pure. Measures nothing: `hvdtrain.comm.measure.sweep` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SHORTEST_S = 1e-9
"""Least duration that counts: a clock may show 0."""


@dataclass(frozen=True)
class Link:
    """One kind of call takes ``alpha_s + wire_bytes * beta_s_per_byte`` seconds.

    Source: the postal or Hockney model (Hockney 1994); bytes are those a rank hands to the wire, as in
    `hvdtrain.comm.collectives.lockstep.ring_bytes`.
    """

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, wire_bytes: float, calls: float = 1.0) -> float:
        """Seconds of ``calls`` calls that hand ``wire_bytes`` to the wire together, one after the other."""
        return calls * self.alpha_s + wire_bytes * self.beta_s_per_byte

    def describe(self) -> str:
        """In words: "45 us + 112.4 MB/s"."""
        rate = f"{1e-6 / self.beta_s_per_byte:.1f} MB/s" if self.beta_s_per_byte > 0 else "no time per byte"
        return f"{1e6 * self.alpha_s:.0f} us + {rate}"


@dataclass(frozen=True)
class Traffic:
    """What one rank's exchange of one step asks of one kind of call.

    ``kind`` names the `Link`, such as "allreduce float32". ``later``: the requests need the answer to one before them,
    so they can begin only when that has come. ``calls``: start-ups that are paid one after the other.
    """

    kind: str
    later: bool
    calls: float
    wire_bytes: float


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """The link nearest to measured (wire bytes, seconds), neither part of it negative.

    Least squares of the relative error ``(alpha + beta x) / y - 1``, so that microseconds of small messages count as
    much as the seconds of large ones. Where the free solution has a negative part, that part is 0: the problem is
    convex, so its solution then lies on that border. Points of one size only say nothing of alpha: it is 0.
    """
    assert points, "a fit of no points"
    scaled = [(1.0 / max(y, SHORTEST_S), x / max(y, SHORTEST_S)) for x, y in points]
    uu, uv, vv = sum(u * u for u, _ in scaled), sum(u * v for u, v in scaled), sum(v * v for _, v in scaled)
    u1, v1 = sum(u for u, _ in scaled), sum(v for _, v in scaled)
    alone = [Link(u1 / uu, 0.0)] + ([Link(0.0, v1 / vv)] if vv > 0 else [])
    det = uu * vv - uv * uv
    if det <= 1e-12 * uu * vv:
        return alone[-1]
    alpha_s, beta = (u1 * vv - v1 * uv) / det, (v1 * uu - u1 * uv) / det
    if alpha_s >= 0 and beta >= 0:
        return Link(alpha_s, beta)
    return min(alone, key=lambda link: sum((link.alpha_s * u + link.beta_s_per_byte * v - 1.0) ** 2
                                           for u, v in scaled))


def wire_seconds(traffic: Iterable[Traffic], links: Mapping[str, Link]) -> tuple[float, float]:
    """(seconds of the requests that nothing precedes, seconds of those that need an answer first)."""
    first_s = later_s = 0.0
    for t in traffic:
        seconds = links[t.kind].seconds(t.wire_bytes, t.calls)
        if t.later:
            later_s += seconds
        else:
            first_s += seconds
    return first_s, later_s
