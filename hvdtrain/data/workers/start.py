"""Start a rank's server of workers, before MPI starts where possible, and request workers from it.

Owns the server's process and its environment without variables of the job: its children join no MPI job and see no GPU.
One server per process, kept while any pool holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

JOB = ("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "OPAL_", "ORTE_", "MPI_", "MPIR_", "HYDRA_", "HYDI_", "I_MPI_",
       "HOROVOD_", "HVDLAUNCH_", "HVDTRAIN_")
"""Beginnings of the variables by which launchers, MPI libraries and supervisors tell a process its place in a job."""

ALONE = {**dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
                          "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"), "CUDA_VISIBLE_DEVICES": ""}
"""One thread for each worker, and no GPU."""

ANSWER_S = 60.0  # longest wait for the server's answer: it may import a framework first
STATUS_S = 15.0  # longest wait for the answer how a worker ended, after which the server is taken for frozen
END_S = 5.0

_lock = threading.RLock()
_shared: dict[str, Any] = {"server": None, "users": 0, "pid": 0}


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the job that this process belongs to, for a process that computes by one thread."""
    return {**{name: value for name, value in env.items() if not name.startswith(JOB)}, **ALONE}


def hold() -> WorkerServer:
    """Return this process' server, started if needed; pair with `release`. `OSError`: it cannot start."""
    with _lock:
        server = _shared["server"]
        if server is None or _shared["pid"] != os.getpid() or server.ended():  # another pid's: of a process that forked
            _shared.update(server=WorkerServer(), users=0, pid=os.getpid())
        _shared["users"] += 1
        return _shared["server"]  # type: ignore[no-any-return]


def release(server: WorkerServer) -> None:
    """Release ``server``; the last release ends it."""
    with _lock:
        if _shared["pid"] != os.getpid() or _shared["server"] is not server:
            return
        _shared["users"] -= 1
        if _shared["users"] <= 0:
            server.end()
            _shared["server"] = None


@contextlib.contextmanager
def early(wanted: bool) -> Iterator[None]:
    """Hold a server during the body, from before MPI starts, if one is ``wanted`` and can start."""
    held = None
    if wanted:
        with contextlib.suppress(OSError):
            held = hold()
    try:
        yield
    finally:
        if held is not None:
            release(held)


class WorkerServer:
    """The process of `hvdtrain.data.workers.server` and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("server.py"))
        with theirs:
            process = subprocess.Popen([sys.executable, "-I", script, str(theirs.fileno())], env=clean(os.environ),
                                       stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.pid, self._socket, self._process = process.pid, ours, process
        self.end = weakref.finalize(self, _end, process, ours, os.getpid())

    def ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, fds: Sequence[int], preload: Sequence[str]) -> int:
        """Fork a worker that gets ``fds``; return its process id."""
        return int(self._ask({"do": "fork", "path": [os.path.abspath(p) for p in sys.path], "preload": list(preload)},
                             fds)["pid"])

    def status(self, pid: int, do: str = "wait") -> int | None:
        """Return a worker's exit status as `subprocess.Popen.returncode`; None where unknown."""
        with contextlib.suppress(OSError):
            found = self._ask({"do": do, "pid": pid}, (), STATUS_S)["status"]
            return None if found is None else int(found)
        return None

    def kill(self, pid: int) -> None:
        self.status(pid, "kill")

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = (), most_s: float = ANSWER_S) -> dict[str, Any]:
        """Send a request and wait for the answer; kill a server that gives none, and its workers with it."""
        with _lock:
            self._socket.settimeout(most_s)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                self._process.kill()
                raise
        answer: dict[str, Any] = json.loads(data) if data else {"error": "the process that forks workers has ended"}
        if "error" in answer:
            raise OSError(answer["error"])
        return answer


def _end(process: Any, ours: socket.socket, owner: int) -> None:
    ours.close()
    if owner != os.getpid():
        return
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
