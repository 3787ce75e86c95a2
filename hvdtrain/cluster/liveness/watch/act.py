"""What the watcher does about a verdict: collects stacks, says one message, leaves the cause, kills.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.liveness.watch import stacks_signal, system

if TYPE_CHECKING:
    from hvdtrain.cluster.liveness.watch.judge import Verdict

GRACE_S = 3.0
"""How long the launcher has to end the job after a rank was killed, before the watcher ends what is left."""
STACKS_S, WRITE_S = 0.5, 3.0
"""Longest wait for stacks, and for somebody to read the message."""
MOST_STACKS, MOST_BYTES = 2, 20_000
"""Ranks whose stacks are shown, and bytes of each."""


def report(verdict: Verdict, accused: Sequence[Any], ranks: Sequence[Any], bound_s: float) -> None:
    """Say the verdict and the stacks that can be had, in one message, on the stderr of one of ``ranks``."""
    who = "; ".join(rank.was for rank in accused)
    lines = [f"{who}: {why(verdict, bound_s)} The job is ended."]
    # One that is stopped could write its stacks only if it were let go on, and might end the run as if all were well.
    able = [rank for rank in ranks if rank.page and not rank.gone and not (verdict.stopped and rank in accused)]
    for rank in sorted(able, key=lambda r: (r not in accused, r.rank))[:MOST_STACKS]:
        stacks = _stacks(rank)
        if stacks:
            lines.append(f"Stacks of {rank.was}:\n{stacks}")
    say("\n".join(lines), [rank.stderr for rank in sorted(ranks, key=lambda r: (r.gone, r in accused, r.rank))])


def why(verdict: Verdict, bound_s: float) -> str:
    """Return what a rank is accused of, as a sentence."""
    if verdict.kind == "lost":
        return "its process has ended without a word."
    how = "frozen" if verdict.stopped else "hangs: every other rank has waited for it"
    return f"{how} for {verdict.seconds:.0f} s (heartbeat_timeout_s {bound_s:g})."


def _stacks(rank: Any) -> str:
    """The stacks of a rank's threads, as its handler writes them: C code that needs no lock of the interpreter."""
    number = stacks_signal()
    if not system.catches(rank.pid, number):
        return ""
    before = _size(rank.stacks)
    with contextlib.suppress(OSError):
        os.kill(rank.pid, number)
        until, size = time.monotonic() + STACKS_S, before
        while time.monotonic() < until and (size == before or size != _size(rank.stacks)):
            size = _size(rank.stacks)
            time.sleep(0.02)
        return os.pread(rank.stacks, MOST_BYTES, before).decode(errors="replace").rstrip()
    return ""


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


def say(text: str, targets: Iterable[int]) -> None:
    """Write one message to the first of ``targets`` (descriptors) that takes it; gives up where nobody reads."""
    data = f"hvdtrain: {text}\n".encode(errors="replace")

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    usual = signal.signal(signal.SIGALRM, late)
    try:
        for fd in [*targets, 2]:
            rest = data
            signal.setitimer(signal.ITIMER_REAL, WRITE_S)
            with contextlib.suppress(OSError):
                while rest:
                    rest = rest[os.write(fd, rest):]
                return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def leave_cause(kind: str, text: str, rank: int, step: int, host: str) -> None:
    """Leave the cause in the run's folder for a rank that cannot; nothing without a supervisor."""
    from hvdtrain.cluster.liveness import causes  # here: it takes a while to load, and is hardly ever needed

    causes.leave(kind, text, rank=rank, step=step, host=host)


def end(pids: Iterable[int]) -> None:
    """Kill processes."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
