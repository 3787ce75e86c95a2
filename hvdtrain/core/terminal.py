"""Print lines to a stdout that may be closed, full or absent.

Owns the one way in which a run prints. Knows nothing of terminals and progress lines.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

_UNREAD = (OSError, ValueError, AttributeError)
"""What writing to a stdout raises that is full, closed, or none at all (Python's stdout is then None)."""


def say(line: str) -> None:
    """Print one line in one write (mpirun tags every write), and go on where nobody reads any more.

    A run must not end because the reader of its output did, such as ``| head`` or a full disk.
    """
    try:
        try:
            sys.stdout.write(line + "\n")
        except UnicodeEncodeError:
            sys.stdout.write(escaped(line, sys.stdout) + "\n")
        sys.stdout.flush()
    except _UNREAD:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def escaped(text: str, stream: Any) -> str:
    """Return ``text`` with escapes in place of what the encoding of ``stream`` does not hold."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Stdout:
    """Passes on to the stdout of now what a library prints, and drops what that does not take.

    rich ends the program where it meets a broken pipe.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._stream: Any = sys.stdout
        self.encoding = getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(*_UNREAD):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(escaped(text, self._stream))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*_UNREAD):
            self._stream.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(*_UNREAD):
            return bool(self._stream.isatty())
        return False
