"""Costs that grow linearly: seconds of a micro-batch by samples, and of a message by bytes; fits to measurements. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SHORTEST_S = 1e-9
"""Least duration that counts: a clock may show 0."""

LEAST_SLOPE = 0.01
"""A sample costs at least this part of what the fastest measured micro-batch took per sample: a device that small
batches leave idle shows no cost per sample at all, and a plan needs one that is above 0."""


@dataclass(frozen=True)
class LinearTime:
    """Seconds of one micro-batch of b samples, forward and backward: ``t(b) = a_s + c_s * b``; a >= 0, c > 0."""

    a_s: float
    c_s: float

    def seconds(self, samples: int, parts: int) -> float:
        """Return the seconds of ``samples`` in ``parts`` micro-batches; ``parts`` without samples cost ``a_s`` each."""
        return parts * self.a_s + self.c_s * samples

    def scaled(self, factor: float) -> LinearTime:
        """Return the line of a device that takes ``factor`` times as long."""
        assert factor > 0
        return LinearTime(self.a_s * factor, self.c_s * factor)

    def describe(self) -> str:
        """Return text such as "3.1 ms + 0.52 ms a sample"."""
        return f"{1e3 * self.a_s:.3g} ms + {1e3 * self.c_s:.3g} ms a sample"


def with_adding(line: LinearTime, samples: int, few: tuple[int, float], many: tuple[int, float]
                ) -> tuple[LinearTime, float]:
    """Return ``line`` scaled to two measured steps, and the seconds of adding the gradients of a further micro-batch.

    ``few``, ``many``: (micro-batches, seconds) of a step of ``samples`` samples.
    """
    (n, few_s), (more, many_s) = few, many
    assert 1 <= n < more
    first_s, second_s = line.seconds(samples, n), line.seconds(samples, more)
    adding_s = max(0.0, (first_s * many_s - second_s * few_s) / (first_s * (more - 1) - second_s * (n - 1)))
    return line.scaled(max(LEAST_SLOPE, (few_s - (n - 1) * adding_s) / first_s)), adding_s


Line = LinearTime
"""The name in earlier releases, to which `hvdtrain.balance.line` leads."""


def fit_line(points: Sequence[tuple[float, float]], least_slope: float = 0.0) -> tuple[float, float]:
    """Return (a, b) of the line ``a + b x`` nearest to ``points`` (x, seconds), a >= 0 and b >= ``least_slope``.

    Least squares of the relative error ``(a + b x) / y - 1``, so that small measurements count as much as large ones.
    Outside these bounds the nearest line on a bound is returned: the problem is convex. Points of a single x give
    a = 0, unless x is 0.
    """
    assert points, "a fit of no points"
    scaled = [(1.0 / max(y, SHORTEST_S), x / max(y, SHORTEST_S)) for x, y in points]
    uu, uv, vv = sum(u * u for u, _ in scaled), sum(u * v for u, v in scaled), sum(v * v for _, v in scaled)
    u1, v1 = sum(u for u, _ in scaled), sum(v for _, v in scaled)
    det = uu * vv - uv * uv
    a, b = ((u1 * vv - v1 * uv) / det, (v1 * uu - u1 * uv) / det) if det > 1e-12 * uu * vv else (-1.0, 0.0)
    if a < 0 and vv > 0:
        return 0.0, v1 / vv
    return (a, b) if a >= 0 and b >= least_slope else (max((u1 - least_slope * uv) / uu, 0.0), least_slope)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> LinearTime:
    """Return the line of micro-batches of ``sizes`` samples that took ``seconds``, with c_s > 0; see `fit_line`."""
    assert len(sizes) == len(seconds) > 0 and min(sizes) >= 1, "a fit needs a time for each size of 1 or more"
    times_s = [max(float(t), SHORTEST_S) for t in seconds]
    return LinearTime(*fit_line(list(zip(sizes, times_s)), LEAST_SLOPE * min(t / b for b, t in zip(sizes, times_s))))


@dataclass(frozen=True)
class Speed:
    """Measured speed of one rank.

    ``ceiling``: largest micro-batch, 0 for no limit. ``sizes``, ``seconds``: what the line was fitted to.
    ``remembered``: it comes from an earlier run, confirmed in this one.
    """

    line: LinearTime
    ceiling: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    remembered: bool = False


def least(*limits: int) -> int:
    """Return the smallest of limits of which 0 is none."""
    return min((limit for limit in limits if limit > 0), default=0)


@dataclass(frozen=True)
class Link:
    """Seconds of one kind of call: ``alpha_s + wire_bytes * beta_s_per_byte`` (Hockney 1994).

    Bytes are those a rank hands to the transport, as in `hvdtrain.comm.collectives.lockstep.ring_bytes`.
    """

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, wire_bytes: float, calls: float = 1.0) -> float:
        """Return the seconds of ``calls`` calls, one after the other, with ``wire_bytes`` together."""
        return calls * self.alpha_s + wire_bytes * self.beta_s_per_byte

    def describe(self) -> str:
        """Return text such as "45 us + 112.4 MB/s"."""
        rate = f"{1e-6 / self.beta_s_per_byte:.1f} MB/s" if self.beta_s_per_byte > 0 else "no time per byte"
        return f"{1e6 * self.alpha_s:.0f} us + {rate}"


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind in the exchange of one step, on one rank.

    ``kind`` names the `Link`, such as "allreduce float32". ``later``: the requests need the answer to an earlier one.
    ``calls``: start-ups paid one after the other.
    """

    kind: str
    later: bool
    calls: float
    wire_bytes: float


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """Return the link nearest to measured (wire bytes, seconds); see `fit_line`. Start-up of a single size is 0."""
    return Link(*fit_line(points))


def wire_seconds(traffic: Iterable[Traffic], links: Mapping[str, Link]) -> tuple[float, float]:
    """Return (seconds of the requests that nothing precedes, seconds of those that need an answer first)."""
    first_s = later_s = 0.0
    for t in traffic:
        seconds = links[t.kind].seconds(t.wire_bytes, t.calls)
        if t.later:
            later_s += seconds
        else:
            first_s += seconds
    return first_s, later_s
