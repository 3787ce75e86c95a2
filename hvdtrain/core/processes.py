"""Child processes that leave nothing behind, signals as exits, and polling that yields the core.

Owns how a child is started and ended; a child's mark is in its environment and so in that of all that it starts, also
of ranks, which mpirun puts into process groups of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

JOB = "JOB_OF_HVDTRAIN"
"""Name of the environment variable; HVDTRAIN_... would be a key of the configuration."""

TERMINATE_S = 3.0
"""How long mpirun may take to end its ranks before everything is killed."""

C = TypeVar("C", bound="Child")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def processes(mark: str, variable: str = JOB) -> list[int]:
    """Return the ids of the living processes of this host whose ``variable`` is ``mark``; [] without psutil."""
    try:
        import psutil
    except ImportError:  # hvdtrain build may come before hvdtrain's other needs; it ends the process group too
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def signal_all(mark: str, number: int, variable: str = JOB) -> int:
    """Send a signal to every process that carries ``mark``; return their number."""
    count = 0
    for process in processes(mark, variable):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
            count += 1
    return count


def kill_all(mark: str, variable: str = JOB) -> None:
    """Kill every process that carries ``mark``."""
    for _ in range(3):  # a process may have started another while it was looked for
        if not signal_all(mark, signal.SIGKILL, variable):
            return
        time.sleep(0.05)


class Child:
    """A child in a session of its own, from ``argv`` and ``env``; leaving the context ends it and all that it started.

    ``variable``: of its environment, whose value ``mark`` (default: a random one) finds its processes. ``death``: the
    signal it gets when this process ends. ``options``: of `subprocess.Popen`; without one it has no input.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], variable: str = JOB, mark: str = "",
                 death: int = signal.SIGKILL, **options: Any) -> None:
        self.variable, self.mark = variable, mark or uuid.uuid4().hex
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            list(argv), env={**env, variable: self.mark}, start_new_session=True, preexec_fn=die_with_parent(death),
            **{"stdin": subprocess.DEVNULL, **options})

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def ends_within(self, seconds: float) -> bool:
        """Return whether it ends by itself within so many seconds."""
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, terminate_s: float = TERMINATE_S) -> None:
        """End it, and whatever it left running; it has ``terminate_s`` after SIGTERM, 0 for none. May be repeated."""
        try:
            if terminate_s and self.process.poll() is None:
                self.process.terminate()  # mpirun then ends its ranks, wherever they are, and takes its files away
                self.ends_within(terminate_s)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)  # nobody else is in its group
            kill_all(self.mark, self.variable)
            self.process.wait()


class CapturedChild(Child):
    """Child whose output and errors go to files, which can be read until the context is left."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]
        super().__init__(argv, env, stdout=self._files[0], stderr=self._files[1], **options)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for file in self._files:
            file.close()

    def texts(self) -> list[str]:
        """Return what the child has written: [output, errors]."""
        # By pread: the child writes at the offset that it shares with these files.
        return [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
                for file in self._files]


def die_with_parent(death: int = signal.SIGKILL) -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that sends a child ``death`` when this process ends, however; None beyond Linux.

    The ranks of an mpirun that is killed notice and end. It is the calling thread whose end counts.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()  # looked up before the fork

    def before_exec() -> None:
        prctl(_DEATH_SIGNAL, int(death), 0, 0, 0)
        if os.getppid() != parent:  # it went away before it could be told
            os._exit(1)

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


SPINS = 50
"""Polls before a wait begins to let other processes run."""

AWAKE_S = 200e-6
"""How long a wait polls before it sleeps. Longer than a sleep lasts (50 us of timer slack more than asked for), or two
ranks that once slept would keep each other asleep at every later call."""

FIRST_SLEEP_S = 20e-6


def wait_for(test: Callable[[], bool], limit_s: float = float("inf"), longest_sleep_s: float = 200e-6) -> bool:
    """Poll ``test`` until it is true; False once ``limit_s`` have passed.

    Spins at first, then yields the core between polls, then sleeps 20 us, growing to ``longest_sleep_s``.
    """
    for _ in range(SPINS):
        if test():
            return True
    started = time.monotonic()
    while time.monotonic() - started < AWAKE_S:
        if test():
            return True
        os.sched_yield()
    pause_s = FIRST_SLEEP_S
    while not test():
        if time.monotonic() - started > limit_s:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_sleep_s)
    return True
