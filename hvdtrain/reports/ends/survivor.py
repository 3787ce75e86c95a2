"""The process that outlives rank 0: when that is gone, it notes the failure and has the report page written.

``python -I -S survivor.py OUT PID ROOT``. It waits for the end of process PID, or for a byte on its standard input:
`WRITE`, to write the page soon, or `QUIT`, since rank 0 has done all. Reads and writes in OUT alone, changes nothing of
the job, and nobody waits for it. Standard library only; ROOT is where the package lies.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

WRITE, QUIT = b"w", b"q"

LATER_S = 2.0
"""From rank 0's end to the page: the other ranks end meanwhile, and a supervisor may have written the page by then."""

LONGEST_S = 120.0
"""How long the writing of a page may take."""

NICE = 10
"""A job that starts again comes first."""


def main(out: Path, pid: int, root: str) -> None:
    """Wait for rank 0's end, then tell it."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    word = await_end(pid)
    if word == QUIT:
        return
    ended = time.time()
    if word != WRITE:
        from hvdtrain.reports.ends import words

        with contextlib.suppress(OSError):
            words.append(out, {"error": words.SILENT, "rank": 0})
    time.sleep(LATER_S)
    from hvdtrain.core import RunFiles

    with contextlib.suppress(OSError):
        if (out / RunFiles.REPORT).stat().st_mtime > ended:
            return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command(out), env=environment(root), cwd="/", timeout=LONGEST_S, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def await_end(pid: int) -> bytes:
    """Return `WRITE` or `QUIT` as process ``pid`` says it; b"" once it is gone without a word."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return os.read(0, 1)
    if os.getppid() != pid:  # it went before the question, and its number may be another's now
        return os.read(0, 1) if select.select([0], [], [], 0)[0] else b""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if 0 in ready:
            word = os.read(0, 1)
            if word:
                return word
            poll.unregister(0)  # let go by rank 0, or held open by a child of its own: its end is what counts
        if process in ready:
            return b""


def command(out: Path) -> list[str]:
    """The command line that writes the page of the run in ``out``."""
    return [sys.executable, "-m", "hvdtrain", "report", os.path.abspath(out)]


def environment(root: str) -> dict[str, str]:
    """What a process of the page gets: nothing of the job, whose processes are known by their variables."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
            if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[3])
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
