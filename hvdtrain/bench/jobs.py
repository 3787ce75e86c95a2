"""A contender's whole job as one thing that can be started, asked, suspended, resumed and ended.

Owns the processes. A job carries its number in the environment, by which all its processes on this machine are found,
also those that have left mpirun's process tree; ranks on other machines are ended by mpirun, but go on idling between
rounds. Does not know what is measured.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain.bench.worker import MARK

JOB = "BENCH_JOB_OF_HVDTRAIN"
"""Name of the environment variable; HVDTRAIN_... would be a key of the configuration."""

LAST_LINES = 25
GRACE_S = 20.0
"""How long a job that was told to end may take before it is made to; in order it leaves no shared memory behind."""

TERMINATE_S = 3.0
"""How long mpirun may take to end its ranks before everything is killed."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class JobFailed(Exception):
    """A job ended or kept silent where it should have answered; ``lines`` are its last."""

    def __init__(self, name: str, how: str, lines: list[str]) -> None:
        self.name, self.how, self.lines = name, how, lines
        super().__init__(f"{name} {how}")


class Job:
    """One running job; ends with `end`, which may be called at any time and more than once."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        self.name, self._mark = name, uuid.uuid4().hex
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       env={**env, JOB: self._mark}, start_new_session=True,
                                       preexec_fn=_die_with_parent())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Sort what the job says into messages and other lines."""
        assert self._child.stdout is not None
        for raw in self._child.stdout:
            line = raw.decode(errors="replace").rstrip()
            _, mark, text = line.partition(MARK)
            try:
                message = json.loads(text) if mark else None
            except ValueError:  # another rank's output in the middle: the wait for this message will run out
                message = None
            if message is not None:
                self._messages.put(message)
            elif line:
                self._lines.append(line)
        self._messages.put(None)

    def wait(self, event: str, timeout_s: float) -> dict[str, Any]:
        """The next message, which must be ``event``; `JobFailed` where it does not come within ``timeout_s``."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"did not answer within {timeout_s:g} s") from None
        if message is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(TERMINATE_S)
            raise self._failed(f"ended with exit status {self._child.returncode}")
        if message.get("event") != event:
            raise self._failed(f"said {message.get('event')!r} where {event!r} was awaited")
        return message

    def ask(self, order: str, event: str, timeout_s: float) -> dict[str, Any]:
        """Send a line and wait for its answer."""
        self._send(order)
        return self.wait(event, timeout_s)

    def suspend(self) -> None:
        """Stop every process of the job where it stands."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let every process go on."""
        self._signal(signal.SIGCONT)

    def quit(self) -> None:
        """Tell the job to end in order; `end` then waits for it. One that does not listen is left to `end`."""
        with contextlib.suppress(JobFailed):
            self.resume()
            self._send("quit")

    def end(self, grace_s: float = 0.0) -> None:
        """End the job: in order where it does so within ``grace_s``, else by force; no process is left here."""
        if not self._ended(grace_s):
            self.resume()
            self._child.terminate()  # mpirun then ends its ranks, wherever they are, and takes its files away
            self._ended(TERMINATE_S)
        for _ in range(3):  # a process may have started another while it was looked for
            if not self._signal(signal.SIGKILL):
                break
            time.sleep(0.05)
        self._child.wait()
        self._reader.join(TERMINATE_S)
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError, ValueError):
                assert pipe is not None
                pipe.close()

    def _ended(self, within_s: float) -> bool:
        """Whether the launcher ends by itself within so many seconds."""
        try:
            self._child.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, line: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(f"{line}\n".encode())
            self._child.stdin.flush()
        except (OSError, ValueError):
            raise self._failed("does not listen any more") from None

    def _signal(self, number: int) -> int:
        """Send a signal to every process of the job; how many there were."""
        count = 0
        for process in processes(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
                count += 1
        return count

    def _failed(self, how: str) -> JobFailed:
        return JobFailed(self.name, how, list(self._lines))


def processes(mark: str) -> list[int]:
    """Ids of the living processes of this machine that carry ``mark``."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(JOB) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _die_with_parent() -> Callable[[], None] | None:
    """What lets mpirun end with this process, even where that is killed; its ranks then end too. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork

    def before_exec() -> None:
        prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)

    return before_exec


@contextlib.contextmanager
def orderly_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that whoever holds jobs ends them; main thread only."""
    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
