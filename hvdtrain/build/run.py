"""Running a child whose output goes to a file, with progress, a deadline, and no survivor.

Owns the child, its process group and all that it starts. Knows nothing about Horovod.
"""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TextIO

from hvdtrain.build.children import TERMINATE_S, die_with_parent, ends_within, kill_all, marked
from hvdtrain.build.progress import Display, Progress

LAST_LINES = 20


class ChildFailed(Exception):
    """A child ended badly: ``what`` it was, ``how`` it ended, and ``log``, the file with all that it said."""

    def __init__(self, what: str, how: str, log: Path) -> None:
        self.what, self.how, self.log = what, how, log
        super().__init__(f"{what} {how}")

    def report(self) -> str:
        """The last lines of the log, then what failed and where the whole log is."""
        return "\n".join([*tail(self.log), f"{self.what} {self.how}. The whole log: {self.log}"])


def tail(log: Path, lines: int = LAST_LINES) -> list[str]:
    """The last ``lines`` lines of a file, empty where it cannot be read."""
    try:
        return log.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def logged(what: str, argv: list[str], log: Path, env: dict[str, str], timeout_s: float,
           display: Display | None = None, cwd: Path | None = None) -> None:
    """Run ``argv``, append its output to ``log``; ChildFailed on a bad status or after ``timeout_s``.

    However this is left, also by an exception that a signal handler raises (`children.orderly_signals`), the child and
    all that it started are ended.
    """
    progress, lines = Progress(), queue.Queue[str | None]()
    mark, env = marked(env)
    with log.open("a", encoding="utf-8", errors="replace") as out:
        out.write(f"$ {shlex.join(argv)}\n")
        out.flush()
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, env=env, cwd=cwd, text=True, errors="replace",
                                 start_new_session=True, preexec_fn=die_with_parent())
        threading.Thread(target=_pump, args=(child, lines), daemon=True).start()
        deadline = time.monotonic() + timeout_s
        try:
            _follow(lines, out, progress, display, deadline)
            code = child.wait(max(0.1, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise ChildFailed(what, f"took more than {timeout_s:.0f} s", log) from None
        finally:
            _end(child, mark)
    if code != 0:
        raise ChildFailed(what, f"failed with exit status {code}", log)


def _pump(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def _follow(lines: queue.Queue[str | None], out: TextIO, progress: Progress, display: Display | None,
            deadline: float) -> None:
    """Copy lines to the log until the child closes its output; TimeoutError at ``deadline``."""
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            line = ""
        if line is None:
            return
        if line:
            out.write(line)
            out.flush()
            progress.read(line)
        if display is not None:
            display.show(progress)
        if time.monotonic() > deadline:
            raise TimeoutError


def _end(child: subprocess.Popen[str], mark: str) -> None:
    """End the child and whatever it left running; it had a session of its own, so nobody else is in its group."""
    try:
        if child.poll() is None:
            child.terminate()  # mpirun then ends its ranks and takes its files away
            ends_within(child, TERMINATE_S)
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        kill_all(mark)
        child.wait()
