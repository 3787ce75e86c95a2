"""Pulse: the step, phase and wait of each rank, on a page of memory that its neighbours on the host read without its
help.

Owns the pages and the sentence about missing ranks when a wait runs out; ranks of other hosts are known by the last
vote. Standard library only, as the watchdog's process (`hvdtrain.cluster.liveness.watch`) reads the same pages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hvdtrain.core.protocols import Control

_TOKEN = 16
_NUMBERS = struct.Struct("<4q")
"""Step, when its phase began, when its wait began (0: does not wait), process."""
_PHASE, _WAIT, _SIZE = slice(64, 192), slice(192, 384), mmap.PAGESIZE
_PHASE_SIZE, _WAIT_SIZE = 128, 192
_LEAVING = 48
"""Place of the mark that the rank ends, or ends the job, and reports why itself."""
_PACE = struct.Struct("<3q")
"""Steps that were finished, nanoseconds of the first and of the longest of the others; at `_PACE_AT`."""
_PACE_AT, _ROLE = 384, slice(448, 704)
COMPUTING = ("backward and exchange", "vote", "update")
"""Phases of a step that take about as long each time; every other one may take as long as it likes."""

STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "ended", "X": "ended", "D": "in an "
          "uninterruptible system call (a disk or a file server that does not answer)"}
"""Letters of /proc/PID/stat that explain why a rank does not come; "" for one that runs or sleeps."""
WAITING = "there waiting in"
"""Begin of the wait in `RankStatus.words`."""

OUT = ("stopped by a signal", "stopped by a debugger", "ended")


@dataclass(frozen=True)
class RankStatus:
    """State of a rank as seen from outside: ``phase_s`` and ``wait_s`` ago it entered its phase and its wait (``wait``
    "": none).

    ``state``: of its process, a value of `STATES`. ``step`` -1: not in a step yet. ``role``: its shard of the model.
    """

    rank: int
    node: str
    step: int
    phase: str
    phase_s: float
    wait: str = ""
    wait_s: float = 0.0
    state: str = ""
    role: str = ""

    def words(self) -> str:
        """Describe the rank: its state, step and phase, since when."""
        at = f"step {self.step}, " if self.step >= 0 else ""
        parts = [f"rank {self.rank} on host {self.node}", self.role, self.state,
                 f"in {at}phase {self.phase or 'start'!r} since {self.phase_s:.0f} s",
                 f"{WAITING} {self.wait} since {self.wait_s:.0f} s" if self.wait else ""]
        return ", ".join(part for part in parts if part)


def verdict(rows: Sequence[RankStatus], own: int, others: str = "") -> str:
    """Say which ranks are missing, from what rank ``own`` sees of its host's ranks. Pure.

    Missing are those whose process is stopped or gone; else those that do not wait while ``own`` does, or are elsewhere
    than it; else those that wait for something else. Where all wait at ``own``'s place but itself, it is the one.
    ``others``: the sentence about ranks that cannot be seen, where nobody near is missing.
    """
    me = next(row for row in rows if row.rank == own)
    near = [row for row in rows if row.rank != own]
    place = (me.step, me.phase)
    missing = [row for row in near if row.state in OUT]
    missing = missing or [row for row in near if not row.wait and (row.step, row.phase) != place]
    missing = missing or [row for row in near if me.wait and not row.wait]
    awaited = bool(near) and not me.wait and all(row.wait and (row.step, row.phase) == place for row in near)
    missing = missing or [row for row in near if row.wait != me.wait and not awaited]
    if missing:
        return "Missing: " + "; ".join(row.words() for row in missing) + "."
    if awaited:
        return f"All other visible ranks wait for this one: {me.words()}."
    here = f"All visible ranks are in the same phase: {me.words()}." if near else ""
    return " ".join(part for part in (here, others) if part)


@dataclass(frozen=True)
class Pace:
    """Duration of a rank's steps: ``steps`` are finished; seconds of the ``first`` and the ``longest`` of the others.

    ``since``: number that changes whenever its phase begins. ``leaving``: it ends, or ends the job.
    """

    steps: int = 0
    first_s: float = 0.0
    longest_s: float = 0.0
    since: int = 0
    leaving: bool = False


@dataclass
class Page:
    """Page of a rank: ``memory`` holds a token, `_NUMBERS`, the phase, the wait and `_PACE`."""

    rank: int
    node: str
    memory: mmap.mmap

    def see(self, letter: str | None = None) -> RankStatus:
        """Return the rank's status; ``letter``: the system's state of its process, where that is known already."""
        step, phase_ns, wait_ns, pid = _NUMBERS.unpack_from(self.memory, _TOKEN)
        now = time.monotonic_ns()
        wait = _text(self.memory[_WAIT]) if wait_ns else ""
        state = _state(pid) if letter is None else STATES.get(letter or "Z", "")
        return RankStatus(self.rank, self.node, step, _text(self.memory[_PHASE]), (now - phase_ns) / 1e9, wait,
                    (now - wait_ns) / 1e9 if wait_ns else 0.0, state, _text(self.memory[_ROLE]))

    def pace(self) -> Pace:
        """Return how long its steps take, and whether it is leaving."""
        steps, first_ns, longest_ns = _PACE.unpack_from(self.memory, _PACE_AT)
        since, = struct.unpack_from("<q", self.memory, _TOKEN + 8)
        return Pace(steps, first_ns / 1e9, longest_ns / 1e9, since, self.memory[_LEAVING] != 0)


@dataclass
class Pulse:
    """This rank's page and those of its neighbours. `at`, `waiting` and `heard` take about a microsecond.

    Only the thread that made it publishes its waits: those of other threads do not block the rank.
    """

    own: Page
    near: list[Page]
    far: list[tuple[int, str]]
    """(rank, host) of those whose page cannot be read here."""
    _heard: tuple[int, float] | None = None
    _thread: int = field(default_factory=threading.get_ident)
    _last: str = ""
    _began: int = 0

    def at(self, phase: str, step: int | None = None) -> None:
        memory, now = self.own.memory, time.monotonic_ns()
        if phase != self._last:
            memory[_PHASE] = _bytes(phase, _PHASE_SIZE)
            if phase == COMPUTING[0]:
                self._began = now
            elif self._last in COMPUTING and phase not in COMPUTING:
                self._stepped(now - self._began)
            self._last = phase
        if step is not None:
            struct.pack_into("<q", memory, _TOKEN, step)
        struct.pack_into("<q", memory, _TOKEN + 8, now)

    def _stepped(self, took_ns: int) -> None:
        """Publish the duration of a step. The first one is kept apart: it may compile."""
        steps, first_ns, longest_ns = _PACE.unpack_from(self.own.memory, _PACE_AT)
        first_ns, longest_ns = (took_ns, 0) if steps == 0 else (first_ns, max(longest_ns, took_ns))
        _PACE.pack_into(self.own.memory, _PACE_AT, steps + 1, first_ns, longest_ns)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        memory = self.own.memory
        memory[_WAIT] = _bytes(what, _WAIT_SIZE)
        struct.pack_into("<q", memory, _TOKEN + 16, time.monotonic_ns())
        try:
            yield
        finally:
            struct.pack_into("<q", memory, _TOKEN + 16, 0)

    def heard(self, step: int) -> None:
        self._heard = (step, time.monotonic())

    def missing(self) -> str:
        return verdict([page.see() for page in (self.own, *self.near)], self.own.rank, self._others())

    def _others(self) -> str:
        if not self.far:
            return ""
        who = ", ".join(f"rank {rank} on host {node}" for rank, node in self.far[:8])
        more = f" and {len(self.far) - 8} more" if len(self.far) > 8 else ""
        last = "have reached agreement in no step yet"
        if self._heard:
            last = f"reached the last agreement in step {self._heard[0]}, {time.monotonic() - self._heard[1]:.0f} s ago"
        return f"Missing, or waiting for a missing rank (not visible from here): {who}{more}; they {last}."


_own: Pulse | None = None


class Listener(Protocol):
    """Listener to this process' phases, also in a process without a page; ``pid``: its process."""

    pid: int

    def at(self, phase: str, step: int | None) -> None:
        """Note a phase; takes no time."""

    def close(self) -> None:
        """Note that the process ends, before its last message."""


listener: Listener | None = None
doing: dict[str, str] = {}
"""Phase to what a rank does in it, for a person; of phases whose owners say so."""


@dataclass(frozen=True)
class _Made:
    """A page of this process, its path for neighbours, and its token."""

    memory: mmap.mmap | None
    path: str = ""
    token: bytes = b""
    fd: int = -1
    pid: int = 0
    """Of the process that made it: a forked child makes its own."""


_made: _Made | None = None


def page() -> int:
    """Make this process' page, if there is none yet, and return its file's descriptor; -1 where none can be made.

    `at` and `waiting` write to it from then on, before `start` knows the other ranks.
    """
    global _own, _made
    if _made is None or _made.pid != os.getpid():
        _made = _make()
        if _made.memory is not None:
            _own = Pulse(Page(-1, "", _made.memory), [], [])
            _own.at("start", -1)
    return _made.fd


def start(control: Control) -> None:
    """Open this process' pulse among the ranks of ``control``; collective. Once per process."""
    global _own
    page()
    assert _made is not None
    memory, token = _made.memory, _made.token
    rows = control.gather((control.node, _made.path, token))
    if memory is None:
        return
    near: list[Page] = []
    far: list[tuple[int, str]] = []
    for rank, (node, path, token) in enumerate(rows):
        if rank == control.rank:
            continue
        theirs = _open(path, token) if node == control.node else None
        if theirs is None:
            far.append((rank, node))
        else:
            near.append(Page(rank, node, theirs))
    _own = Pulse(Page(control.rank, control.node, memory), near, far)
    _own.at("start", -1)


def at(phase: str, step: int | None = None) -> None:
    """Publish a phase; without effect before `start`."""
    if _own is not None:
        _own.at(phase, step)
    if listener is not None:
        listener.at(phase, step)


def waiting(what: str) -> contextlib.AbstractContextManager[None]:
    """Publish a wait for other ranks while the body runs; without effect before `start`."""
    return contextlib.nullcontext() if _own is None else _own.waiting(what)


def role(text: str) -> None:
    """Publish this rank's shard of the model, "" for all of it."""
    if _own is not None:
        _own.own.memory[_ROLE] = _bytes(text, _ROLE.stop - _ROLE.start)


def own_role() -> str:
    """Return what `role` has published."""
    return "" if _own is None else _text(_own.own.memory[_ROLE])


def own_wait() -> str:
    """Return what this rank waits for other ranks in; "" where it does not wait."""
    if _own is None or not _NUMBERS.unpack_from(_own.own.memory, _TOKEN)[2]:
        return ""
    return _text(_own.own.memory[_WAIT])


def heard(step: int) -> None:
    """Note that every rank took part in the agreement of ``step``."""
    if _own is not None:
        _own.heard(step)


def leaving() -> None:
    """Publish that this process ends and reports why itself; not in a forked child, which shares the page."""
    if listener is not None and listener.pid == os.getpid():
        listener.close()
    if _own is not None and (_made is None or _made.pid == os.getpid()):
        _own.own.memory[_LEAVING] = 1


def missing() -> str:
    """Return the sentence about missing ranks; "" before `start`. Raises nothing: it is called at the end."""
    try:
        return "" if _own is None else _own.missing()
    except Exception as error:  # a verdict that cannot be had must not hide that a wait ran out
        return f"The missing rank is not known: {error}."


def _make() -> _Made:
    """Make a page for neighbours to map; without memory where there is none to share."""
    try:
        fd = os.memfd_create("hvdtrain-pulse")  # stays open: the path leads through it
        os.ftruncate(fd, _SIZE)
        memory = mmap.mmap(fd, _SIZE)
    except (OSError, AttributeError):
        return _Made(None, pid=os.getpid())
    token = secrets.token_bytes(_TOKEN)
    memory[:_TOKEN] = token
    now = time.monotonic_ns()
    _NUMBERS.pack_into(memory, _TOKEN, -1, now, 0, os.getpid())
    return _Made(memory, f"/proc/{os.getpid()}/fd/{fd}", token, fd, os.getpid())


def _open(path: str, token: bytes) -> mmap.mmap | None:
    """Map a neighbour's memory, if the path leads to it: in another PID namespace it means another process."""
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    return memory if memory[:_TOKEN] == token else None


def _state(pid: int) -> str:
    """Return what keeps a process from running, "" for one that runs or sleeps."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0].decode()
    except FileNotFoundError:
        return "ended"
    except (OSError, IndexError):
        return ""
    return STATES.get(letter, "")


@lru_cache(256)  # the phases of a step are the same in each
def _bytes(text: str, size: int) -> bytes:
    return text.encode(errors="replace")[:size].ljust(size, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
