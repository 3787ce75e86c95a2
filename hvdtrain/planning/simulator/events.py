"""Play the events of a step on all ranks at once, and of a job with saves and failures. Pure.

Events are "rank r has bucket k ready" and "bucket k has arrived". A bucket starts when its last rank is ready and the
bucket before it has left the links, so the order of events is known, and each is one vector operation over ranks.
A queue of events (heapq) took 1.07 s for one step of 4,096 ranks and 100 buckets, these vectors 0.02 s for 32 steps;
simpy, which adds a generator to each event, is therefore not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from hvdtrain.planning.linear import LinearTime, Link
from hvdtrain.planning.pipeline.orders import order_of, play
from hvdtrain.planning.simulator.scene import (
    FLAT,
    HIERARCHICAL,
    NO_LINK,
    NONE,
    RING,
    Exchange,
    Failures,
    Host,
    Rank,
    Saves,
    Scene,
)

MOST_DRAWS, LEAST_DRAWS, NUMBERS = 256, 16, 1 << 17
"""Steps that are drawn where computing times vary: fewer of many ranks, so that memory stays bounded."""

Seconds = TypeVar("Seconds", float, np.ndarray)

PARTS = ("compute", "input", "exchange", "wait", "update", "saves", "restarts")
"""Where a mean step of a mean rank goes. ``wait``: for slower ranks, and for other stages."""


@dataclass(frozen=True)
class StepForecast:
    """Seconds of a step as an interval, and of its middle by `PARTS`.

    ``efficiency``: throughput per sum of the ranks' single-rank throughputs. ``sent_bytes``: of all ranks together,
    within hosts and between them.
    """

    low_s: float
    mid_s: float
    high_s: float
    parts: Mapping[str, float]
    samples_per_s: float
    efficiency: float
    sent_bytes: tuple[float, float]


@dataclass(frozen=True)
class JobForecast:
    """Hours of a job as an interval; ``failures``: expected number; ``efficiency``: as of a step, with saves and
    restarts.
    """

    low_hours: float
    mid_hours: float
    high_hours: float
    efficiency: float
    failures: float
    saves: float
    step: StepForecast


@dataclass(frozen=True)
class _Work:
    """Seconds of each rank, or in each draw of each rank: float64[K, P]."""

    own: np.ndarray
    compute: np.ndarray
    last: np.ndarray
    """Seconds before the end in which the last micro-batch, whose gradients are exchanged, computes."""


def step(scene: Scene) -> StepForecast:
    """Return the forecast of a step in the middle of a run."""
    return _of(scene, None)


def job(scene: Scene, steps: int) -> JobForecast:
    """Return the forecast of ``steps`` steps."""
    assert steps > 0
    found = _of(scene, steps)
    mid_s = steps * found.mid_s
    saves = scene.saves
    count = 0.0
    if saves is not None:
        count = steps / saves.every_steps if saves.every_steps else mid_s / saves.every_s if saves.every_s else 0.0
    failures = mid_s / _mtbf_s(scene) if scene.failures else 0.0
    low, mid, high = (steps * s / 3600 for s in (found.low_s, found.mid_s, found.high_s))
    return JobForecast(low, mid, high, found.efficiency, failures, count, found)


def _of(scene: Scene, steps: int | None) -> StepForecast:
    assert scene.ranks, "a scene without ranks"
    work = _work(scene)
    end = work.own.max(axis=1)
    exchange_s, sent = _exchanged(scene, work)
    update = np.array([rank.update_s for rank in scene.ranks])
    loads = np.array([rank.load_s for rank in scene.ranks])
    whole = np.maximum(end + exchange_s, loads.max())
    mean_s = float(whole.mean())
    parts = dict.fromkeys(PARTS, 0.0)
    parts["compute"] = float(work.compute.mean())
    parts["update"] = float(update.mean())
    parts["exchange"] = float(exchange_s.mean())
    parts["input"] = float(np.mean([rank.input_s for rank in scene.ranks]) + (whole - end - exchange_s).mean())
    parts["wait"] = mean_s - sum(parts.values())
    parts["saves"] = _saving_s(scene.saves, mean_s)
    parts["restarts"] = _restarting_s(scene, mean_s, parts["saves"], steps)
    mid_s = sum(parts.values())
    alone = sum(rank.samples / _alone_s(rank) for rank in scene.ranks if rank.samples) if not scene.stages else 0.0
    if scene.stages:  # devices that would compute without pause
        busy_s = sum(sum(s.forward_s) + sum(s.backward_s) for s in scene.stages for _ in range(s.micros))
        alone = scene.samples * len(scene.ranks) / busy_s if busy_s > 0 else 0.0
    rate = (scene.samples / mid_s if mid_s > 0 else math.inf) if scene.samples else 0.0
    return StepForecast(mid_s * max(0.0, 1 - scene.error), mid_s, mid_s * (1 + scene.error), parts, rate,
                        rate / alone if alone > 0 else 0.0, sent)


def _alone_s(rank: Rank) -> float:
    return rank.line.seconds(rank.samples, rank.parts) + rank.update_s + rank.input_s


def _work(scene: Scene) -> _Work:
    """Return the ranks' own seconds up to the end of backward, from the end of the exchange before."""
    ranks = scene.ranks
    compute = np.array([r.line.seconds(r.samples, r.parts) + (r.parts - 1) * r.accumulate_s if r.parts else 0.0
                        for r in ranks])
    last = compute / np.array([max(1, r.parts) for r in ranks])
    before = np.array([r.update_s + r.input_s for r in ranks])
    played = compute
    if scene.stages:
        compute, played, last = np.zeros(len(ranks)), np.zeros(len(ranks)), np.zeros(len(ranks))
        for stages in scene.stages:
            found = _played(stages.order, stages.micros, stages.chunks, stages.forward_s, stages.backward_s,
                            stages.travel_s)
            ranks_S = list(stages.ranks)
            played[ranks_S], compute[ranks_S] = found[0], found[1]
    factors = _factors(ranks)
    compute, played, last = compute * factors, played * factors, last * factors
    own = before + played
    for number, host in enumerate(scene.hosts):
        here = np.array([r for r, rank in enumerate(ranks) if rank.host == number])
        if host.cores and len(here) and sum(ranks[r].threads for r in here) > host.cores:
            shared = shared_cores(own[:, here], host.cores / max(ranks[r].threads for r in here))
            slower = shared / np.maximum(own[:, here], 1e-12)
            own[:, here], compute[:, here], last[:, here] = shared, compute[:, here] * slower, last[:, here] * slower
    return _Work(own, compute, last)


def _factors(ranks: tuple[Rank, ...]) -> np.ndarray:
    """Return relative computing times of some steps, float64[K, P]: observed, else drawn with mean 1, always alike."""
    if all(rank.factors for rank in ranks):
        return np.array([rank.factors for rank in ranks]).T
    spread = np.array([rank.spread for rank in ranks])
    if not spread.any():
        return np.ones((1, len(ranks)))
    draws = max(LEAST_DRAWS, min(MOST_DRAWS, NUMBERS // len(ranks)))
    sigma = np.sqrt(np.log1p(spread ** 2))
    normal = np.random.default_rng(0).standard_normal((draws, len(ranks)))
    return np.exp(sigma * normal - sigma ** 2 / 2)


def shared_cores(work: np.ndarray, at_once: float) -> np.ndarray:
    """Return when each of the ranks of a host ends ``work`` (K, L), of which ``at_once`` run at full speed.

    All that have work left get the same share of the cores, so the others speed up when one ends.
    """
    order = np.argsort(work, axis=1)
    sorted_work = np.take_along_axis(work, order, axis=1)
    left = np.arange(work.shape[1], 0, -1)
    each = np.diff(sorted_work, axis=1, prepend=0.0) * np.maximum(1.0, left / at_once)
    ends = np.empty_like(work)
    np.put_along_axis(ends, order, np.cumsum(each, axis=1), axis=1)
    return ends


def unshared_cores(ends: np.ndarray, at_once: float) -> np.ndarray:
    """Return the work that ends at ``ends`` (K, L) by `shared_cores`."""
    order = np.argsort(ends, axis=1)
    left = np.arange(ends.shape[1], 0, -1)
    each = np.diff(np.take_along_axis(ends, order, axis=1), axis=1, prepend=0.0) / np.maximum(1.0, left / at_once)
    work = np.empty_like(ends)
    np.put_along_axis(work, order, np.cumsum(each, axis=1), axis=1)
    return work


@cache
def _played(order: str, micros: int, chunks: int, forward_s: tuple[float, ...], backward_s: tuple[float, ...],
            travel_s: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    depth = len(forward_s) // chunks
    found = play([order_of(order)(place, depth, chunks, micros) for place in range(depth)], forward_s, backward_s,
                 travel_s)
    return found.step_s, found.busy_s


def _exchanged(scene: Scene, work: _Work) -> tuple[np.ndarray, tuple[float, float]]:
    """Return (seconds of each draw that the exchange adds to the slowest rank, bytes sent within and between hosts)."""
    exchange = scene.exchange
    end = work.own.max(axis=1)
    groups = _groups(scene)
    if exchange.transport == NONE or all(len(group) < 2 for group, _ in groups):
        return np.full_like(end, exchange.agreement_s), (0.0, 0.0)
    free, busy_s = np.zeros_like(end), 0.0
    seconds = BucketSeconds(scene, groups)
    total = sum(exchange.bucket_bytes) or 1
    halves = 0.5 if exchange.zero else 1.0
    arrived, portion = 0, -math.inf
    hidden = work.last * exchange.backward
    for number, nbytes in enumerate(exchange.bucket_bytes):
        arrived += nbytes
        portion = max(portion, exchange.ready[number] if exchange.ready else (  # those before it leave first
            exchange.late + (1 - exchange.late) * arrived / total))
        ready = (work.own - hidden * (1 - portion)).max(axis=1) if exchange.overlaps else end
        encoded_s = exchange.codec_s / 2 * (arrived / total if exchange.overlaps else 1.0)
        took_s = seconds.of(nbytes * exchange.ratio * halves)
        free, busy_s = np.maximum(free, ready + encoded_s) + took_s, busy_s + took_s
    shown = np.maximum(free - end, 0.0)
    # Where a transport has no core of its own, computing waits for what it does meanwhile.
    shown += delayed_s(np.maximum(busy_s - shown, 0.0), exchange.busy_cores, _short_of_cores(scene))
    if exchange.zero:
        shown += exchange.copy_s + seconds.of((exchange.gather_bytes or total) / 2)
    shown += max(rank.parts for rank in scene.ranks) * sum(seconds.of(nbytes) for nbytes in exchange.layer_bytes)
    return (shown + exchange.codec_s / 2 + exchange.later_s + exchange.agreement_s,
            (seconds.within_bytes, seconds.between_bytes))


def delayed_s(hidden_s: Seconds, busy_cores: float, short: float) -> Seconds:
    """Return the seconds by which computing ends later because of an exchange of ``hidden_s`` meanwhile.

    ``busy_cores``: that the exchange takes; ``short``: `short_of_cores`.
    """
    return hidden_s * (busy_cores * short)


def short_of_cores(hosts: Sequence[tuple[int, float]], threads: float) -> float:
    """Return the fraction of a core that a transport's thread lacks where cores are shortest.

    ``hosts``: (ranks, cores) of each; ``threads``: compute threads of a rank.
    """
    return max(min(1.0, max(0.0, 1.0 - (cores / ranks - threads))) for ranks, cores in hosts)


def _short_of_cores(scene: Scene) -> float:
    """Return the fraction of a core that a rank's transport lacks, on the host where cores are shortest."""
    lacks = [0.0]
    for number, host in enumerate(scene.hosts):
        threads = [rank.threads for rank in scene.ranks if rank.host == number]
        if host.cores and threads:
            lacks.append(short_of_cores([(len(threads), host.cores)], sum(threads) / len(threads)))
    return max(lacks)


def _groups(scene: Scene) -> list[tuple[list[int], float]]:
    """Return the ranks that sum the same gradients, and the fraction of the model that these are."""
    if not scene.stages:
        return [(list(range(len(scene.ranks))), 1.0)]
    depth = len(scene.stages[0].ranks)
    shares = scene.stages[0].shares or (1 / depth,) * depth
    return [([stages.ranks[place] for stages in scene.stages], shares[place]) for place in range(depth)]


class BucketSeconds:
    """Seconds of one all-reduce by bytes, and the bytes sent so far; the links of a host are shared by its ranks."""

    def __init__(self, scene: Scene, groups: list[tuple[list[int], float]]) -> None:
        self._exchange = scene.exchange
        hosts = 1 + max(rank.host for rank in scene.ranks)
        own = [scene.hosts[h].between if h < len(scene.hosts) else None for h in range(hosts)]
        self._between = [link or scene.exchange.between for link in own]
        self._beta = np.array([link.beta_s_per_byte for link in self._between])
        self._slow = np.zeros(hosts)
        np.maximum.at(self._slow, [rank.host for rank in scene.ranks], [rank.slow for rank in scene.ranks])
        on_host = np.bincount([rank.host for rank in scene.ranks], minlength=hosts)
        for number, host in enumerate(scene.hosts[:hosts]):
            self._slow[number] *= max(1.0, on_host[number] / host.cores) if host.cores else 1.0
        self._per_byte, self._own_per_byte = np.zeros((2, hosts)), np.zeros(hosts)
        self._steps = [0, 0]
        for group, share in groups:
            per_host = np.bincount([scene.ranks[r].host for r in group], minlength=hosts).astype(float)
            sent = share * _sent(scene.exchange.transport, per_host)
            self._per_byte += sent
            senders = np.maximum(1.0, per_host - (scene.exchange.transport == RING and sent[1].any()))
            self._own_per_byte = np.maximum(self._own_per_byte, sent[0] / senders)
            used, most = int((per_host > 0).sum()), int(per_host.max())
            flat = scene.exchange.transport != HIERARCHICAL
            near = most - 1
            far = (len(group) - 1 if flat else used - 1) if used > 1 else 0
            self._steps = [max(self._steps[0], near), max(self._steps[1], far)]
        self.within_bytes = self.between_bytes = 0.0

    def of(self, nbytes: float) -> float:
        """Return the seconds of a bucket of ``nbytes`` on each rank."""
        within, between = self._per_byte * nbytes
        self.within_bytes += float(within.sum())
        self.between_bytes += float(between.sum())
        near, far = self._steps
        inside = self._exchange.within
        inside_s = float((self._slow * (within > 0)).max()) * near * inside.alpha_s
        inside_s += float((self._slow * self._own_per_byte).max()) * nbytes * inside.beta_s_per_byte
        alpha_s = max(link.alpha_s for link in self._between) if far else 0.0
        outside_s = far * alpha_s + float((between * self._beta).max())
        return max(inside_s, outside_s) if self._exchange.transport == FLAT else inside_s + outside_s


def _sent(transport: str, per_host: np.ndarray) -> np.ndarray:
    """Return the bytes that the ranks of each host send (within, out of it) for each byte of a sum; float64[2, H].

    All algorithms send 2 (P - 1) vectors in all. mpi: 2/P of it from each rank to each other. horovod: 2 (P - 1) / P
    from each rank to the next, in a ring through one host after the other. shared: 2 (L - 1) within a host of L ranks,
    and each of H hosts 2 (H - 1) / H to others.
    """
    size, used = float(per_host.sum()), float((per_host > 0).sum())
    if transport == FLAT:
        return np.array([2 * per_host * np.maximum(per_host - 1, 0) / size, 2 * per_host * (size - per_host) / size])
    if transport == HIERARCHICAL:
        return np.array([2 * np.maximum(per_host - 1, 0), (per_host > 0) * 2 * (used - 1) / used])
    each = 2 * (size - 1) / size
    if used == 1:
        return np.array([each * per_host, np.zeros_like(per_host)])
    return np.array([each * np.maximum(per_host - 1, 0), each * (per_host > 0)])


def _saving_s(saves: Saves | None, step_s: float) -> float:
    """Return the seconds that saves add to a mean step."""
    if saves is None:
        return 0.0
    if saves.every_steps:
        return saves.blocks_s / saves.every_steps
    return saves.blocks_s * step_s / saves.every_s if saves.every_s else 0.0


def _mtbf_s(scene: Scene) -> float:
    assert scene.failures is not None and scene.failures.mtbf_s > 0
    return scene.failures.mtbf_s / len({rank.host for rank in scene.ranks})


def _restarting_s(scene: Scene, step_s: float, saving_s: float, steps: int | None) -> float:
    """Return the seconds that failures add to a mean step.

    Without ``lost_s`` a failure costs the restart and all since the latest save: with work tau between saves of
    delta seconds, restart R and mean time M between failures of any host a job takes
    M exp(R / M) (exp((tau + delta) / M) - 1) / tau of its failure-free time (Daly 2006).
    """
    failures = scene.failures
    if failures is None:
        return 0.0
    mtbf_s = _mtbf_s(scene)
    if failures.lost_s is not None:
        share = (failures.restart_s + failures.lost_s) / mtbf_s
        return (step_s + saving_s) * share / (1 - share) if share < 1 else math.inf
    between_s = _between_saves_s(scene.saves, failures, step_s, steps)
    if between_s is None:
        return (step_s + saving_s) * failures.restart_s / mtbf_s
    paid_s = between_s * (1 + saving_s / step_s)
    if (failures.restart_s + paid_s) / mtbf_s > 700:  # beyond the range of exp: it never ends
        return math.inf
    whole_s = mtbf_s * math.exp(failures.restart_s / mtbf_s) * math.expm1(paid_s / mtbf_s)
    return max(0.0, step_s * whole_s / between_s - step_s - saving_s)


def _between_saves_s(saves: Saves | None, failures: Failures, step_s: float, steps: int | None) -> float | None:
    """Return the seconds of training between two saves; None: unknown, since there are none in a run of no length."""
    if saves is not None and (saves.every_steps or saves.every_s):
        return saves.every_steps * step_s if saves.every_steps else saves.every_s
    return None if steps is None else steps * step_s


def host_links(transport: str, hosts_P: Sequence[int], link: Link, hosts: tuple[Host, ...] = (),
               slow_P: Sequence[float] = ()) -> tuple[Link, Link]:
    """Return `Exchange.within` and `Exchange.between` of a ``link`` that was measured on ranks of these hosts.

    ``link``: seconds of one sum by bytes of gradients, as `hvdtrain.comm.transport_sweep` returns; all of it is counted
    as the links between hosts where there are several. ``hosts``, ``slow_P``: as in the scene that gets the links.
    """
    slow_P = slow_P or [1.0] * len(hosts_P)
    ranks = tuple(Rank(host, LinearTime(0.0, 1.0), 0, slow=slow) for host, slow in zip(hosts_P, slow_P))
    several = len(set(hosts_P)) > 1
    unit, start = Link(0.0, 1.0), Link(1.0, 0.0)

    def seconds(measure: Link) -> float:
        exchange = Exchange(transport, (1,), NO_LINK if several else measure, measure if several else NO_LINK)
        return BucketSeconds(Scene(ranks, exchange, hosts=hosts), [(list(range(len(ranks))), 1.0)]).of(1)

    found = Link(link.alpha_s / max(seconds(start), 1e-30), link.beta_s_per_byte / max(seconds(unit), 1e-30))
    return (NO_LINK, found) if several else (found, NO_LINK)
