"""The processes of one attempt on this host: started as a group of their own, and ended to the last one.

Owns the start of a launcher without a shell, the end of everything that carries the supervisor's token in its
environment (launchers give their ranks groups of their own, so the group alone does not hold them), and that the
launcher goes with the supervisor even where that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdtrain.cluster.launchers.spec import valid_name
from hvdtrain.cluster.liveness import causes
from hvdtrain.cluster.liveness.watch.system import catches
from hvdtrain.core.errors import UserError

GRACE_S = 3.0
"""From SIGTERM to SIGKILL: a launcher that is told ends its ranks, on other hosts too, in about half a second."""

ALONE_S = 1.0
"""What is left after the launcher's end has so long to end by itself."""

KILLED_S = 10.0
"""Longest wait for processes that were killed to be gone (one in a system call that hangs stays)."""

TICK_S = 0.05

_PR_SET_PDEATHSIG = 1


class Group:
    """One launcher and all that it started on this host; ``token``: what their environment has as HVDLAUNCH_JOB."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], token: str) -> None:
        """Start ``words``; `UserError` where that is impossible. Its input is empty."""
        self._mark = f"{causes.JOB}={token}".encode()
        # horovodrun hands every name to a shell; a name that is none (an exported function's, or worse) stays here.
        kept = {name: value for name, value in env.items() if valid_name(name)}
        try:
            self._child = subprocess.Popen(list(words), env=kept, stdin=subprocess.DEVNULL, start_new_session=True,
                                           preexec_fn=_dies_with_parent())
        except OSError as error:
            raise UserError(f"{words[0]} cannot be started: {error.strerror}", "a launcher that runs",
                            "see what it is; a command line of more than 128 KiB in one word is too long") from None

    def status(self) -> int | None:
        """The launcher's exit status (negative: the signal that ended it); None while it runs."""
        return self._child.poll()

    def tell(self, number: int) -> None:
        """Send the launcher alone a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(number)

    def tell_rank(self, pid: int, number: int) -> bool:
        """Send a rank on this host a signal, if ``pid`` is one of this attempt's processes and has a handler for it.

        Return whether it was sent.
        """
        if pid not in self.processes() or not catches(pid, number):
            return False
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            return True
        return False

    def processes(self) -> list[int]:
        """Every process on this host that was started by this supervisor."""
        return [pid for pid in _numbers() if pid != os.getpid() and self._mark in _environment(pid)]

    def end(self, grace_s: float = GRACE_S) -> float:
        """End all processes: SIGTERM, ``grace_s``, SIGKILL; return the seconds it took.

        After the launcher's own end the rest has `ALONE_S` first: watchers then write down which rank was lost.
        """
        begin = time.monotonic()
        while self._child.poll() is not None and self.processes() and time.monotonic() < begin + ALONE_S:
            time.sleep(TICK_S)
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_S)):
            if self._all_gone():
                break
            self._send(number)
            ends_at = time.monotonic() + wait_s
            while not self._all_gone() and time.monotonic() < ends_at:
                time.sleep(TICK_S)
        return time.monotonic() - begin

    def _all_gone(self) -> bool:
        return self._child.poll() is not None and not self.processes()

    def _send(self, number: int) -> None:
        # The launcher first, and alone where it can still do the work: it reaches its ranks on other hosts too.
        if self._child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, number)
            if number == signal.SIGTERM:
                return
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def _dies_with_parent() -> Callable[[], None]:
    """What a child does before it becomes the launcher: ask the system for SIGTERM when its parent is gone.

    SIGTERM, not SIGKILL: the launcher then ends its ranks, on all hosts.
    """
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it went before the question
            os._exit(1)

    return ask


def _numbers() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """The variables that a process was started with; none of one that is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
