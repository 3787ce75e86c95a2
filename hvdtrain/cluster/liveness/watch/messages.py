"""Messages of the watchdog: from a rank to its host's, over a socket in the system's abstract space, and between hosts,
as datagrams sealed with the job's token.

Datagrams and not a stream: after an outage the next one arrives at once. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.cluster.liveness.watch.judge import Others
from hvdtrain.core.launcher import LaunchFacts

HELLO, BOUND, SECRET, HOST, READY = 1, 2, 3, 4, 5
"""Kinds: a rank with its page, its file for stacks and its stderr; how long a rank may stand still; the job's token and
this host's number; another host's number and address; the socket between hosts, after all of them."""

_FORMAT = struct.Struct("<B3x4id32s64s")
SIZE = _FORMAT.size

_BY_LAUNCHER = {"Open MPI mpirun": ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_URI3", "PMIX_SERVER_URI4",
                                    "PMIX_SERVER_URI41", "OMPI_MCA_ess_base_jobid"),
                "a PMIx launcher": ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_URI41"),
                "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_CLUSTER_NAME"),
                "horovodrun --gloo": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")}
"""Variables that are the same in all ranks of a job on one host, and in no other job there."""


@dataclass(frozen=True)
class Message:
    """``numbers``: by kind; of a HELLO rank, size, local rank and local size. ``blob``: a token. ``text``: a host."""

    kind: int
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    value: float = 0.0
    blob: bytes = b""
    text: str = ""

    def packed(self) -> bytes:
        return _FORMAT.pack(self.kind, *self.numbers, self.value, self.blob, self.text.encode())

    @classmethod
    def of(cls, data: bytes) -> Message:
        if len(data) != SIZE:
            raise ValueError(f"{len(data)} bytes are not a message")
        kind, a, b, c, d, value, blob, text = _FORMAT.unpack(data)
        return cls(kind, (a, b, c, d), value, blob, text.rstrip(b"\0").decode(errors="replace"))


def marks(env: Mapping[str, str], facts: LaunchFacts) -> dict[str, str]:
    """Return the variables of ``env`` by which the processes of this job on this host are known; {}: there are none."""
    return {name: env[name] for name in _BY_LAUNCHER.get(facts.launcher, ()) if name in env}


def address(env: Mapping[str, str], facts: LaunchFacts) -> bytes:
    """Return the name of the socket at which the watcher of this host listens.

    Where no variable tells jobs apart, as under MPICH, whose ranks of a host have one parent, that parent does.
    """
    of_job = sorted(marks(env, facts).items()) or [("parent", str(os.getppid()))]
    text = repr((os.geteuid(), facts.launcher, facts.size, of_job))
    return b"\0hvdtrain-" + hashlib.sha256(text.encode()).hexdigest()[:40].encode()


BEAT, BYE, END = 1, 2, 3
"""Kinds: the host is there; its ranks have left in order; the job is being ended."""

_BEAT_FORMAT = struct.Struct("<8s2IQ4I")
_BEAT_MAGIC = b"hvdwatch"
SEAL = 16
BEAT_SIZE = _BEAT_FORMAT.size + SEAL

BEATS, LEAST_S, LONGEST_S = 6, 0.1, 1.0
"""Beats within the bound, and the limits of the pause between two."""


@dataclass(frozen=True)
class Counts:
    """Numbers of a host's ranks: all, those that wait for others, are stopped, are leaving."""

    ranks: int = 0
    waiting: int = 0
    stopped: int = 0
    leaving: int = 0


@dataclass
class PeerHost:
    """Another host: its name, its lowest rank, where to reach it, and what was heard of it last."""

    name: str
    rank: int
    addresses: list[tuple[str, int]]
    counts: Counts = Counts()
    number: int = 0
    silent_s: float = 0.0
    seen: bool = False
    left: bool = False


def seal(secret: bytes, data: bytes) -> bytes:
    """Append the HMAC-SHA256 of ``data``, cut to `SEAL` bytes."""
    return data + hmac.digest(secret, data, hashlib.sha256)[:SEAL]


def opened(secret: bytes, data: bytes) -> bytes | None:
    """Return what was sealed with ``secret``; None for anything else."""
    if len(data) != BEAT_SIZE:
        return None
    body = data[:-SEAL]
    return body if hmac.compare_digest(seal(secret, body), data) else None


@dataclass
class Beats:
    """This host's end: ``own`` is its number, ``hosts`` the others by theirs, ``wire`` a datagram socket.

    Datagrams that are not sealed, come twice or from an unknown host are dropped. A host counts as silent only if it
    was heard before, so that a network that lets no datagrams through accuses nobody.
    """

    wire: socket.socket
    secret: bytes
    own: int
    hosts: dict[int, PeerHost]
    ended: bool = False
    """Whether another host has said that the job is being ended."""
    _sent: int = 0
    _sent_at: float = field(default=float("-inf"))

    def send(self, counts: Counts, kind: int = BEAT) -> None:
        """Tell every host that has not left."""
        self._sent += 1
        body = _BEAT_FORMAT.pack(_BEAT_MAGIC, self.own, kind, self._sent, counts.ranks, counts.waiting, counts.stopped,
                            counts.leaving)
        data = seal(self.secret, body)
        for host in self.hosts.values():
            for address in [] if host.left else host.addresses:
                with contextlib.suppress(OSError):  # a link that is down, a full buffer: the next one comes soon
                    self.wire.sendto(data, socket.MSG_DONTWAIT, address)

    def due(self, now: float, bound_s: float) -> bool:
        """Return whether it is time for a beat, once."""
        if now - self._sent_at < min(max(bound_s / BEATS, LEAST_S), LONGEST_S):
            return False
        self._sent_at = now
        return True

    def receive(self) -> None:
        """Take in all datagrams that have come."""
        with contextlib.suppress(OSError):
            while True:
                data, address = self.wire.recvfrom(BEAT_SIZE + 1, socket.MSG_DONTWAIT)
                body = opened(self.secret, data)
                if body is not None:
                    self._take(body, address)

    def _take(self, body: bytes, address: tuple[str, int]) -> None:
        magic, sender, kind, number, ranks, waiting, stopped, leaving = _BEAT_FORMAT.unpack(body)
        host = self.hosts.get(sender)
        if magic != _BEAT_MAGIC or host is None or number <= host.number:
            return
        host.number, host.seen, host.silent_s, host.addresses = number, True, 0.0, [address]
        host.counts = Counts(ranks, waiting, stopped, leaving)
        host.left = host.left or kind in (BYE, END)
        self.ended = self.ended or kind == END

    def pass_time(self, passed_s: float) -> None:
        """Count ``passed_s`` seconds, in which this watcher ran, for every host that was heard before."""
        for host in self.hosts.values():
            host.silent_s += passed_s if host.seen and not host.left else 0.0

    def silent(self, bound_s: float) -> list[PeerHost]:
        """Return the hosts that were not heard for longer than ``bound_s``, the worst first."""
        late = [host for host in self.hosts.values() if host.silent_s >= bound_s]
        return sorted(late, key=lambda host: -host.silent_s)

    def others(self) -> Others:
        """Return the state of the other hosts' ranks, as last reported."""
        here = [host for host in self.hosts.values() if not host.left]
        rows = [host.counts for host in here]
        return Others(sum(r.ranks for r in rows), sum(r.waiting for r in rows), sum(r.stopped for r in rows),
                      all(host.seen for host in here))

    def leaving(self) -> bool:
        """Return whether a rank of another host leaves, or the job is being ended there."""
        return self.ended or any(host.counts.leaving or host.left for host in self.hosts.values())
