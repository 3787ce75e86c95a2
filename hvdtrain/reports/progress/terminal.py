"""Finds the terminal that a person looks at: this process' own, or under a launcher the launcher's.

Ranks under mpirun have pseudo-terminals even where mpirun's own output goes to a file, so their own says nothing; what
their launcher writes to does. It is opened anew, through /proc, since launchers put tags and line ends into what they
pass on. Writes wait for nobody: a person who holds the terminal (Ctrl-S) must not hold a job.
"""

from __future__ import annotations

import contextlib
import os
import select
import termios
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from hvdtrain.core.terminal import Stdout

LAUNCHERS = frozenset(("mpirun", "mpiexec", "orterun", "prterun", "prun", "horovodrun", "mpiexec.hydra"))
"""Programs whose output is what a person sees of a job's ranks."""

WAIT_S = 0.2
"""Longest time for which a terminal that takes nothing is waited for; what is left then is dropped."""


class Terminal(Protocol):
    """A text stream that rich can write to, and its width."""

    encoding: str

    def write(self, text: str) -> int:
        """Write, or drop; raises nothing."""
        ...

    def flush(self) -> None:
        """Flush; raises nothing."""
        ...

    def isatty(self) -> bool:
        """Return whether a person may look at it."""
        ...

    def columns(self) -> int:
        """Return its width now; 80 where it does not tell."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def find(env: Mapping[str, str], launched: bool) -> Terminal | None:
    """Return the terminal to draw on; None where lines are the better choice: a file, a pipe, CI, a dumb terminal.

    ``launched``: this is a rank under an MPI launcher.
    """
    if not moves(env):
        return None
    if launched:
        return of_launcher(os.getppid())
    mine = OwnTerminal()
    return mine if mine.isatty() else None


def moves(env: Mapping[str, str]) -> bool:
    """Return whether a line can be drawn anew here, by ``TERM`` and ``CI`` (whose terminals only feed a log)."""
    return env.get("TERM", "") not in ("", "dumb", "unknown") and env.get("CI", "").lower() not in ("1", "true")


class OwnTerminal(Stdout):
    """This process' standard output."""

    def columns(self) -> int:
        """Return its width now; 80 where it does not tell."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return _columns(self._stream.fileno())
        return 80

    def close(self) -> None:
        """Leave it open: it is everybody's."""


class Opened:
    """A terminal opened by its path in /proc; its own open file, so that not to wait is nobody else's setting."""

    encoding = "utf-8"

    def __init__(self, path: str) -> None:
        """Open it; OSError where that is impossible, or it would stop who writes in the background (stty tostop)."""
        self._fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not os.isatty(self._fd) or termios.tcgetattr(self._fd)[3] & termios.TOSTOP:
                raise OSError(f"{path} is no terminal to draw on")
        except (OSError, termios.error) as error:
            os.close(self._fd)
            raise OSError(str(error)) from None

    def write(self, text: str) -> int:
        """Write what the terminal takes within `WAIT_S`."""
        data, until = memoryview(text.encode(errors="replace")), time.monotonic() + WAIT_S
        with contextlib.suppress(OSError, ValueError):
            while data and self._fd >= 0:
                try:
                    data = data[os.write(self._fd, data):]
                except BlockingIOError:
                    if not select.select([], [self._fd], [], max(0.0, until - time.monotonic()))[1]:
                        break
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def isatty(self) -> bool:
        """Return True: it was looked at when it was opened."""
        return True

    def columns(self) -> int:
        """Return its width now; 80 where it does not tell."""
        return _columns(self._fd)

    def close(self) -> None:
        """Close it; what is written later is dropped."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def of_launcher(parent: int) -> Terminal | None:
    """Return the terminal that the nearest launcher above process ``parent`` (or it) writes to; None where it is none.

    None also where no launcher is above it, as on the hosts that mpirun reaches through ssh.
    """
    for pid in _upwards(parent):
        if LAUNCHERS.intersection(_names(pid)):
            with contextlib.suppress(OSError):
                return Opened(f"/proc/{pid}/fd/1")
            return None
    return None


def _columns(fd: int) -> int:
    with contextlib.suppress(OSError):
        return os.get_terminal_size(fd).columns or 80
    return 80


def _upwards(pid: int) -> Iterator[int]:
    """``pid``, its parent and so on, but for the first process of the system."""
    while pid > 1:
        yield pid
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def _names(pid: int) -> set[str]:
    """What a process may be called by: its program, or the script that an interpreter runs."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:2]
    except OSError:
        return set()
    return {os.path.basename(word).decode(errors="replace") for word in words}


def line_terminal(kind: str, launched: bool, env: Mapping[str, str] = os.environ) -> Any:
    """Return the terminal for config ``progress`` of ``kind``; None where lines are to be printed, or nothing.

    "rich" draws also where no terminal is found.
    """
    if kind not in ("auto", "rich"):
        return None
    return find(env, launched) or (OwnTerminal() if kind == "rich" else None)
