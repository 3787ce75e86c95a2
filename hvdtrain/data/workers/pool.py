"""A rank's side of its workers: `Pool`, which divides fetches into tasks, and `Pooled`, a source read through a pool.

Owns tasks, their order and waiting. Workers write results to shared memory, two slots each, from which the rank copies
them to their place in the batch: the order of samples is that of the fetch.
"""

from __future__ import annotations

import itertools
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.rows import ColumnNames, of_data
from hvdtrain.data.sources import EpochSource
from hvdtrain.data.stream import Arrays
from hvdtrain.data.workers import start
from hvdtrain.data.workers.worker import SharedResults, WorkerTraceback, nameless, refuse_unlike

SLOTS = 2
"""Tasks that a worker has at a time: one that it fetches, one that waits or whose result is being read."""

TASKS = 2  # tasks for each of several workers that a fetch is cut into, so that a slow sample holds up less
LOOK_MS = 1000


class Fetch:
    """A fetch in progress: ``left`` tasks to come; ``arrays`` (n, ...) being filled; its first error by position."""

    def __init__(self, n: int) -> None:
        self.n, self.left, self.dropped = n, 0, False
        self.arrays: list[np.ndarray] = []
        self.error: tuple[int, BaseException] | None = None

    def failed(self, at: int, error: BaseException) -> None:
        """Keep the error of the task that begins at position ``at``, unless an earlier position failed."""
        if self.error is None or at < self.error[0]:
            self.error = (at, error)

    def place(self, at: int, parts: Arrays) -> None:
        if not self.arrays:
            self.arrays = [np.empty((self.n, *part.shape[1:]), part.dtype) for part in parts]
        refuse_unlike(self.arrays, parts)
        for whole, part in zip(self.arrays, parts):
            whole[at:at + len(part)] = part


class _Worker:
    """A worker as its rank knows it: ``busy`` holds (task, slot) in the order of work."""

    def __init__(self, server: start.WorkerServer, number: int, setup_fd: int, preload: Sequence[str],
                 timeout_s: float) -> None:
        from multiprocessing.connection import Connection  # which makes another name for the user's script

        self.number, self.ready, self.since = number, False, time.monotonic()
        self.busy: deque[tuple[_Task, int]] = deque()
        fds = [nameless(f"hvdtrain-worker-{number}") for _ in range(SLOTS)]
        ours, theirs = socket.socketpair()
        bound = struct.pack("@ll", *divmod(int(timeout_s * 1e6), 1_000_000))  # seconds and microseconds
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a frozen worker takes nothing, and may stop in a message
            ours.setsockopt(socket.SOL_SOCKET, way, bound)
        with theirs:
            self.pid = server.fork([theirs.fileno(), setup_fd, *fds], preload)
        self.channel = Connection(ours.detach())
        self.memory, self.free, self.fds = [SharedResults(fd) for fd in fds], list(range(SLOTS)), fds


class _Task:
    def __init__(self, fetch: Fetch, source: int, at: int, indices_n: np.ndarray, epoch: int) -> None:
        self.fetch, self.source, self.at, self.indices_n, self.epoch = fetch, source, at, indices_n, epoch


class Pool:
    """Run ``n`` workers on the sources packed in ``setup_fd``. `UserError`: unpacking failed; `OSError`: no process."""

    def __init__(self, setup_fd: int, n: int, timeout_s: float, preload: Sequence[str] = ()) -> None:
        self.n, self._timeout_s = n, timeout_s
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._tasks: dict[int, _Task] = {}
        self._waiting: deque[_Task] = deque()
        self._broken: UserError | None = None
        self.rows: dict[int, ColumnNames] = {}
        self._server = start.hold()
        self.workers: list[_Worker] = []
        self._by_fd: dict[int, _Worker] = {}
        self._poll = select.poll()  # asked once for each task: multiprocessing's own wait() is ten times as dear
        self.close = weakref.finalize(self, _close, self.workers, self._server, os.getpid())
        try:
            for number in range(n):
                worker = _Worker(self._server, number, setup_fd, preload, timeout_s)
                self.workers.append(worker)
                self._by_fd[worker.channel.fileno()] = worker
                self._poll.register(worker.channel.fileno(), select.POLLIN)
            while not self.workers[0].ready:
                self._pump()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(setup_fd)

    def begin(self, source: int, indices_n: np.ndarray, epoch: int) -> Fetch:
        """Start fetching the samples ``indices_n`` of a source; `collect` returns them."""
        with self._lock:
            fetch = Fetch(len(indices_n))
            tasks = min(fetch.n, TASKS * self.n if self.n > 1 else 1)
            bounds = [fetch.n * i // tasks for i in range(tasks + 1)] if tasks else [0]
            for low, high in zip(bounds, bounds[1:]):
                self._waiting.append(_Task(fetch, source, low, np.asarray(indices_n[low:high], np.int64), epoch))
            fetch.left = len(bounds) - 1
            self._hand_out()
            return fetch

    def collect(self, fetch: Fetch) -> Arrays:
        """Wait for a fetch and return its arrays; raises what the dataset raised in a worker."""
        while True:
            with self._lock:
                if not fetch.left:
                    break
                self._pump()
        if fetch.error is not None:
            raise fetch.error[1]
        return tuple(fetch.arrays)

    def drop(self, fetch: Fetch) -> None:
        """Cancel a fetch."""
        with self._lock:
            fetch.dropped = True
            kept = [task for task in self._waiting if task.fetch is not fetch]
            fetch.left -= len(self._waiting) - len(kept)
            self._waiting = deque(kept)

    def _hand_out(self) -> None:
        """Give waiting tasks to the workers with the fewest."""
        while self._waiting and any(worker.free for worker in self.workers):
            worker = min((w for w in self.workers if w.free), key=lambda w: (len(w.busy), not w.ready))
            task, slot, number = self._waiting.popleft(), worker.free.pop(), next(self._numbers)
            if not worker.busy:
                worker.since = time.monotonic()
            worker.busy.append((task, slot))
            self._tasks[number] = task
            try:
                worker.channel.send((number, slot, task.source, task.indices_n, task.epoch))
            except BlockingIOError:  # it has not taken what was sent before
                self._hangs(worker)
            except OSError:
                self._ended(worker)

    def _pump(self) -> None:
        """Receive results, waiting a while for them; raise `UserError` for a worker that ended or hangs."""
        if self._broken is not None:
            raise self._broken
        heard = self._poll.poll(LOOK_MS)
        for fd, _ in heard:
            worker = self._by_fd[fd]
            try:
                self._take(worker, worker.channel.recv())
            except BlockingIOError:
                self._hangs(worker)
            except (EOFError, ConnectionResetError):
                self._ended(worker)
        for worker in () if heard else self.workers:
            if (worker.busy or not worker.ready) and time.monotonic() - worker.since > self._timeout_s:
                self._hangs(worker)
        self._hand_out()

    def _take(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "ready":
            worker.ready, worker.since = True, time.monotonic()
            return
        if kind == "failed":
            self._break(UserError(f"a worker cannot receive the data: {rest[0]}", "a dataset that can be pickled and "
                                  "unpickled in another process", "make the dataset picklable, or set data.workers: 0"))
        worker.since = time.monotonic()
        number, found, rows = rest
        if rows is not None:
            self.rows[worker.busy[0][0].source].learn(rows)
        task, slot = worker.busy.popleft()
        assert self._tasks.pop(number) is task
        fetch = task.fetch
        fetch.left -= 1
        try:
            if kind == "error":
                packed, text = found
                fetch.failed(task.at, _raised(packed, text))
            elif not fetch.dropped:
                fetch.place(task.at, worker.memory[slot].read(found))
        except UserError as error:
            fetch.failed(task.at, error)
        finally:
            worker.free.append(slot)

    def _hangs(self, worker: _Worker) -> None:
        doing = f"fetching {_samples(worker.busy[0][0])}" if worker.busy else "starting"
        self._break(UserError(f"{_name(worker)} has been {doing} for {time.monotonic() - worker.since:.0f} s", "less "
                              f"than control_timeout_s ({self._timeout_s:g} s) for its samples of a batch", "check "
                              "what the dataset waits for, or raise control_timeout_s").of_kind("hang"))

    def _ended(self, worker: _Worker) -> None:
        status = self._server.status(worker.pid)
        doing = f" while it fetched {_samples(worker.busy[0][0])}" if worker.busy else ""
        how, do = _end_in_words(status)
        self._break(UserError(f"{_name(worker)} {how}{doing}", "workers that live as long as the run",
                              do).of_kind("exception"))

    def _break(self, error: UserError) -> None:
        self._broken = error
        raise error


class Pooled(EpochSource):
    """An `EpochSource` that is source ``number`` of a pool."""

    def __init__(self, source: Any, pool: Pool, number: int) -> None:
        self.wraps, self.pool, self._number = source, pool, number
        pool.rows[number] = of_data(source)

    def __len__(self) -> int:
        return len(self.wraps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wraps, name)

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        return self.collect(self.begin(indices_n, epoch))

    def begin(self, indices_n: np.ndarray, epoch: int) -> Fetch:
        return self.pool.begin(self._number, indices_n, epoch)

    def collect(self, fetch: Fetch) -> Arrays:
        return self.pool.collect(fetch)

    def drop(self, fetch: Fetch) -> None:
        self.pool.drop(fetch)


def _close(workers: list[_Worker], server: start.WorkerServer, owner: int) -> None:
    for worker in workers:
        if owner == os.getpid():
            server.kill(worker.pid)
        worker.channel.close()
        for fd in worker.fds:
            os.close(fd)
    if owner == os.getpid():
        start.release(server)


def _raised(packed: bytes, text: str) -> BaseException:
    """Restore the exception of a worker, with its traceback there as the cause; a `UserError` needs none."""
    error: BaseException = pickle.loads(packed)
    if not isinstance(error, UserError):
        error.__cause__ = WorkerTraceback(text)
    return error


def _end_in_words(status: int | None) -> tuple[str, str]:
    if status is None:
        return "has ended", "check this host's system log; with data.workers: 0 the rank reads the data itself"
    if status >= 0:
        return (f"ended with status {status}",
                "a dataset must not end its process; with data.workers: 0 the rank reads the data itself")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    do = ("the kernel does that when memory runs out: lower data.workers" if name == "SIGKILL"
          else "a library in the dataset crashed: for debugging, data.workers: 0 reads in the rank itself")
    return f"was ended by {name}", do


def _name(worker: _Worker) -> str:
    return f"worker {worker.number} (process {worker.pid})"


def _samples(task: _Task) -> str:
    numbers = [str(number) for number in task.indices_n[:4]]
    more = f" and {len(task.indices_n) - 4} more" if len(task.indices_n) > 4 else ""
    return f"sample{'s' if len(task.indices_n) > 1 else ''} {', '.join(numbers)}{more}"
