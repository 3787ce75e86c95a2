"""What the watchers of a job's hosts tell each other, and which host has fallen silent.

Datagrams of one size, each sealed with the job's token (HMAC-SHA256), which travels over the control plane only; what
is not sealed, comes twice or from nobody known is dropped. Nothing is decoded but numbers. Datagrams and not a stream:
after an outage the next one arrives at once, where a stream would wait for its own, ever longer pauses to pass.

A host counts as silent only if it was heard before, so a network that lets no datagrams through accuses nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass, field

from hvdtrain.cluster.liveness.watch.judge import Others

BEAT, BYE, END = 1, 2, 3
"""The host is there; its ranks have left in order; the job is being ended."""

_FORMAT = struct.Struct("<8s2IQ4I")
_MAGIC = b"hvdwatch"
SEAL = 16
SIZE = _FORMAT.size + SEAL

BEATS, LEAST_S, LONGEST_S = 6, 0.1, 1.0
"""Beats within the bound, and the limits of the pause between two."""


@dataclass(frozen=True)
class Counts:
    """How many ranks a host has, and how many of them wait for others, are stopped, and are leaving."""

    ranks: int = 0
    waiting: int = 0
    stopped: int = 0
    leaving: int = 0


@dataclass
class Host:
    """Another host: its name, its lowest rank, where to reach it, and what was heard of it last."""

    name: str
    rank: int
    addresses: list[tuple[str, int]]
    counts: Counts = Counts()
    number: int = 0
    silent_s: float = 0.0
    met: bool = False
    left: bool = False


def seal(secret: bytes, data: bytes) -> bytes:
    """Return ``data`` with its seal."""
    return data + hmac.digest(secret, data, hashlib.sha256)[:SEAL]


def opened(secret: bytes, data: bytes) -> bytes | None:
    """Return what was sealed with ``secret``; None for anything else."""
    if len(data) != SIZE:
        return None
    body = data[:-SEAL]
    return body if hmac.compare_digest(seal(secret, body), data) else None


@dataclass
class Beats:
    """This host's end: ``own`` is its number, ``hosts`` the others by theirs, ``wire`` a datagram socket."""

    wire: socket.socket
    secret: bytes
    own: int
    hosts: dict[int, Host]
    ended: bool = False
    """Whether another host has said that the job is being ended."""
    _sent: int = 0
    _sent_at: float = field(default=float("-inf"))

    def send(self, counts: Counts, kind: int = BEAT) -> None:
        """Tell every host that has not left."""
        self._sent += 1
        body = _FORMAT.pack(_MAGIC, self.own, kind, self._sent, counts.ranks, counts.waiting, counts.stopped,
                            counts.leaving)
        data = seal(self.secret, body)
        for host in self.hosts.values():
            for address in [] if host.left else host.addresses:
                with contextlib.suppress(OSError):  # a link that is down, a full buffer: the next one comes soon
                    self.wire.sendto(data, socket.MSG_DONTWAIT, address)

    def due(self, now: float, bound_s: float) -> bool:
        """Whether it is time for a beat; says so once."""
        if now - self._sent_at < min(max(bound_s / BEATS, LEAST_S), LONGEST_S):
            return False
        self._sent_at = now
        return True

    def receive(self) -> None:
        """Take in all that has come."""
        with contextlib.suppress(OSError):
            while True:
                data, address = self.wire.recvfrom(SIZE + 1, socket.MSG_DONTWAIT)
                body = opened(self.secret, data)
                if body is not None:
                    self._take(body, address)

    def _take(self, body: bytes, address: tuple[str, int]) -> None:
        magic, sender, kind, number, ranks, waiting, stopped, leaving = _FORMAT.unpack(body)
        host = self.hosts.get(sender)
        if magic != _MAGIC or host is None or number <= host.number:
            return
        host.number, host.met, host.silent_s, host.addresses = number, True, 0.0, [address]
        host.counts = Counts(ranks, waiting, stopped, leaving)
        host.left = host.left or kind in (BYE, END)
        self.ended = self.ended or kind == END

    def pass_time(self, passed_s: float) -> None:
        """Count ``passed_s`` seconds, in which this watcher ran, for every host that was heard before."""
        for host in self.hosts.values():
            host.silent_s += passed_s if host.met and not host.left else 0.0

    def silent(self, bound_s: float) -> list[Host]:
        """Return the hosts that were not heard for longer than ``bound_s``, the worst first."""
        late = [host for host in self.hosts.values() if host.silent_s >= bound_s]
        return sorted(late, key=lambda host: -host.silent_s)

    def others(self) -> Others:
        """Return what the other hosts' ranks do, as they said it last."""
        here = [host for host in self.hosts.values() if not host.left]
        rows = [host.counts for host in here]
        return Others(sum(r.ranks for r in rows), sum(r.waiting for r in rows), sum(r.stopped for r in rows),
                      all(host.met for host in here))

    def leaving(self) -> bool:
        """Whether a rank of another host leaves, or the job is being ended there."""
        return self.ended or any(host.counts.leaving or host.left for host in self.hosts.values())
