"""Child processes with output to a log, progress on the terminal and a deadline. Knows nothing of Horovod."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import Child

LAST_LINES = 20
POLL_S = 1.0


class ChildFailed(Exception):
    """``what``: the child. ``how``: how it ended. ``log``: the file with all of its output."""

    def __init__(self, what: str, how: str, log: Path) -> None:
        self.what, self.how, self.log = what, how, log
        super().__init__(f"{what} {how}")

    def report(self) -> str:
        """Return the last lines of the log, then what failed and where the whole log is."""
        return "\n".join([*self._last_lines(), f"{self.what} {self.how}. The whole log: {self.log}"])

    def user_error(self, expected: str, do: str) -> UserError:
        """Print the last lines of the log; return the error to raise."""
        print("\n".join(self._last_lines()), file=sys.stderr)
        return UserError(f"{self.what} {self.how}", expected, do)

    def _last_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        except OSError:
            return []


def logged(what: str, argv: list[str], log: Path, env: dict[str, str], timeout_s: float,
           display: Display | None = None, cwd: Path | None = None) -> None:
    """Run ``argv``, append its output to ``log``; `ChildFailed` on a bad status or after ``timeout_s``.

    However this is left, also by an exception of a signal handler, the child and all that it started are ended.
    """
    ends_at = time.monotonic() + timeout_s
    with log.open("a", encoding="utf-8") as out, log.open(encoding="utf-8", errors="replace") as said:
        out.write(f"$ {shlex.join(argv)}\n")
        out.flush()
        said.seek(0, os.SEEK_END)
        progress = BuildProgress()
        with Child(argv, env, stdout=out, stderr=subprocess.STDOUT, cwd=cwd) as child:
            while not child.ends_within(min(POLL_S, ends_at - time.monotonic())):
                for line in said if display is not None else ():
                    progress.read(line)
                if display is not None:
                    display.show(progress)
                if time.monotonic() > ends_at:
                    break
            code = child.process.returncode
        if display is not None:
            display.clear()
    if code is None:
        raise ChildFailed(what, f"took more than {timeout_s:.0f} s", log)
    if code != 0:
        raise ChildFailed(what, f"failed with exit status {code}", log)


SPARSE_EVERY_S = 30.0
SILENT_S = 3.0
"""What takes no longer is not shown, but for the build itself."""
_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
_PHASES = (
    (re.compile(r"^\s*\[\s*\d{1,3}%\] Linking"), "link"),
    (re.compile(r"^\s*\[\s*\d{1,3}%\]"), "compile"),
    (re.compile(r"^\s*-- The CXX compiler|^\s*Running CMake"), "configure"),
    (re.compile(r"^\s*(creating|adding) '?horovod.*|^\s*Created wheel"), "pack"),
    (re.compile(r"^\s*(Processing|Preparing metadata|Running command)"), "prepare"),
)


@dataclass
class BuildProgress:
    """``phase`` and ``percent`` (0 to 100, never falling) of a build, from its output."""

    phase: str = "start"
    percent: int = 0

    def read(self, line: str) -> None:
        match = _PERCENT.match(line)
        if match:
            self.percent = max(self.percent, min(100, int(match.group(1))))
        for pattern, phase in _PHASES:
            if pattern.match(line):
                self.phase = phase
                return


def clock(seconds: float) -> str:
    """Return 187.4 as "3:07"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Display:
    """Progress on ``stream``: rewritten each second on a terminal, every 30 s elsewhere; nothing before ``after_s``."""

    def __init__(self, what: str, stream: TextIO | None = None, after_s: float = 0.0) -> None:
        self.what, self.stream = what, stream or sys.stdout
        self.live = self.stream.isatty()
        self.after_s = after_s
        self.started = time.monotonic()
        self.last_s, self.last_text = -SPARSE_EVERY_S, ""

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def show(self, progress: BuildProgress) -> None:
        passed = self.elapsed_s()
        if passed < self.after_s:
            return
        text = f"{self.what}: {progress.phase}" + (f" {progress.percent}%" if progress.percent else "")
        if self.live:
            self.stream.write(f"\r\x1b[2K{text}  {clock(passed)}")
            self.stream.flush()
        elif passed - self.last_s >= SPARSE_EVERY_S:
            if text != self.last_text or passed - self.last_s >= 2 * SPARSE_EVERY_S:
                print(f"{text}  {clock(passed)}", file=self.stream, flush=True)
                self.last_s, self.last_text = passed, text

    def clear(self) -> None:
        if self.live and self.elapsed_s() >= self.after_s:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()

    def end(self, how: str) -> None:
        """Close the moving line with the outcome and the time."""
        lead = "\r\x1b[2K" if self.live else ""
        print(f"{lead}{self.what}: {how} in {clock(self.elapsed_s())}", file=self.stream, flush=True)
