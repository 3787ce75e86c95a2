"""Fork a rank's workers in a process of one thread, without MPI and without a job's environment.

Run as a script with the number of a socket. Owns the workers' processes; when the rank closes its end of the socket or
ends, this process ends, and the workers with it.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")
"""What launchers and terminals send to all processes of a job: the rank decides what becomes of it."""

MOST_FDS = 16
LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1


def main(number: int) -> None:
    """Serve requests until the rank ends: ``fork`` with a worker's descriptors, ``wait`` for a status, ``kill``."""
    rank = os.getppid()
    for name in SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    control = socket.socket(fileno=number)
    ended: dict = {}
    alive: set = set()
    try:
        while os.getppid() == rank:
            _reap(alive, ended)
            if not select.select([control], [], [], LOOK_S)[0]:
                continue
            data, fds, _, _ = socket.recv_fds(control, 1 << 20, MOST_FDS)
            if not data:
                return
            control.send(json.dumps(_answer(json.loads(data), fds, control, alive, ended)).encode())
    except OSError:
        return
    finally:
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _answer(request: dict, fds: list, control: socket.socket, alive: set, ended: dict) -> dict:
    try:
        if request["do"] == "fork":
            pid = _fork(request, fds, control)
            alive.add(pid)
            return {"pid": pid}
        if request["do"] == "kill":  # it may be within a fetch that never ends, and holds nothing that is needed
            os.kill(request["pid"], signal.SIGKILL)
        return {"status": _status(request["pid"], alive, ended)}
    except Exception as error:  # told to the rank, which decides
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for fd in fds:
            os.close(fd)


def _fork(request: dict, fds: list, control: socket.socket) -> int:
    sys.path[:] = request["path"]
    for name in request["preload"]:  # once for all workers; what fails here fails again in the worker, with its words
        with contextlib.suppress(Exception):
            __import__(name)
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with(server)
        control.close()
        from hvdtrain.data.workers.worker import work

        work(fds[0], fds[1], fds[2:])
    finally:
        os._exit(0)


def die_with(parent: int) -> None:
    """Have the kernel end this process when ``parent`` ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(0)


def _reap(alive: set, ended: dict) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        alive.discard(pid)
        ended[pid] = os.waitstatus_to_exitcode(status)


def _status(pid: int, alive: set, ended: dict) -> object:
    """Return a worker's exit status as `subprocess.Popen.returncode`; None while it runs."""
    for _ in range(100):
        _reap(alive, ended)
        if pid in ended:
            return ended[pid]
        select.select([], [], [], 0.01)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
