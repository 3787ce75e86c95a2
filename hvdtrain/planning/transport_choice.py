"""Choice of the transport by ``collectives: auto``: candidates, estimates, decision and its reason. Pure.

For a step's gradients of N bytes::

    wire_s = alpha + beta N             of sums of at most 8 MiB in pieces of 2 MiB, beyond those at their rate
    busy_s = busy_cores wire_s          processor seconds of a rank in them
    cost_s = wire_s + delayed_s         the simulator's delay of computing, if all of wire_s is hidden

cost_s is the most that a step pays for its transport: a step waits for what of wire_s backward does not hide, and with
few cores computes later by what the transport has taken of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.core.terminal import as_text
from hvdtrain.core.units import format_bytes, format_ms
from hvdtrain.planning.linear import Link
from hvdtrain.planning.simulator import delayed_s

HEADERS = ("", "transport", "MB/s", "transport ms", "cpu ms", "cost ms", "idle cpu")

TIE = 0.05
"""Costs this near to the least count as equal; of those the transport that takes the least processor time is taken."""

OFF = 0.25
"""A wait this much longer than estimated is looked into."""

NEAR = 0.15
"""Costs this near to each other are within what a sweep of two seconds may be wrong by."""

LEAST_UPDATES = 50
"""A run of fewer updates takes what the rule says: measuring and checking would be much of it."""

CHANGED = 2.0
"""A wait so many times as long, or as short, as the one that the choice was settled with is another link's."""

SEEN = 0.05
"""A wait counts as another one only if it differs by this part of a step: what is hidden may be any multiple of next to
nothing."""

WHAT = {"shared": "sums within each host first, in shared memory "
                  "(hierarchical)", "mpi": "plain MPI from rank to rank (flat)",
        "horovod": "Horovod's operations", "null": "nothing"}
"""Descriptions of transports."""


@dataclass(frozen=True)
class TransportJob:
    """Conditions of the candidates. ``hosts``: number of ranks of each; of CPUs that MPI connects.

    ``no_shared``, ``no_horovod``: why the transport is missing, or ""; ``rationed``: text about a rank with a processor
    quota; ``waits_within``: layers exchange within a step (sync_batchnorm).
    """

    hosts: tuple[int, ...]
    no_shared: str = ""
    no_horovod: str = ""
    rationed: str = ""
    waits_within: bool = False


def candidates(job: TransportJob) -> tuple[list[str], dict[str, str]]:
    """Return (names of the transports to choose from, that of the rule first; why the others are left out)."""
    found, left_out = [], {}
    if job.no_shared:
        left_out["shared"] = job.no_shared
    elif max(job.hosts) > 1:
        found.append("shared")
    else:
        left_out["shared"] = "no host has several ranks: it would be mpi"
    if len(job.hosts) == 1 and found:
        return found, {name: "all ranks share one memory" for name in ("mpi", "horovod")}
    found.append("mpi")
    if job.no_horovod:
        left_out["horovod"] = job.no_horovod
    elif job.rationed:
        left_out["horovod"] = f"{job.rationed}, which its thread would use up while it waits"
    elif job.waits_within:
        left_out["horovod"] = "sync_batchnorm layers wait for the current transport within a step"
    else:
        found.append("horovod")
    return found, left_out


def rationed(quotas: Sequence[tuple[str, float, int]]) -> str:
    """Return text about the first rank whose quota is below its cores, or ""; ``quotas``: by rank (node, quota, cores).
    """
    for rank, (node, quota, cores) in enumerate(quotas):
        if quota < cores:
            return f"a quota gives rank {rank} on {node} {quota:.3g} of {cores} cores"
    return ""


@dataclass(frozen=True)
class MeasuredTransport:
    """A transport as the slowest rank found it. ``link``: seconds by bytes of gradients.

    ``busy_cores``: cores that it keeps busy meanwhile; ``idle_cores``: without traffic; ``most_bytes``: of one sum
    measured.
    """

    name: str
    link: Link
    busy_cores: float
    idle_cores: float = 0.0
    most_bytes: int = 0


@dataclass(frozen=True)
class TransportCost:
    """Estimate of one transport for a step's gradients; ``rate_Bps``: bytes of gradients a second, without start-up."""

    name: str
    wire_s: float
    busy_s: float
    cost_s: float
    idle_cores: float
    rate_Bps: float


@dataclass(frozen=True)
class WireChoice:
    """The decision: a transport, why, and the next best (None: there is no other)."""

    name: str
    reason: str
    runner_up: str | None = None


def estimate(found: Sequence[MeasuredTransport], nbytes: float, short: float) -> list[TransportCost]:
    """Return the estimate of each transport, in the order given."""
    rows = []
    for m in found:
        wire_s = m.link.seconds(nbytes)
        rate = 1 / m.link.beta_s_per_byte if m.link.beta_s_per_byte > 0 else 0.0
        rows.append(TransportCost(m.name, wire_s, m.busy_cores * wire_s, wire_s + delayed_s(
            wire_s, m.busy_cores, short), m.idle_cores, rate))
    return rows


def decide(rows: Sequence[TransportCost]) -> WireChoice:
    """Return the cheapest transport; within `TIE` the one that takes the least processor time."""
    least_s = min(row.cost_s for row in rows)
    near = [row for row in rows if row.cost_s <= least_s * (1 + TIE)]
    best = min(near, key=lambda row: row.busy_s)
    others = sorted((row for row in rows if row is not best), key=lambda row: row.cost_s)
    if not others:
        return WireChoice(best.name, f"{best.name}: there is no other")
    second = others[0]
    than = f"{format_ms(best.cost_s)} a step at most, {second.name} {format_ms(second.cost_s)}"
    if best.cost_s > second.cost_s or best.cost_s > (1 - TIE) * second.cost_s and best.busy_s < second.busy_s:
        reason = f"{than}: within {TIE:.0%}, and it takes less processor time"
    else:
        reason = than
    return WireChoice(best.name, f"{best.name}, {WHAT.get(best.name, best.name)}: {reason}", second.name)


def by_rule(names: Sequence[str], why: str) -> WireChoice:
    """Return the choice without measuring: the first candidate."""
    return WireChoice(names[0], f"{names[0]}, {WHAT.get(names[0], names[0])}, by rule: {why}")


def doubt(rows: Sequence[TransportCost], choice: WireChoice, step_s: float, wait_s: float,
          easy: Sequence[str] = ()) -> tuple[str, str] | None:
    """Return (a transport to try in place of ``choice``, why), from steps with the choice; None: keep it.

    One is worth a try if the wait is `OFF` beyond the most estimated, by more than `SEEN` of a step, and it was
    estimated to cost less than that wait. Also one of those ``easy`` to change to that was estimated within `NEAR` of
    the choice, if that much of a step waits.
    """
    own = next((row for row in rows if row.name == choice.name), None)
    others = sorted((row for row in rows if row.name != choice.name), key=lambda row: row.cost_s)
    if own is None or not others or wait_s <= SEEN * step_s:
        return None
    wait = f"steps of {format_ms(step_s)} wait {format_ms(wait_s)}"
    if wait_s > own.cost_s * (1 + OFF) and wait_s - own.cost_s > SEEN * step_s and others[0].cost_s < wait_s:
        return others[0].name, f"{wait}, longer than estimated"
    near = [row.name for row in others if row.name in easy and row.cost_s <= own.cost_s * (1 + NEAR)]
    return (near[0], f"{wait}, and it was estimated within {NEAR:.0%}") if near else None


def better(choice: str, step_s: float, tried: str, tried_s: float) -> tuple[str, str]:
    """Return (the transport with the shorter measured step, why)."""
    numbers = f"{choice} took {format_ms(step_s)} a step, {tried} {format_ms(tried_s)}"
    return (tried, f"{tried} from now on: {numbers}") if tried_s < step_s else (choice, f"{choice} stays: {numbers}")


def changed(settled: tuple[float, float], windows: Sequence[tuple[float, float]], n: int = 3) -> bool:
    """Return whether the last ``n`` windows all waited much longer than the settled one, or all much less.

    Each is (seconds of a step, seconds of it that waited).
    """
    step_s, wait_s = settled
    if len(windows) < n:
        return False
    last = [wait for _, wait in windows[-n:]]
    seen_s = SEEN * step_s
    return (all(w > CHANGED * wait_s and w - wait_s > seen_s for w in last)
            or all(w < wait_s / CHANGED and wait_s - w > seen_s for w in last))


def table(rows: Sequence[TransportCost], left_out: Mapping[str, str], chosen: str, nbytes: float) -> str:
    """Return the table of predictions; the chosen row is marked. Pure."""
    cells = [[">" if row.name == chosen else "", row.name, f"{row.rate_Bps / 1e6:.1f}",
              *(f"{1e3 * seconds:.2f}" for seconds in (row.wire_s, row.busy_s, row.cost_s)), f"{row.idle_cores:.0%}"]
             for row in rows]
    return "\n".join([f"collectives auto: {format_bytes(nbytes)} of gradients a step, predicted",
                      as_text(HEADERS, cells), *(f"   {name} not considered: {why}" for name, why in left_out.items())])
