"""Processes of this host as the watchdog sees and treats them: state, processor time, parents, environment; stacks,
message, cause and kill after a verdict.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.liveness.watch import stacks_signal

_TICKS = os.sysconf("SC_CLK_TCK")

LAUNCHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "orted", "prterun", "prte", "prted",
                       "hydra_pmi_proxy", "hydra_bstrap_pro", "srun", "slurmstepd", "horovodrun"})
"""Programs, by the 15 letters that the system keeps of a name, above which a rank's ancestors are not its job's."""
DEPTH = 8
"""Ancestors among which a launcher is looked for."""


@dataclass(frozen=True)
class Stat:
    """A process: its name, the letter of its state, its parent, the seconds it computed, and when it began (ticks)."""

    name: str
    state: str
    parent: int
    cpu_s: float
    began: int


def stat(pid: int) -> Stat | None:
    """Return what is known of a process; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    begin, end = text.find(b"("), text.rfind(b")")
    fields = text[end + 1:].split()
    if len(fields) < 20:
        return None
    return Stat(text[begin + 1:end].decode(errors="replace"), fields[0].decode(), int(fields[1]),
                (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]))


def launchers(pid: int) -> list[int]:
    """Return the ancestors of a rank up to its launcher, which none of them outlives; without one, its parent.

    [] where the rank's parent is the first process already, so that its end cannot be seen.
    """
    chain: list[int] = []
    at = stat(pid)
    while at is not None and at.parent > 1 and len(chain) < DEPTH:
        chain.append(at.parent)
        at = stat(at.parent)
        if at is not None and at.name in LAUNCHERS:
            return chain
    return chain[:1]


def kin(marks: dict[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (process, environment) of this user's processes whose environment holds ``marks``."""
    own = os.geteuid()
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid != own:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = set(file.read().split(b"\0"))
            if wanted and wanted <= entries:
                pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
                yield int(name), {key: value for key, _, value in pairs}


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for signal ``number``, which else would end it."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next(line for line in file if line.startswith(b"SigCgt:"))
        return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def segments(pid: int) -> set[str]:
    """Return the shared-memory files of Open MPI that a process maps; one that is killed may leave them behind."""
    found = set()
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                path = line.rstrip("\n").partition("/dev/shm/")[2]
                if "segment" in path and not path.endswith("(deleted)"):
                    found.add(f"/dev/shm/{path}")
    return found


if TYPE_CHECKING:
    from hvdtrain.cluster.liveness.watch.judge import WatchdogVerdict

GRACE_S = 3.0
"""How long the launcher has to end the job after a rank was killed, before the watcher ends what is left."""
STACKS_S, WRITE_S = 0.5, 3.0
"""Longest wait for stacks, and for somebody to read the message."""
MOST_STACKS, MOST_BYTES = 2, 20_000
"""Ranks whose stacks are shown, and bytes of each."""


def report(verdict: WatchdogVerdict, accused: Sequence[Any], ranks: Sequence[Any], bound_s: float) -> None:
    """Report the verdict and the stacks that can be had, in one message, on the stderr of one of ``ranks``."""
    who = "; ".join(rank.was for rank in accused)
    lines = [f"{who}: {why(verdict, bound_s)} The job is stopped."]
    # One that is stopped could write its stacks only if it were let go on, and might end the run as if all were well.
    able = [rank for rank in ranks if rank.page and not rank.gone and not (verdict.stopped and rank in accused)]
    for rank in sorted(able, key=lambda r: (r not in accused, r.rank))[:MOST_STACKS]:
        stacks = _stacks(rank)
        if stacks:
            lines.append(f"Stacks of {rank.was}:\n{stacks}")
    say("\n".join(lines), [rank.stderr for rank in sorted(ranks, key=lambda r: (r.gone, r in accused, r.rank))])


def why(verdict: WatchdogVerdict, bound_s: float) -> str:
    """Return what a rank is accused of, as a sentence."""
    if verdict.kind == "lost":
        return "its process has ended without a message."
    how = "frozen" if verdict.stopped else "hangs: every other rank has waited for it"
    return f"{how} for {verdict.seconds:.0f} s (heartbeat_timeout_s {bound_s:g})."


def _stacks(rank: Any) -> str:
    """Return the stacks of a rank's threads, as its handler writes them without the interpreter's lock."""
    number = stacks_signal()
    if not catches(rank.pid, number):
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
    """Leave the cause in the run's folder for a rank that cannot."""
    from hvdtrain.cluster.liveness import causes  # here: it takes a while to load, and is hardly ever needed

    causes.leave(kind, text, rank=rank, step=step, host=host)


def end(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
