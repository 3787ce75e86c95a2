"""Describe what the simulator plays: ranks, hosts, exchange, pipeline stages, saves and failures. Pure data.

The simulation is left to `hvdtrain.planning.simulator.events`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hvdtrain.planning.linear import LinearTime, Link

FLAT, HIERARCHICAL, RING, NONE = "mpi", "shared", "horovod", "null"
"""Values of `collectives`: each rank sends to each; within hosts first; a ring over the ranks; no exchange."""

NO_LINK = Link(0.0, 0.0)

SAVES_COST, LEAST_SAVE_S, SAVE_DISTANCE = 0.03, 60.0, 1.5
"""Fraction of the time that saves may cost. Shortest interval where no time between failures is known: more often would
save too little. A save begins so many times as long after the last one as that took, so that it need not wait for it.
"""

BACKWARD = 2 / 3
"""Fraction of forward and backward that backward takes, where it was not measured: twice a forward's work."""


@dataclass(frozen=True)
class Rank:
    """Describe one rank's own work in a step.

    ``line``: seconds of a micro-batch, forward and backward, on cores of its own. ``samples`` in ``parts``
    micro-batches; ``accumulate_s``: of adding a micro-batch's gradients to those before. ``update_s``: optimizer.
    ``input_s``: seconds that a step waits for input. ``load_s``: seconds in which background workers prepare a step's
    input; no step is shorter. ``spread``: relative standard deviation of the computing time from step to step;
    ``factors``: instead of it, relative computing times that were observed in successive steps, as many for each rank.
    ``threads``: compute threads. ``slow``: factor on the seconds of ``within`` on its host, where sums are its
    processor's work.
    """

    host: int
    line: LinearTime
    samples: int
    parts: int = 1
    update_s: float = 0.0
    input_s: float = 0.0
    spread: float = 0.0
    load_s: float = 0.0
    threads: float = 1.0
    slow: float = 1.0
    factors: tuple[float, ...] = ()
    accumulate_s: float = 0.0


@dataclass(frozen=True)
class Host:
    """``cores``: that its ranks share, in computing and in sums; 0: as many as are used at once.

    ``between``: its own link to other hosts, if it differs from `Exchange.between`.
    """

    cores: float = 0.0
    between: Link | None = None


@dataclass(frozen=True)
class Exchange:
    """Gradient exchange of a step. ``transport``: mpi, shared, horovod or null.

    ``bucket_bytes``: gradients of the whole model, in the order in which buckets are sent. ``within``: seconds of one
    bucket by the bytes that each rank sends inside its host; ``between``: by those that all ranks of a host together
    send out of it. Their alpha is that of two ranks. ``overlaps``: buckets travel during backward. ``ready``: fraction
    of backward after which each bucket is complete; (): in proportion to bytes, once the fraction ``late`` of backward
    has passed. ``backward``: fraction of a micro-batch's time. ``codec_s``, ``ratio``: compressor's own seconds a step,
    and bytes sent per byte of gradients. ``later_s``: of its requests that need the answer to earlier ones. ``zero``:
    stage of ZeRO; ``gather_bytes``: updated parameters that it gathers, 0: as many as gradients; ``copy_s``: seconds of
    copying them, which the links add to. ``busy_cores``: cores that the transport of one rank keeps busy.
    ``agreement_s``: of each step's agreement about loss, stop and saves. ``layer_bytes``: of each sum that layers wait
    for within a micro-batch (sync_batchnorm).
    """

    transport: str
    bucket_bytes: tuple[int, ...]
    within: Link = NO_LINK
    between: Link = NO_LINK
    overlaps: bool = False
    codec_s: float = 0.0
    ratio: float = 1.0
    zero: int = 0
    busy_cores: float = 0.0
    ready: tuple[float, ...] = ()
    backward: float = BACKWARD
    gather_bytes: int = 0
    copy_s: float = 0.0
    later_s: float = 0.0
    agreement_s: float = 0.0
    layer_bytes: tuple[int, ...] = ()
    late: float = 0.0


@dataclass(frozen=True)
class Stages:
    """Describe one replica of a partitioned model. ``ranks``: at each place. ``order``, ``micros``, ``chunks``: as in
    `hvdtrain.planning.pipeline.orders`; seconds of each chunk's forward and backward of a micro-batch, and of a message
    from each chunk to the next. ``shares``: fraction of the gradients at each place; (): equal.
    """

    ranks: tuple[int, ...]
    order: str
    micros: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    travel_s: tuple[float, ...] = ()
    chunks: int = 1
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Saves:
    """Checkpoints: one each ``every_steps`` steps or ``every_s`` seconds blocks training for ``blocks_s``."""

    blocks_s: float
    every_steps: int = 0
    every_s: float = 0.0


def save_interval_s(cost_s: float, took_s: float, mtbf_s: float = 0.0) -> float:
    """Return the seconds from the begin of a save to the next one of ``checkpoint.every: auto``.

    ``cost_s``: cost of a save to the run, its training blocked and its threads' processor time. ``took_s``: time until
    it was on the disk. ``mtbf_s``: mean time between failures, 0 if unknown; with it the interval that loses least,
    sqrt(2 * cost * MTBF) (Young 1974, Daly 2006). Never so short that saves cost more than `SAVES_COST` of the time.
    """
    wanted_s = math.sqrt(2 * cost_s * mtbf_s) if mtbf_s else LEAST_SAVE_S
    return max(wanted_s, cost_s / SAVES_COST, SAVE_DISTANCE * took_s)


@dataclass(frozen=True)
class Failures:
    """``mtbf_s``: mean time between failures of one host. ``restart_s``: from a failure to training again.

    ``lost_s``: work that a failure loses; None: back to the latest save, or to the start.
    """

    mtbf_s: float
    restart_s: float
    lost_s: float | None = None


@dataclass(frozen=True)
class Scene:
    """``stages``: replicas of a partitioned model, none where each rank holds it whole. ``hosts``: by number; those
    beyond the end have the defaults. ``error``: relative, of the calibration; gives the interval.
    """

    ranks: tuple[Rank, ...]
    exchange: Exchange
    stages: tuple[Stages, ...] = ()
    saves: Saves | None = None
    failures: Failures | None = None
    error: float = 0.0
    hosts: tuple[Host, ...] = field(default=())

    @property
    def samples(self) -> int:
        """Return the samples of a step."""
        return sum(rank.samples for rank in self.ranks)
