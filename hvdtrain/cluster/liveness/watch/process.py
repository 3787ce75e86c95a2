"""The watchdog's process on a host: ``python -I -S process.py FD ROOT``, with the socket at which the ranks come, and
the directory that holds the package.

It looks at the ranks, gives the verdict, ends the job, and ends soon after the last rank. Standard library only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])

from hvdtrain.cluster.liveness.pulse import Page
from hvdtrain.cluster.liveness.watch import system
from hvdtrain.cluster.liveness.watch.judge import TOGETHER_S, Judge, Others, Sight, WatchdogVerdict
from hvdtrain.cluster.liveness.watch.messages import (
    BEAT,
    BOUND,
    BYE,
    END,
    HELLO,
    HOST,
    READY,
    SECRET,
    SIZE,
    Beats,
    Counts,
    Message,
    PeerHost,
    marks,
)
from hvdtrain.cluster.liveness.watch.system import GRACE_S, end, leave_cause, report, say, why
from hvdtrain.core.launcher import launch_facts

LOOKS, LEAST_PAUSE_S, LONGEST_PAUSE_S = 20, 0.05, 0.5
"""Looks within the bound, and the limits of the pause between two."""
SCAN_S = 2.0
"""Pause between two looks through all processes for ranks that have not come yet."""
EMPTY_S = 10.0
"""How long a watchdog without ranks waits for the first."""
OUTSIDE_S = 0.7
"""How long a host's only rank is gone before it counts as lost: another host may have ended the job."""
FAREWELLS, FAREWELL_S = 3, 0.01
"""How often the other hosts are told that this one leaves, as a datagram may be lost, and the pause in between."""
LAST_S = 10.0
"""After everything was killed: how long a process may take to go that the system does not let go."""


@dataclass
class WatchedRank:
    """A rank of this host: its number, process, page (None: it has not come yet), and its launcher's processes."""

    rank: int
    pid: int
    page: Page | None = None
    stacks: int = -1
    stderr: int = -1
    pidfd: int = -1
    launchers: tuple[int, ...] = ()
    gone: bool = False
    was: str = ""
    """Words about where it was, when it was seen last."""

    def go(self) -> None:
        """Note its end. After one in order its stderr is let go: horovodrun waits until nobody has it any more."""
        self.gone = True
        if self.page is not None and self.page.pace().leaving and self.stderr >= 0:
            os.close(self.stderr)
            self.stderr = -1

    def sight(self) -> Sight:
        stat = None if self.gone else system.stat(self.pid)
        state = stat.state if stat else ""
        if self.page is None:
            return Sight(self.rank, state)
        seen, pace = self.page.see(state), self.page.pace()
        self.was = seen.words()
        return Sight(self.rank, state, stat.cpu_s if stat else 0.0, seen.step, seen.phase, pace.since, bool(seen.wait),
                     pace.leaving, pace.steps, pace.first_s, pace.longest_s)


@dataclass
class Watcher:
    """Watchdog of this host's ranks."""

    listener: socket.socket
    bound_s: float = 30.0
    node: str = field(default_factory=socket.gethostname)
    ranks: dict[int, WatchedRank] = field(default_factory=dict)
    strangers: dict[int, WatchedRank] = field(default_factory=dict)
    """Ranks that have not come yet, by number."""
    size: int = 0
    local_size: int = 0
    came: bool = False
    """Whether a rank has come, even if it was gone by then."""
    orphaned_at: float | None = None
    ends_at: float | None = None
    """When what is left of the job is killed; None: it continues."""

    def __post_init__(self) -> None:
        self.poll = select.poll()
        self.poll.register(self.listener, select.POLLIN)
        self.connections: dict[int, socket.socket] = {}
        self.launchers: dict[int, int] = {}
        self.facts = launch_facts(os.environ)
        self.marks = marks(os.environ, self.facts)
        self.judge = Judge(self.bound_s, self.pause_s)
        self.began = self.scanned = time.monotonic()
        self.beats: Beats | None = None
        self.secret, self.number = b"", 0
        self.hosts: dict[int, PeerHost] = {}
        self.counts = Counts()

    @property
    def pause_s(self) -> float:
        """Usual time between two looks."""
        return min(max(self.bound_s / LOOKS, LEAST_PAUSE_S), LONGEST_PAUSE_S) if self.bound_s else LONGEST_PAUSE_S

    def run(self) -> None:
        """Look until no rank is left, then tell the other hosts."""
        while not self._turn():
            pass
        if self.beats is not None:
            for _ in range(FAREWELLS):
                self.beats.send(self.counts, BYE if self.counts.leaving and self.ends_at is None else END)
                time.sleep(FAREWELL_S)

    def _turn(self) -> bool:
        """Wait for an event or a pause, look once; return whether nothing is left to be done."""
        events = self.poll.poll((TOGETHER_S if self.judge.pending(time.monotonic()) else self.pause_s) * 1000)
        self._hear([fd for fd, _ in events])
        now = time.monotonic()
        alive = [rank for rank in self.ranks.values() if not rank.gone]
        if self.ends_at is not None:
            return self._ended(now, alive)
        if self.orphaned_at is not None and self._orphaned(now, alive):
            return False
        if self.bound_s:
            self._look(now)
        over = self.came or now - self.began > EMPTY_S
        return not alive and self.ends_at is None and not self.judge.pending(now) and over

    def _hear(self, ready: list[int]) -> None:
        """Take in what has come: ranks, messages, and the ends of processes."""
        for fd in ready:
            if fd == self.listener.fileno():
                connection, _ = self.listener.accept()
                self.connections[connection.fileno()] = connection
                self.poll.register(connection, select.POLLIN)
            elif self.beats is not None and fd == self.beats.wire.fileno():
                self.beats.receive()
            elif fd in self.connections:
                self._read(self.connections[fd])
            elif fd in self.launchers:
                ended = self.launchers.pop(fd)
                self._drop(fd)
                # A wrapper of one rank (a script, a launcher's helper) ends in order with it, and others continue.
                if any(ended in rank.launchers and self._is_alive(rank.pid) for rank in self.ranks.values()):
                    self.orphaned_at = time.monotonic()
            else:
                for rank in self.ranks.values():
                    if rank.pidfd == fd:
                        rank.go()
                self._drop(fd)

    def _drop(self, fd: int) -> None:
        self.poll.unregister(fd)
        os.close(fd)

    def _read(self, connection: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(connection, SIZE, 3, socket.MSG_CMSG_CLOEXEC)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            data, fds, credentials = b"", [], b""
        pid, uid = (int.from_bytes(credentials[at:at + 4], sys.byteorder) for at in (0, 4))
        if len(data) != SIZE or uid != os.geteuid():
            self.poll.unregister(connection)
            del self.connections[connection.fileno()]
            connection.close()
            return
        message = Message.of(data)
        if message.kind == HELLO and len(fds) == 3 and pid:
            self._welcome(message, pid, fds)
        elif message.kind == BOUND:
            self._bound(message.value)
        elif message.kind == SECRET:
            self.secret, self.number = message.blob, message.numbers[0]
        elif message.kind == HOST:
            number, port, _, rank = message.numbers
            name = message.blob.rstrip(b"\0").decode(errors="replace")
            self.hosts[number] = PeerHost(name, rank, [(address, port) for address in message.text.split(",")])
        elif message.kind == READY and len(fds) == 1 and self.secret:
            self.beats = Beats(socket.socket(fileno=fds[0]), self.secret, self.number, self.hosts)
            self.judge.moment_s = OUTSIDE_S
            self.poll.register(self.beats.wire, select.POLLIN)

    def _bound(self, bound_s: float) -> None:
        self.bound_s = bound_s
        self.judge.bound_s, self.judge.pause_s = bound_s, self.pause_s

    def _welcome(self, message: Message, pid: int, fds: list[int]) -> None:
        if not self.came:  # from here on there are the ranks' own: horovodrun waits until nobody has the first one's
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)
        number, self.size, _, self.local_size = message.numbers
        page, stacks, stderr = fds
        self.came = True
        try:
            pidfd = os.pidfd_open(pid)
            memory = mmap.mmap(page, mmap.PAGESIZE, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return
        finally:
            os.close(page)
        chain = tuple(system.launchers(pid))
        rank = WatchedRank(number, pid, Page(number, self.node, memory), stacks, stderr, pidfd, chain)
        self.ranks[number] = rank
        self.strangers.pop(number, None)
        self.poll.register(rank.pidfd, select.POLLIN)
        known = set(self.launchers.values())
        for ancestor in set(chain) - known:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(ancestor)
                self.launchers[fd] = ancestor
                self.poll.register(fd, select.POLLIN)
        self._bound(message.value)

    def _scan(self, now: float) -> None:
        """Find ranks of this host that have not come yet: what stops them may have come early."""
        if len(self.ranks) >= self.local_size or now - self.scanned < SCAN_S:
            return
        self.scanned, self.strangers = now, {}
        for pid, env in system.kin(self.marks):
            number = launch_facts(env).rank
            stat = system.stat(pid)
            if number in self.ranks or stat is None or number in self.strangers and stat.state != "T":
                continue
            self.strangers[number] = WatchedRank(number, pid, was=f"rank {number} on host {self.node}, starting")

    def _look(self, now: float) -> None:
        self._scan(now)
        strangers = [rank.sight() for rank in self.strangers.values()]
        sights = [rank.sight() for rank in self.ranks.values()] + [sight for sight in strangers if not sight.gone]
        others = self._tell_hosts(now, sights)
        if self.ends_at is not None:
            return
        found = self.judge.look(now, sights, others)
        if found is not None and not (found.kind == "lost" and self.beats and self.beats.leaving()):
            self._act(found)

    def _tell_hosts(self, now: float, sights: list[Sight]) -> Others:
        """Report to the other hosts, and return what they see; act if one is silent, or ends the job."""
        if self.beats is None:
            return Others(known=len(sights) >= self.size)
        counts = Counts(len(sights), sum(s.waits for s in sights), sum(s.stopped for s in sights),
                        sum(s.leaving for s in sights))
        if self.beats.due(now, self.bound_s) or counts.leaving > self.counts.leaving:
            self.beats.send(counts, BEAT)
        self.counts = counts
        self.beats.pass_time(self.judge.passed(now))
        silent = self.beats.silent(self.bound_s)
        if silent and not counts.leaving == counts.ranks:
            who = ", ".join(host.name for host in silent)
            text = (f"host {who}: unreachable from host {self.node} for {silent[0].silent_s:.0f} s "
                    f"(heartbeat_timeout_s {self.bound_s:g}). The job is stopped.")
            say(text, [rank.stderr for rank in self.ranks.values()])
            for host in silent:
                leave_cause("unreachable", text, host.rank, -1, host.name)
            self.ends_at = now
        elif self.beats.ended:
            self.ends_at = now + GRACE_S
        return self.beats.others()

    def _act(self, verdict: WatchdogVerdict) -> None:
        everyone = {**self.strangers, **self.ranks}
        report(verdict, [everyone[r] for r in verdict.ranks], list(self.ranks.values()), self.bound_s)
        for number in verdict.ranks:
            rank = everyone[number]
            step = rank.page.see("R").step if rank.page else -1
            leave_cause(verdict.kind, f"{rank.was}: {why(verdict, self.bound_s)}", number, step, self.node)
            if not rank.gone:
                end([rank.pid])
        self.ends_at = time.monotonic() + GRACE_S

    def _orphaned(self, now: float, alive: list[WatchedRank]) -> bool:
        """After the launcher's end: kill the ranks; those that leave in order have a moment for it."""
        assert self.orphaned_at is not None
        leaving = any(rank.page and rank.page.pace().leaving for rank in alive)
        if not alive or leaving and now - self.orphaned_at < GRACE_S:
            return False
        say(f"host {self.node}: the launcher of this job has ended; its ranks on this host are stopped",
            [rank.stderr for rank in alive])
        self.ends_at = now
        return True

    def _ended(self, now: float, alive: list[WatchedRank]) -> bool:
        """Kill what is left when the time is over; return whether nothing is left to be done."""
        assert self.ends_at is not None
        if not alive and now < self.ends_at:
            return True
        if now < self.ends_at:
            return False
        pids = [rank.pid for rank in alive]
        left = set().union(*(system.segments(pid) for pid in pids)) if self.orphaned_at is not None else set()
        end([*pids, *(pid for pid, _ in system.kin(self.marks))])
        until = now + LAST_S
        while time.monotonic() < until and any(self._is_alive(pid) for pid in pids):
            time.sleep(LEAST_PAUSE_S)
        for path in left:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return True

    def _is_alive(self, pid: int) -> bool:
        stat = system.stat(pid)
        return stat is not None and stat.state not in ("Z", "X")


def main(fd: int) -> None:
    """Watch the ranks that come to the socket ``fd``."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal, or of Slurm to all of a step: the ranks decide
        signal.signal(number, signal.SIG_IGN)
    Watcher(socket.socket(fileno=fd)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
