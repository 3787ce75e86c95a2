"""Offsets between the clocks of hosts, each with its error.

No message can arrive before it was sent: that bounds every offset from both sides, and the closest of several gathers
over the control plane is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.core.protocols import Control

ROUNDS = 30
"""A round takes a fraction of a millisecond; one that no rank was late for makes the bounds narrow."""

Round = tuple[Sequence[float], Sequence[float]]
"""By rank: its clock before it sent, and its clock after it had everybody's."""


def bounds(rounds: Sequence[Round], rank: int) -> tuple[float, float]:
    """Return (least, most) seconds by which ``rank``'s clock may be ahead of rank 0's. Pure.

    With offset d: rank 0 has the reply after it was sent, so ``sent_r - d <= got_0``; and rank r has rank 0's message
    after that was sent, so ``got_r - d >= sent_0``.
    """
    least = max(sent[rank] - got[0] for sent, got in rounds)
    most = min(got[rank] - sent[0] for sent, got in rounds)
    return least, most


def offset(rounds: Sequence[Round], rank: int) -> dict[str, float]:
    """Return ``{"offset_s", "within_s"}``: the rank's clock is ahead of rank 0's by offset_s +- within_s. Pure."""
    least, most = bounds(rounds, rank)
    return {"offset_s": round((least + most) / 2, 6), "within_s": round(abs(most - least) / 2, 6)}


def measure(control: Control, now: Callable[[], float] = time.time, n_rounds: int = ROUNDS) -> list[Round]:
    """Return the rounds, on every rank; collective."""
    own = []
    for _ in range(n_rounds):
        control.barrier("clocks")
        sent = now()
        control.gather(None)
        own.append((sent, now()))
    by_rank = control.gather(own)
    return [([row[i][0] for row in by_rank], [row[i][1] for row in by_rank]) for i in range(n_rounds)]


class Ahead(NamedTuple):
    """A rank's clock is ahead of rank 0's by ``offset_s``, give or take ``within_s``."""

    offset_s: float = 0.0
    within_s: float = 0.0


def compared(control: Control, own: str | None = None, now: Callable[[], float] = time.perf_counter,
             n_rounds: int = ROUNDS) -> list[Ahead]:
    """Compare the clocks of `time.perf_counter` of all ranks, by rank; collective.

    Ranks of one machine have one such clock: only where there are several machines is anything measured. ``own``: what
    tells this rank's clock from others (`identity`), for tests.
    """
    known_P = control.gather(identity() if own is None else own)
    if all(known == known_P[0] != "" for known in known_P):
        return [Ahead()] * control.size
    rounds = measure(control, now, n_rounds)
    return [Ahead() if rank == 0 or known == known_P[0] != "" else Ahead(**offset(rounds, rank))
            for rank, known in enumerate(known_P)]


def identity() -> str:
    """Return a name of the clock that `time.perf_counter` reads: this boot of this machine and its time namespace; "":
    unknown.

    On Linux it is CLOCK_MONOTONIC, which all processes share unless a container has moved theirs (time_namespaces(7)).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    try:
        return f"{boot} {Path('/proc/self/timens_offsets').read_text(encoding='ascii').split()}"
    except OSError:  # a kernel without time namespaces
        return boot
