"""A contender's whole job as one thing that can be started, asked, suspended, resumed and ended.

Owns the processes. A job carries its number in the environment, by which all its processes on this machine are found,
also those that have left mpirun's process tree; ranks on other machines are ended by mpirun, but keep idling between
rounds. Does not know what is measured.
"""

from __future__ import annotations

import collections
import contextlib
import json
import queue
import signal
import subprocess
import threading
from typing import Any

from benchmarks.worker import MARK
from hvdtrain.core.processes import TERMINATE_S, Child, signal_all

LAST_LINES = 25
GRACE_S = 20.0
"""How long a job that was told to end may take before it is made to; in order it leaves no shared memory behind."""


class JobFailed(Exception):
    """A job ended or kept silent where it should have answered; ``lines`` are its last."""

    def __init__(self, name: str, how: str, lines: list[str]) -> None:
        self.name, self.how, self.lines = name, how, lines
        super().__init__(f"{name} {how}")


class Job:
    """A running job; ends with `end`, which may be called at any time and more than once."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        self.name = name
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._child = Child(argv, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Sort what the job says into messages and other lines."""
        assert self._child.process.stdout is not None
        for raw in self._child.process.stdout:
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
        """Return the next message, which must be ``event``; `JobFailed` where it does not come within ``timeout_s``."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"did not answer within {timeout_s:g} s") from None
        if message is None:
            self._child.ends_within(TERMINATE_S)
            raise self._failed(f"ended with exit status {self._child.process.returncode}")
        if message.get("event") != event:
            raise self._failed(f"said {message.get('event')!r} where {event!r} was awaited")
        return message

    def ask(self, order: str, event: str, timeout_s: float) -> dict[str, Any]:
        """Send a line and wait for its answer."""
        self._send(order)
        return self.wait(event, timeout_s)

    def suspend(self) -> None:
        """Stop every process of the job where it stands."""
        signal_all(self._child.mark, signal.SIGSTOP)

    def resume(self) -> None:
        """Let every process continue."""
        signal_all(self._child.mark, signal.SIGCONT)

    def quit(self) -> None:
        """Tell the job to end in order; `end` then waits for it. One that does not listen is left to `end`."""
        with contextlib.suppress(JobFailed):
            self.resume()
            self._send("quit")

    def end(self, grace_s: float = 0.0) -> None:
        """End the job: in order where it does so within ``grace_s``, else by force; no process is left here."""
        if not self._child.ends_within(grace_s):
            self.resume()
        self._child.end()
        self._reader.join(TERMINATE_S)
        for pipe in (self._child.process.stdin, self._child.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                assert pipe is not None
                pipe.close()

    def _send(self, line: str) -> None:
        pipe = self._child.process.stdin
        assert pipe is not None
        try:
            pipe.write(f"{line}\n".encode())
            pipe.flush()
        except (OSError, ValueError):
            raise self._failed("does not listen any more") from None

    def _failed(self, how: str) -> JobFailed:
        return JobFailed(self.name, how, list(self._lines))
