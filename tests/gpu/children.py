"""Child processes, one at a time, with a limit, output in a file, and no process left afterwards.

Owns the end of a child: its session is ended, and so is every process that carries the mark of this check in its
environment, which a launcher may have put into sessions of their own. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "GPU_CHECK_MARK"
GRACE_S = 3.0
"""Between the request to end and the kill."""


@dataclass(frozen=True)
class Ended:
    """End of a child: ``code`` is None where it took longer than its limit."""

    code: int | None
    seconds: float
    log: Path

    def last_lines(self, most: int = 60) -> list[str]:
        """Return the end of what it said."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [line for line in text.splitlines() if line.strip()][-most:]


def run(argv: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str], cwd: Path) -> Ended:
    """Run ``argv`` for at most ``limit_s`` seconds, its output appended to ``log``; nothing of it survives."""
    mark, begin = secrets.token_hex(8), time.monotonic()
    with log.open("ab") as out:
        try:
            child = subprocess.Popen(list(argv), cwd=cwd, env={**env, MARK: mark}, stdin=subprocess.DEVNULL, stdout=out,
                                     stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            out.write(f"{argv[0]} cannot be started: {error}\n".encode())
            return Ended(127, 0.0, log)
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(limit_s)
        finally:  # also where this check itself is interrupted
            end(child, mark)
    return Ended(code, time.monotonic() - begin, log)


def end(child: subprocess.Popen[bytes], mark: str) -> None:
    """End the child and all that carries its mark: first asked, then killed."""
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()
    until = time.monotonic() + GRACE_S
    while (left := marked(mark)) and time.monotonic() < until:  # a killed process takes a moment to go
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def marked(mark: str, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes whose environment carries ``mark``."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
