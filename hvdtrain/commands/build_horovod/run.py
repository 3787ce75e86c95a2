"""Running a child whose output goes to a file, with progress, a deadline, and no survivor.

Owns the file and what is said of a child that failed. Knows nothing about Horovod.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.commands.build_horovod.progress import Display, Progress
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import Child

LAST_LINES = 20
POLL_S = 1.0


class ChildFailed(Exception):
    """A child ended badly: ``what`` it was, ``how`` it ended, and ``log``, the file with all that it said."""

    def __init__(self, what: str, how: str, log: Path) -> None:
        self.what, self.how, self.log = what, how, log
        super().__init__(f"{what} {how}")

    def report(self) -> str:
        """The last lines of the log, then what failed and where the whole log is."""
        return "\n".join([*self._last_lines(), f"{self.what} {self.how}. The whole log: {self.log}"])

    def told(self, expected: str, do: str) -> UserError:
        """Print the last lines of the log; the error to raise, whose ``do`` may speak of them."""
        print("\n".join(self._last_lines()), file=sys.stderr)
        return UserError(f"{self.what} {self.how}", expected, do)

    def _last_lines(self) -> list[str]:
        """Of the log; empty where it cannot be read."""
        try:
            return self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        except OSError:
            return []


def logged(what: str, argv: list[str], log: Path, env: dict[str, str], timeout_s: float,
           display: Display | None = None, cwd: Path | None = None) -> None:
    """Run ``argv``, append its output to ``log``; ChildFailed on a bad status or after ``timeout_s``.

    However this is left, also by an exception that a signal handler raises (`children.orderly_signals`), the child and
    all that it started are ended.
    """
    ends_at = time.monotonic() + timeout_s
    with log.open("a", encoding="utf-8") as out, log.open(encoding="utf-8", errors="replace") as said:
        out.write(f"$ {shlex.join(argv)}\n")
        out.flush()
        said.seek(0, os.SEEK_END)
        progress = Progress()
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
