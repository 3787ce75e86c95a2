"""How a build is shown: one line that moves on a terminal, a line now and then elsewhere; the log has all the
rest.

Owns the reading of a build's output (phase, percent) and its display. Starts and stops nothing.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from typing import TextIO

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
class Progress:
    """What the output has said so far: ``phase`` and ``percent`` (0 to 100, never falling)."""

    phase: str = "start"
    percent: int = 0

    def read(self, line: str) -> None:
        """Take one line of the build's output."""
        match = _PERCENT.match(line)
        if match:
            self.percent = max(self.percent, min(100, int(match.group(1))))
        for pattern, phase in _PHASES:
            if pattern.match(line):
                self.phase = phase
                return


def clock(seconds: float) -> str:
    """"3:07" from 187.4."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Display:
    """Shows a Progress on ``stream``: rewritten once a second on a terminal, every 30 s or new phase
    elsewhere; nothing before ``after_s``.
    """

    def __init__(self, what: str, stream: TextIO | None = None, after_s: float = 0.0) -> None:
        self.what, self.stream = what, stream or sys.stdout
        self.live = self.stream.isatty()
        self.after_s = after_s
        self.started = time.monotonic()
        self.last_s, self.last_text = -SPARSE_EVERY_S, ""

    def elapsed_s(self) -> float:
        """Seconds since this display was made."""
        return time.monotonic() - self.started

    def show(self, progress: Progress) -> None:
        """Say where the build is, if it is time to say so."""
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
        """Take the moving line away."""
        if self.live and self.elapsed_s() >= self.after_s:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()

    def end(self, how: str) -> None:
        """Close the moving line with the outcome and the time."""
        lead = "\r\x1b[2K" if self.live else ""
        print(f"{lead}{self.what}: {how} in {clock(self.elapsed_s())}", file=self.stream, flush=True)
