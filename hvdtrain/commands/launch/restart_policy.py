"""Decision after an attempt: launch again, where, how soon and with which options, or end. Pure.

An exception, a loss that is not finite, full memory or disk ends the run at its second time at one step without a newer
checkpoint; lost ranks, hosts and waits are often nobody's fault and end it after `LOST_AT_ONE_STEP`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.launchers.spec import HostSlots, merged
from hvdtrain.cluster.liveness.causes import PARTS
from hvdtrain.cluster.liveness.pulse import WAITING

OURS = ("exception", "non_finite", "oom", "disk")
"""Kinds of causes that the program brings about: the second at one step ends the run."""

LOST = ("lost", "hang", "unreachable", "echo")
"""Kinds of causes that hosts and networks bring about."""

LOST_AT_ONE_STEP = 5
"""So many lost ranks at one step, without a newer checkpoint, end the run."""

FAILURES_OF_A_HOST = 2
"""A host that ranks were lost on so often is left out of the next attempt."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""The waits before restarts that follow an attempt without a finished step: they double."""

TOGETHER_S = 2.0
"""Ranks that were lost within this time may have been lost by one cause."""

EXIT_OK, EXIT_FAILED, EXIT_USER, EXIT_REQUEUE, EXIT_INTERRUPTED = 0, 1, 2, 75, 130


@dataclass(frozen=True)
class LaunchAttempt:
    """Attempt that has ended.

    ``kind``: a value of `causes.KINDS`; ``rank`` -1 and ``host`` "" where they are not known. ``begin`` and ``end``:
    steps finished at its begin and end, in the run's count; -1: none ever. ``checkpoint``: step of the newest one at
    its end, or -1. ``micro_batch``: largest one of a rank, 0 where it is not known. ``left_out``: hosts.
    """

    number: int
    kind: str
    text: str = ""
    rank: int = -1
    host: str = ""
    hosts: tuple[HostSlots, ...] = ()
    begin: int = -1
    end: int = -1
    checkpoint: int = -1
    micro_batch: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostCandidate:
    """Host that may be used. ``here``: it is this one; ``keeps``: it has the run's folder, as rank 0 needs."""

    host: HostSlots
    answers: bool = True
    here: bool = False
    keeps: bool = True


@dataclass(frozen=True)
class Launch:
    """Launch on ``hosts`` (none: where the allocation says) after ``wait_s``. ``micro_batch``: a smaller one, or 0."""

    hosts: tuple[HostSlots, ...]
    wait_s: float = 0.0
    micro_batch: int = 0
    why: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class End:
    status: int
    why: str


def next_launch(history: Sequence[LaunchAttempt], hosts: Sequence[HostCandidate], restarts: int) -> Launch | End:
    """Decide what follows ``history``, whose last attempt has just ended; () before the first one.

    ``hosts``: what may be used now, () where an allocation decides. ``restarts``: how many there may be in all.
    """
    if not history:
        return Launch(_usable(history, hosts), why="the first attempt")
    last = history[-1]
    over = _over(history, restarts)
    if over is not None:
        return over
    smaller = 0
    if last.kind == "oom":
        smaller = last.micro_batch // 2
        if smaller < 1:
            return End(EXIT_FAILED, f"{_what(last)}, and no smaller micro-batch is known: {last.text}")
    wait_s = _wait_s(history)
    words = [_what(last), "restarting" + (f" in {wait_s:g} s" if wait_s else " at once")]
    chosen = _usable(history, hosts)
    gone = [one.host.name for one in hosts if one.host.name not in {host.name for host in chosen}]
    back = [name for name in last.left_out if name in {host.name for host in chosen}]
    words += [f"without {', '.join(gone)}"] if gone else []
    words += [f"with {', '.join(back)} again"] if back else []
    if smaller:
        words.append(f"with micro-batches of {smaller} at most; the global batch and the training trajectory stay")
    return Launch(chosen, wait_s, smaller, "; ".join(words), tuple(gone))


def _over(history: Sequence[LaunchAttempt], restarts: int) -> End | None:
    last = history[-1]
    if last.kind == "done":
        return End(EXIT_OK, "the run is complete")
    if last.kind == "requeue":
        return End(EXIT_REQUEUE, f"the run is saved: resume it in another job: {last.text}")
    if last.kind == "interrupted":
        return End(EXIT_INTERRUPTED, "interrupted")
    if last.kind == "user":
        return End(EXIT_USER, f"an error that no restart fixes: {last.text}")
    again = _at_one_step(history)
    if last.kind in OURS and again >= 2:
        return End(EXIT_FAILED, f"{_what(last)}, as before, with no newer checkpoint in between: it would recur")
    if last.kind not in OURS and again >= LOST_AT_ONE_STEP:
        return End(EXIT_FAILED, f"{_what(last)}, for the {again}th time there, with no newer checkpoint in between")
    if len(history) > restarts:
        used = {0: "no restart was requested", 1: "the one restart is used up"}
        return End(EXIT_FAILED, f"{_what(last)}; {used.get(restarts, f'the {restarts} restarts are used up')}")
    return None


def _at_one_step(history: Sequence[LaunchAttempt]) -> int:
    """Return how many attempts since the newest checkpoint ended as the last one did, at its step, itself included.

    A smaller micro-batch is another attempt at memory's trouble, not the same again.
    """
    last, count = history[-1], 0
    group = OURS if last.kind in OURS else LOST
    for before in reversed(history):
        if before.checkpoint < last.checkpoint:
            break
        same_size = last.kind != "oom" or before.kind != "oom" or before.micro_batch == last.micro_batch
        count += before.kind in group and before.end == last.end and same_size
    return count


def _gained(history: Sequence[LaunchAttempt], at: int) -> bool:
    one, before = history[at], history[:at]
    started = max([one.begin, *(b.end for b in before)])
    saved = max((b.checkpoint for b in before), default=-1)
    return one.end > started or bool(before) and one.checkpoint > saved


def _wait_s(history: Sequence[LaunchAttempt]) -> float:
    """Return no wait before the first restart and after a gained step; else waits that double, bounded."""
    idle = 0
    for at in range(len(history) - 1, -1, -1):
        if _gained(history, at):
            break
        idle += 1
    if len(history) == 1 or idle == 0:
        return 0.0
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(idle - 1, 16))


def _usable(history: Sequence[LaunchAttempt], hosts: Sequence[HostCandidate]) -> tuple[HostSlots, ...]:
    """Return the hosts that answer and have not failed twice since they were last left out; one at least.

    A host that was left out for its failures returns, with none counted, once an attempt without it has ended.
    """
    kept = [one for one in hosts if one.answers and _failures(history, one.host.name) < FAILURES_OF_A_HOST]
    if not kept:
        answering = [one for one in hosts if one.answers] or [one for one in hosts if one.here] or list(hosts)
        kept = sorted(answering, key=lambda one: (_failures(history, one.host.name), not one.here))[:1]
    if history and not any(one.keeps for one in kept):  # the checkpoints are on a host that would be left out
        kept = [one for one in hosts if one.keeps and one.answers][:1] + kept
    if history and kept and not kept[0].keeps:
        kept.sort(key=lambda one: not one.keeps)
    return tuple(one.host for one in kept)


def _failures(history: Sequence[LaunchAttempt], name: str) -> int:
    count = 0
    for one in reversed(history):
        if name in one.left_out:
            break
        count += one.kind in LOST and one.host == name
    return count


def _what(one: LaunchAttempt) -> str:
    words = {"exception": "an exception", "non_finite": "a loss or gradient that is not finite", "oom": "out of memory",
             "disk": "a disk that cannot be written", "lost": "lost", "echo": "lost", "hang": "hangs",
             "unreachable": "cannot be reached"}
    who = f"rank {one.rank}" if one.rank >= 0 else "a rank"
    at = f" at step {one.end}" if one.end >= 0 else " before its first step"
    where = f" on host {one.host}" if one.host else ""
    kind = words.get(one.kind, one.kind)
    if one.kind in LOST:
        return f"{who}{where} {'was lost' if kind == 'lost' else kind}{at}"
    return f"{kind} on {who}{where}{at}"


def refit(values: Sequence[str], before: Sequence[HostSlots], after: Sequence[HostSlots]) -> list[str]:
    """Return a per-rank list for the ranks of ``after``, from the one for those of ``before``. Pure.

    Each rank of a host keeps the value of the rank in its place there; further ranks of it take its last one's, those
    of a new host the first host's first.
    """
    own: dict[str, list[str]] = {}
    at = 0
    for host in before:
        own.setdefault(host.name, []).extend(values[at:at + host.slots])
        at += host.slots
    fitted: list[str] = []
    for host in after:
        mine = own.get(host.name) or [values[0]]
        fitted += [mine[min(i, len(mine) - 1)] for i in range(host.slots)]
    return fitted


def row(one: LaunchAttempt, began: float, ran_s: float, parts: Mapping[str, float], decision: str) -> dict[str, Any]:
    """Return one attempt as a record. ``began``: unix seconds; ``ran_s``: of its launcher.

    ``parts``: seconds of its start and of the end that the next attempt follows, by the names in `causes.PARTS`.
    """
    return {
        "attempt": one.number, "cause": one.kind, "words": one.text, "rank": one.rank, "host": one.host,
        "hosts": [str(host) for host in one.hosts], "ranks": sum(host.slots for host in one.hosts),
        "step_start": one.begin, "step_end": one.end, "checkpoint": one.checkpoint, "steps_lost": lost(one),
        "time": round(began, 3), "seconds": {"ran": round(ran_s, 3), **{p: parts[p] for p in PARTS if p in parts}},
        "decision": decision,
    }


def lost(one: LaunchAttempt) -> int:
    """Return the steps to compute again: those since the newest checkpoint, where the attempt failed."""
    return 0 if one.kind == "done" else max(0, one.end - max(0, one.checkpoint))


def cause_of(left: Sequence[Mapping[str, Any]], succeeded: bool, status: int | None, ended_for: str,
             oom_kills: int) -> tuple[str, str, int, str]:
    """Return (kind, words, rank, host) of an attempt's end, from what its ranks left. Pure.

    The first cause counts: later ones are mostly its echo. ``ended_for``: why the supervisor ended it; ``oom_kills``:
    processes that the kernel killed for memory on this host meanwhile.
    """
    if succeeded:
        return "done", "", -1, ""
    reports = sorted((row for row in left if row["kind"] not in ("done", "echo")), key=lambda row: row["time"])
    if reports:
        one = _origin(reports)
        kind, text = one["kind"], one["text"]
        if kind == "lost" and oom_kills > 0:
            kind, text = "oom", f"the system killed it for memory: {text}"
        return kind, text, one["rank"], one["host"]
    if ended_for == "interrupted":
        return "interrupted", "", -1, ""
    if oom_kills > 0:
        return "oom", "the system killed a process for memory", -1, ""
    if ended_for:
        return "hang", ended_for, -1, ""
    return "lost", f"no rank reported why it ended; the launcher's status was {status}", -1, ""


def silent_hosts(hosts: Sequence[HostSlots], left: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the hosts of whose ranks none has left a cause. Pure."""
    ranks, first, silent = {row["rank"] for row in left}, 0, []
    for host in hosts:
        if not ranks & set(range(first, first + host.slots)):
            silent.append(host.name)
        first += host.slots
    return silent


def started_hosts(marks: Sequence[Mapping[str, Any]]) -> tuple[HostSlots, ...]:
    """Return the hosts of the ranks that started, where an allocation and not the launch placed them. Pure."""
    started = {row["rank"]: row["host"] for row in marks
               if isinstance(row.get("rank"), int) and isinstance(row.get("host"), str)}
    return merged(HostSlots(started[rank], 1) for rank in sorted(started))


def _origin(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the cause that brought the others about: the first; of ranks lost together, one that did not wait.

    A launcher kills the others as soon as it misses one, so that watchers see all of them go, in any order; a rank that
    waited for others then, as `pulse.Seen.words` says, is not the missing one.
    """
    together = [row for row in reports if row["kind"] == "lost" and row["time"] <= reports[0]["time"] + TOGETHER_S]
    if reports[0]["kind"] != "lost":
        return reports[0]
    return next((row for row in together if WAITING not in row["text"]), reports[0])
