"""A bound on calls that cannot be interrupted, such as a blocking MPI call or Horovod's synchronize.

Owns one watchdog thread per process, which names the call, shows every Python stack and ends the job; `set_owner` gives
it the way to abort.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from hvdtrain.cluster.liveness import causes, pulse

EXIT_DEADLINE = 70
"""Exit status after a deadline ran out (EX_SOFTWARE of sysexits.h)."""

ABORT_GRACE_S = 5.0
"""Longest wait for the job's abort before this process ends itself."""


ELSEWHERE = "Another rank has ended, hangs, or is elsewhere in the program."

_STDERR = 2
"""File descriptor of the last message; tests, whose runner takes 2, put another here."""

LOCKED_GRACE_S = 1.0
"""How much later than its deadline a body that keeps Python's lock is ended."""


class _Watchdog:
    """The open deadlines and the thread that looks after them."""

    watches_forks = False

    def __init__(self) -> None:
        self.forget()
        self.who = ""
        self.abort: Callable[[int], None] | None = None

    def forget(self) -> None:
        """Reset to the state of a new process, also of a forked one: no thread and no deadline."""
        self.lock = threading.Condition(threading.Lock())
        self.open: dict[int, tuple[float, float, str]] = {}
        self.wakes_at = float("inf")
        self.thread: threading.Thread | None = None

    def arm(self, key: int, seconds: float, what: str) -> None:
        """Open a deadline; wakes the thread only if this one ends before the thread would look again."""
        ends_at = time.monotonic() + seconds
        with self.lock:
            if self.thread is None:
                self._start()
            self.open[key] = (ends_at, seconds, what)
            if ends_at < self.wakes_at:
                self.wakes_at = ends_at
                self.lock.notify()

    def disarm(self, key: int) -> None:
        """Close a deadline; the thread stays asleep."""
        with self.lock:
            self.open.pop(key, None)

    def _start(self) -> None:
        if not self.watches_forks:
            os.register_at_fork(after_in_child=self.forget)
            self.watches_forks = True
        self.thread = threading.Thread(target=self._watch, name="hvdtrain-deadline", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while True:
            with self.lock:
                now = time.monotonic()
                late = [entry for entry in self.open.values() if entry[0] <= now]
                if not late:
                    self.wakes_at = min((e[0] for e in self.open.values()), default=float("inf"))
                    self.lock.wait(None if self.wakes_at == float("inf") else self.wakes_at - now)
                    continue
            _expire(min(late), self.who, self.abort)


_watchdog = _Watchdog()


def set_owner(who: str, abort: Callable[[int], None] | None) -> None:
    """Set who this process is ("rank 1 on host a") and how to end the whole job; `hvdtrain.cluster.boot` calls it."""
    _watchdog.who, _watchdog.abort = who, abort


class deadline:  # reads as a statement: with deadline(60, "allreduce grad.0"):
    """Context: the body must end within ``seconds``, else the process and its job are ended with status 70.

    ``what`` names the wait in the message. Arming takes microseconds. Needs a body that lets go of Python's
    lock while it waits, as mpi4py's and Horovod's calls do.
    """

    __slots__ = ("seconds", "what")

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds, self.what = seconds, what

    def __enter__(self) -> deadline:
        _watchdog.arm(id(self), self.seconds, self.what)
        return self

    def __exit__(self, *exc: object) -> None:
        _watchdog.disarm(id(self))


class locked_deadline(deadline):
    """A `deadline` whose body may keep Python's lock, as MPI_Init does: the watchdog's thread could not run then.

    C code of `faulthandler` shows the stacks and ends this process with 1; the launcher then ends the job. One at a
    time, since there is one such timer.
    """

    __slots__ = ()

    def __enter__(self) -> locked_deadline:
        super().__enter__()
        # A little later than the watchdog's own, which says more where it can run.
        faulthandler.dump_traceback_later(self.seconds + LOCKED_GRACE_S, exit=True, file=2)
        return self

    def __exit__(self, *exc: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        super().__exit__(*exc)


def _expire(entry: tuple[float, float, str], who: str, abort: Callable[[int], None] | None) -> None:
    """Report the call that hung, show all stacks, abort the job; does not return."""
    _, seconds, what = entry
    name = who or f"process {os.getpid()} on host {socket.gethostname()}"
    text = (f"hvdtrain: {name}: {what} did not end within {seconds:g} s. {pulse.missing() or ELSEWHERE} Look for its "
            "error above, or raise control_timeout_s if the ranks are only slow. Stacks of this process:\n")
    try:
        pulse.leaving()
        causes.leave("hang", f"{what} did not end within {seconds:g} s. {pulse.missing()}")
        sys.stdout.flush()
        os.write(_STDERR, text.encode(errors="replace"))
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        if abort is not None:
            helper = threading.Thread(target=abort, args=(EXIT_DEADLINE,), name="hvdtrain-abort", daemon=True)
            helper.start()
            helper.join(ABORT_GRACE_S)
    finally:
        os._exit(EXIT_DEADLINE)
