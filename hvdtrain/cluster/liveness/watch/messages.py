"""What a rank and the watcher of its host tell each other: messages of one size over a socket of the system's.

Owns the format, and the name by which the ranks of a job on one host find each other. The name lies in the system's
abstract space: nothing of it is on a disk, and it is gone with the watcher.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.core.launcher import LaunchFacts

HELLO, BOUND, SECRET, HOST, READY = 1, 2, 3, 4, 5
"""A rank is here, with its page, its file for stacks and its stderr; how long a rank may stand still; the job's token
and this host's number; another host's number and address; the socket between hosts, after all of them."""

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
        """Return its bytes, `SIZE` of them."""
        return _FORMAT.pack(self.kind, *self.numbers, self.value, self.blob, self.text.encode())

    @classmethod
    def of(cls, data: bytes) -> Message:
        """Read one; `ValueError` where ``data`` is none."""
        if len(data) != SIZE:
            raise ValueError(f"{len(data)} bytes are no message")
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
