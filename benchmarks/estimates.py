"""Estimate a step of a pipeline over several hosts against replicas that sum their gradients. Pure.

Replicas send their gradients, as many bytes as the model has. A pipeline sends the outputs at its stage borders, as
many bytes as the batch has, and its ranks are idle while a step fills and empties the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.core.units import format_bytes, format_ms

PIPELINE, DATA_PARALLEL, EITHER = "pipeline", "data parallel", "either"


@dataclass(frozen=True)
class StepWork:
    """A step of ``ranks`` ranks of equal speed, each on a host of its own.

    ``compute_s``: seconds in which one rank alone computes the whole batch. ``slowest``: part of that which the slowest
    stage has. ``gradient_bytes``: of all parameters. ``cargo_bytes``: at one cut, of one of the ``micro_batches``, in
    one direction. ``link_bytes_s``: what a host's link carries a second in each direction.
    """

    ranks: int
    compute_s: float
    gradient_bytes: float
    cargo_bytes: float
    micro_batches: int
    link_bytes_s: float
    slowest: float = 0.0

    @property
    def sums_bytes(self) -> float:
        """Bytes that each host sends in a step to sum the gradients: a ring's 2 (p - 1) / p of them."""
        return 2 * (self.ranks - 1) / self.ranks * self.gradient_bytes

    @property
    def cut_bytes(self) -> float:
        """Bytes across one cut in a step, both ways."""
        return 2 * self.cargo_bytes * self.micro_batches


def data_parallel_s(work: StepWork) -> tuple[float, float]:
    """(least, most) seconds of a step of whole copies: sums hidden behind computing, or after it.

    >>> data_parallel_s(StepWork(2, 0.2, 40e6, 1e6, 8, 100e6))
    (0.4, 0.5)
    """
    own_s, wire_s = work.compute_s / work.ranks, work.sums_bytes / work.link_bytes_s
    return max(own_s, wire_s), own_s + wire_s


def pipeline_s(work: StepWork) -> float:
    """Seconds of a step of a pipeline in the order 1f1b.

    A micro-batch needs all stages' time and its way over the p - 1 cuts and back. The next one follows after the
    longest of three: the slowest stage's time, the busiest link's, and a p-th of that whole way, for no more than p
    micro-batches are on it.

    >>> round(pipeline_s(StepWork(2, 0.2, 40e6, 1e6, 8, 100e6)), 6)
    0.2025
    """
    through_s, cargo_s = work.compute_s / work.micro_batches, work.cargo_bytes / work.link_bytes_s
    way_s = through_s + 2 * (work.ranks - 1) * cargo_s
    crowded_s = cargo_s * (1 if work.ranks == 2 else 2)  # a stage in the middle sends forth and back
    slowest_s = through_s * max(work.slowest, 1 / work.ranks)
    return way_s + (work.micro_batches - 1) * max(slowest_s, crowded_s, way_s / work.ranks)


def which(work: StepWork) -> str:
    """Return what is the faster by these bounds: pipeline, data parallel, or either where they do not tell."""
    least_s, most_s = data_parallel_s(work)
    ours_s = pipeline_s(work)
    return PIPELINE if ours_s < least_s else DATA_PARALLEL if ours_s > most_s else EITHER


def sentence(work: StepWork) -> str:
    """Say which of the two to take, and why, in one sentence."""
    least_s, most_s = data_parallel_s(work)
    take = {PIPELINE: "take the pipeline", DATA_PARALLEL: "take data parallelism",
            EITHER: "either: measure both"}[which(work)]
    return (f"{take}: about {format_ms(pipeline_s(work))} a step as a pipeline over {work.ranks} hosts, "
            f"{format_ms(least_s)} to {format_ms(most_s)} with replicas; at {work.link_bytes_s / 1e6:.0f} MB/s each "
            f"host sends {format_bytes(work.sums_bytes)} of gradients a step, or {format_bytes(work.cut_bytes)} "
            f"cross each boundary, and the pipeline stands idle for {100 * idle_share(work):.0f} %")


def idle_share(work: StepWork) -> float:
    """Part of the ranks' time in which a pipeline's stages do not compute."""
    return 1 - work.compute_s / (work.ranks * pipeline_s(work))
