"""Progress of operations over MPI while the program computes: MPI moves a message only while somebody calls it.

Owns the open requests, their follow-ups, and the one thread of a process that calls MPI for them while nobody waits.
Collectives are `hvdtrain.comm.collectives.rounds`', messages of a pipeline `hvdtrain.cluster.messages.carrier`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hvdtrain.core.processes import wait_for

MOST_OPEN = 64
"""Operations under way at once."""

SEQUENCES = 256
"""Operations whose messages have tags of their own: one waits until the one so many before it is over, however long
that takes, or messages of the two would be taken for each other's."""

AWAKE_S, ASLEEP_S = 100e-6, 400e-6
"""Sleep of the thread between two calls of MPI: after one that moved something, and at most."""

LONGEST_SLEEP_S = 200e-6
"""Longest sleep of a waiting thread between two calls."""

_of_process: list[MpiProgress] = []


def progress_of_process() -> MpiProgress:
    """Return the progress of all operations of this process; MPI has been started."""
    if not _of_process:
        from mpi4py import MPI

        _of_process.append(MpiProgress(MPI.Query_thread() >= MPI.THREAD_MULTIPLE))
    return _of_process[0]


class Operation:
    """An operation under way; ``over`` once it has its ``value`` or its ``error``. ``place``: number in its process.

    A subclass posts requests in `begin` and in what follows on them, and calls `end`. All of that runs in whatever
    thread moves the operations, one call at a time.
    """

    def __init__(self) -> None:
        self.over = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.followers: list[Callable[[Operation], None]] = []
        self.place = 0

    def begin(self) -> None:
        raise NotImplementedError

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Take the result; the first call counts."""
        if not self.over:
            self.value, self.error, self.over = value, error, True
            for follower in self.followers:
                follower(self)


class MpiProgress:
    """Operations under way, begun in the order in which they were issued.

    ``threaded``: a thread moves them while nobody waits; else they move only while somebody does. Whoever waits for an
    operation moves all of them, so that one which is waited for at once changes no thread. Nothing spins.
    """

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded
        self._moving = threading.Lock()
        self._changed = threading.Condition()
        self._fresh: deque[Operation] = deque()
        self._open: list[Operation] = []
        self._requests: list[Any] = []
        self._then: list[tuple[Operation, Callable[[], None]]] = []
        self._waiters = self._issued = 0
        self._thread: threading.Thread | None = None

    def issue(self, operation: Operation, beside: bool = True) -> None:
        """Begin ``operation`` after those before it; returns at once. ``beside``: nobody waits for it yet."""
        with self._changed:
            operation.place = self._issued
            self._issued += 1
            self._fresh.append(operation)
            if beside:  # whoever waits moves it: to wake a thread for it would cost more than it takes
                self._wake()

    def start(self, operation: Operation) -> None:
        """Begin ``operation`` now, apart from the order and the number of those issued; not from within one."""
        with self._moving:
            self.guarded(operation, operation.begin)
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        if self.threaded and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hvdtrain-exchange", daemon=True)
            self._thread.start()
        if not self._waiters:
            self._changed.notify()

    def post(self, operation: Operation, request: Any, then: Callable[[], None]) -> None:
        """Call ``then`` once an MPI ``request`` of ``operation`` is through; only from within an operation."""
        self._requests.append(request)
        self._then.append((operation, then))

    def wait(self, operation: Operation, limit_s: float = float("inf"),
             longest_sleep_s: float = LONGEST_SLEEP_S) -> bool:
        """Move all until ``operation`` is over; False where ``limit_s`` have passed before."""
        with self._changed:
            self._waiters += 1
        try:
            return wait_for(lambda: operation.over or self._move_if_free() and operation.over, limit_s,
                            longest_sleep_s)
        finally:
            with self._changed:
                self._waiters -= 1
                if not self._waiters and (self._open or self._fresh or self._requests):
                    self._changed.notify()

    def _move_if_free(self) -> bool:
        if self._moving.acquire(blocking=False):
            try:
                self._move()
            finally:
                self._moving.release()
        return True

    def _move(self) -> bool:
        """Take in finished requests and post what follows; return whether there were any."""
        moved = False
        if self._fresh:
            self._open = [operation for operation in self._open if not operation.over]
        while self._fresh and len(self._open) < MOST_OPEN and (
                not self._open or self._fresh[0].place < self._open[0].place + SEQUENCES):
            operation = self._fresh.popleft()
            self._open.append(operation)
            self.guarded(operation, operation.begin)
            moved = True
        while self._requests:
            try:
                done = self._requests[0].Testsome(self._requests)
            except Exception as error:  # MPI's own: nobody knows what of it is through
                self._broken(error)
                return True
            if not done:
                break
            moved = True
            following = [self._then[i] for i in done]
            gone = set(done)
            self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
            self._then = [t for i, t in enumerate(self._then) if i not in gone]
            for operation, then in following:
                self.guarded(operation, then)
        if moved:
            self._open = [operation for operation in self._open if not operation.over]
        return moved

    def _broken(self, error: Exception) -> None:
        """Give an error of MPI's to all that is under way, for who waits for it."""
        for operation in dict.fromkeys((*(o for o, _ in self._then), *self._open)):
            operation.end(error=error)
        self._requests, self._then, self._open = [], [], []

    def guarded(self, operation: Operation, call: Callable[[], None]) -> None:
        """Make an error of ``call`` that of the operation, for its waiters; nothing follows on one that is over."""
        if operation.over:
            return
        try:
            call()
        except BaseException as error:  # raised again where it is waited for
            operation.end(error=error)

    def _work(self) -> None:
        shorten()
        pause_s = AWAKE_S
        while True:
            with self._changed:
                while self._waiters or not (self._open or self._fresh or self._requests):
                    self._changed.wait()
            with self._moving:
                moved = self._move()
            pause_s = AWAKE_S if moved else min(1.5 * pause_s, ASLEEP_S)
            time.sleep(pause_s)


SLICE_NS = 100_000
"""The shortest slice that Linux gives."""

_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call, which has no name in Python nor in every C library."""


def shorten() -> bool:
    """Ask for a short time slice for this thread, which needs no right; return whether the system has taken it."""
    number = _SETATTR.get(os.uname().machine)
    if number is None:
        return False
    # struct sched_attr: size, policy, flags, nice (unchanged), priority, runtime, deadline, period, utilisation.
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("=IIQiIQQQII", 56, 0, 0, nice, 0, SLICE_NS, 0, 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)) == 0
    return False
