"""The end of a run in its log and its report page, also where rank 0 was killed: the processes that write it.

Standard library only, since the process that outlives rank 0 has no site-packages. The page is made by the command
`python -m hvdtrain report`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvdtrain.core import RunFiles

WRITE, QUIT = b"w", b"q"

LATER_S = 2.0
"""From rank 0's end to the page: the other ranks end meanwhile, and a supervisor may have written the page by then."""

LONGEST_S = 120.0
"""How long the writing of a page may take."""

NICE = 10
"""A job that starts again comes first."""


START = "import sys; sys.path.insert(0, sys.argv[3]); from hvdtrain.reports.survivor import main; main(*sys.argv)"
"""Program of the process that outlives rank 0: ``python -I -S -c START OUT PID ROOT``, the parent of the package."""


def main(_: str, directory: str, process: str, root: str) -> None:
    """Wait for the end of rank 0, or its word; then note the failure and have the page written."""
    out, pid = Path(directory), int(process)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    word = await_end(pid)
    if word == QUIT:
        return
    ended = time.time()
    if word != WRITE:
        with contextlib.suppress(OSError):
            append(out, {"error": SILENT, "rank": 0})
    time.sleep(LATER_S)
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
    """Return the command line that writes the page of the run in ``out``."""
    return [sys.executable, "-m", "hvdtrain", "report", os.path.abspath(out)]


def start(out: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command that writes the page of the run in ``out``, apart from this process. OSError."""
    return subprocess.Popen(command(out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, start_new_session=True, **options)


def environment(root: str) -> dict[str, str]:
    """Return the environment of a process that writes the page, without the variables that mark the job's processes."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
            if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


MOST_TEXT = 2000
"""Characters of an error that are kept: its begin, which names it."""
TAIL_BYTES = 256 * 1024
"""So much of a log's end is read."""

SILENT = "the process of rank 0 has ended without a message: it was killed, or it ended with another rank"

_NAMED = re.compile(r"\brank (\d+) on host\b")


def failure(error: BaseException, rank: int) -> dict[str, Any]:
    """Return the record "failed" of what ``rank`` has met, with the rank that the error accuses, if any."""
    text = str(error).strip()
    accused = _NAMED.search(text)
    name = type(error).__name__
    return {"error": f"{name}: {text}"[:MOST_TEXT] if text else name, "rank": int(accused[1]) if accused else rank}


def last(lines: Iterable[bytes]) -> tuple[int, bool]:
    """Return (the step of a log's last record, whether its last fit has no end yet). Torn lines do not count."""
    step, is_open = 0, False
    for line in lines:
        try:
            row = json.loads(line)
            event, at = row["event"], row["step"]
        except (ValueError, KeyError, TypeError):
            continue
        step = at if isinstance(at, int) else step
        if event in ("start", "step"):
            is_open = True
        elif event in ("end", "failed"):
            is_open = False
    return step, is_open


def append(out: Path, values: dict[str, Any], again: bool = False) -> bool:
    """Add a "failed" record to a log without an end, or ``again``; return whether it was added. OSError."""
    path = out / RunFiles.LOG
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
        step, is_open = last(tail.split(b"\n"))
        if not is_open and not again:
            return False
        row = {"event": "failed", "time": round(time.time(), 3), "step": step, **values}
        fresh = b"" if tail.endswith(b"\n") else b"\n"
        os.write(descriptor, fresh + json.dumps(row).encode() + b"\n")
        return True
    finally:
        os.close(descriptor)


FINISH_S = 10.0
"""How long the page of a run's end is waited for, when everything else is over."""


class Writer:
    """Writes pages of one run, one at a time; none of it raises."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, out: Path) -> None:
        """Begin to write the page of the run in ``out``; one that is still being written is given up for it."""
        self.end(0.0)
        with contextlib.suppress(OSError):
            if (out / RunFiles.LOG).exists():  # else it is no run of ours
                # The job that starts again comes first: hence the preexec_fn.
                self._child = start(out, preexec_fn=lambda: os.nice(NICE))

    def end(self, wait_s: float = FINISH_S) -> None:
        """Return when the page is written; after ``wait_s`` it is given up."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            child.wait(wait_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
