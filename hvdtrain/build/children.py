"""What is needed to leave no child behind: a mark that finds all its processes, a death signal, signals as exits.

Owns no child: `hvdtrain.build.run` and `hvdtrain.bench.jobs` start and end theirs with this. A child's mark is in its
environment and so in that of all that it starts, also of ranks, which mpirun puts into process groups of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

JOB = "JOB_OF_HVDTRAIN"
"""Name of the environment variable; HVDTRAIN_... would be a key of the configuration."""

TERMINATE_S = 3.0
"""How long mpirun may take to end its ranks before everything is killed."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def marked(env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """(a mark of its own, ``env`` with it) for one child."""
    mark = uuid.uuid4().hex
    return mark, {**env, JOB: mark}


def processes(mark: str) -> list[int]:
    """Ids of the living processes of this machine that carry ``mark``; none are found without psutil."""
    try:
        import psutil
    except ImportError:  # hvdtrain build may come before hvdtrain's other needs; it ends the process group too
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(JOB) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def signal_all(mark: str, number: int) -> int:
    """Send a signal to every process that carries ``mark``; how many there were."""
    count = 0
    for process in processes(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
            count += 1
    return count


def kill_all(mark: str) -> None:
    """Kill every process that carries ``mark``."""
    for _ in range(3):  # a process may have started another while it was looked for
        if not signal_all(mark, signal.SIGKILL):
            return
        time.sleep(0.05)


def ends_within(child: subprocess.Popen[Any], seconds: float) -> bool:
    """Whether a child ends by itself within so many seconds."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def die_with_parent() -> Callable[[], None] | None:
    """A ``preexec_fn`` by which a child is killed when this process is, however that happens; None beyond Linux.

    The ranks of an mpirun that is killed notice and end. It is the calling thread whose end counts.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()  # looked up before the fork

    def before_exec() -> None:
        prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it went away before it could be told
            os.kill(os.getpid(), signal.SIGKILL)

    return before_exec


@contextlib.contextmanager
def orderly_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that whoever holds children ends them; main thread only."""
    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that is ignored on purpose (nohup) stays so.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
