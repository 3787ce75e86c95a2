"""`hvdtrain.run`: call a function on several ranks of this host from Python, and return the result of each rank.

Owns the launch, the pipes and the end of the job. `hvdtrain.cluster.function_rank` is the other end of the pipes.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from hvdtrain.cluster import function_rank
from hvdtrain.cluster.boot import prepare_lone_mpi
from hvdtrain.cluster.function_rank import BEGUN, CALL, ERROR, HEAD, REFUSED, RESULT, open_pipe
from hvdtrain.cluster.launchers import LAUNCHERS, HostSlots
from hvdtrain.cluster.launchers.prepare import ROOT_VARIABLES, Here, Wishes, find, here, interpreter, prepare
from hvdtrain.cluster.launchers.spec import laid_over, valid_name
from hvdtrain.core.errors import RankFailed, UserError
from hvdtrain.core.processes import Child

T = TypeVar("T")

TICK_S = 0.05
"""Longest wait for a pipe before the launcher and the bounds are looked at."""

START_S = 120.0
"""Longest time from the launch until every rank has begun."""

OUTPUT_S = 0.3
"""From a rank's error to the end of the job: output that the rank printed before is still on its way."""

PEER_S = 3.0
"""From the end of a rank to the end of the job: the launcher then has reported the rank's exit status."""

LEAVE_S = 20.0
"""From the last result to the end of the launcher; later it is ended, and the results are returned."""

BLOCK = 1 << 20


def run(function: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, np: int = 2, *,
        env: Mapping[str, str] | None = None, timeout: float | None = None) -> list[T]:
    """Call ``function(*args, **kwargs)`` on ``np`` ranks of this host; return their results by rank.

    The ranks are new processes under the mpirun that ``hvdtrain launch`` would use, or one process without mpirun for
    ``np=1``. The function, its arguments and results travel by cloudpickle through pipes in a folder of mode 0700:
    lambdas, closures and functions of a notebook work. The ranks' output goes to `sys.stdout` and `sys.stderr`.
    ``env``: variables to add to the ranks' environment. ``timeout``: seconds for the whole call.

    Raises `hvdtrain.core.errors.RankFailed` where a rank raises an exception (chained) or ends without a result,
    `TimeoutError`, and `UserError` for what cannot be started or sent. Then, and after Ctrl-C, all ranks are ended.
    """
    call = _pickled(function, args, {} if kwargs is None else kwargs)
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise UserError(f"hvdtrain.run got np={np!r}", "a number of ranks, 1 or more", "pass np=2")
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise UserError(f"hvdtrain.run got timeout={timeout!r}", "seconds, or None for no bound", "correct timeout")
    machine = _machine(env or {})
    with tempfile.TemporaryDirectory(prefix="hvdtrain-run-", ignore_cleanup_errors=True) as folder:
        words, variables = _command(np, folder, machine)
        message = memoryview(HEAD.pack(CALL, len(call)) + call)
        ranks = [RankPipes.made(Path(folder), rank, message) for rank in range(np)]
        try:
            child = Child(words, variables, death=signal.SIGKILL if np == 1 else signal.SIGTERM,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert child.process.stdout is not None and child.process.stderr is not None
            with child.process.stdout, child.process.stderr, child:
                return FunctionJob(child, ranks).results(timeout)
        finally:
            for rank in ranks:
                rank.close()


def _pickled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the call as bytes; `UserError` for one that is none, or that cannot be pickled."""
    if not callable(function):
        raise UserError(f"hvdtrain.run got {function!r} as the function", "a callable", "pass the function itself")
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise UserError(f"hvdtrain.run got args of type {type(args).__name__} and kwargs of type "
                        f"{type(kwargs).__name__}", "a tuple or list, and a dict",
                        "write hvdtrain.run(f, args=(1,), kwargs={'b': 2})")
    try:
        import cloudpickle
    except ImportError:
        raise UserError("hvdtrain.run needs cloudpickle, which is not installed", "", "run pip install cloudpickle") \
            from None
    try:
        return bytes(cloudpickle.dumps((function, tuple(args), dict(kwargs))))
    except Exception as error:
        raise UserError(f"the function or its arguments cannot be pickled: {type(error).__name__}: {error}",
                        "objects that cloudpickle can pickle, also those that a closure or a global of it holds",
                        "create files, locks, sessions and generators inside the function") from error


def _machine(env: Mapping[str, str]) -> Here:
    """Return this host with ``env`` added; `UserError` within a rank, and for variables that cannot be passed."""
    machine = here()
    inside = "hvdtrain.run" if function_rank.served else machine.inside
    if inside:
        raise UserError(f"hvdtrain.run was called in a rank, which {inside} started", "one job, started from outside",
                        "call the function directly, or run in a process that is no rank")
    for name, value in env.items():
        if not isinstance(name, str) or not valid_name(name) or not isinstance(value, str) or "\0" in value:
            raise UserError(f"env has the variable {name!r} with a value of type {type(value).__name__}",
                            "a name of letters, digits and _, and a str", "correct env")
    return dataclasses.replace(machine, env={**machine.env, **env})


def _command(np: int, folder: str, machine: Here) -> tuple[list[str], dict[str, str]]:
    """Return (the words that start the ranks, their whole environment)."""
    # The caller's search path as it is: modules beside a notebook, a checkout that is not installed.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    program = (interpreter(), "-c", f"import sys; sys.path[:] = {path!r}; "
               f"from hvdtrain.cluster import function_rank; function_rank.main({folder!r})")
    if np == 1:
        alone = dict(machine.env)
        prepare_lone_mpi(alone)  # for a function that uses mpi4py
        return list(program), alone
    hosts = (HostSlots("localhost", np),)
    tool, _ = find("auto", machine, hosts)
    if tool.flavour == "openmpi" and machine.is_root and any(machine.env.get(v) != "1" for v in ROOT_VARIABLES):
        raise UserError("this is root, and Open MPI refuses to run as root",
                        f"an ordinary user, or {' and '.join(f'{name}=1' for name in ROOT_VARIABLES)}",
                        "in a container set both variables, or pass them as env=; elsewhere use an ordinary user, "
                        "since root can damage the host")
    # All variables: the ranks are on this host, where also those have a meaning that launch leaves out.
    names = tuple(name for name in machine.env if valid_name(name))
    spec, _ = prepare(Wishes(program, hosts, env=names), machine, tool)
    words, own = LAUNCHERS[tool.launcher].command(spec)
    return words, laid_over(machine.env, own)


@dataclass
class RankPipes:
    """The caller's ends of a rank's two pipes, what is left to send and what was received.

    ``kind``, ``answer``: the rank's last message, b"" before it. ``closed``: the rank has closed its end.
    """

    rank: int
    call: int
    answers: int
    left: memoryview
    received: bytearray = field(default_factory=bytearray)
    begun: bool = False
    kind: bytes = b""
    answer: bytes = b""
    closed: bool = False

    @classmethod
    def made(cls, folder: Path, rank: int, message: memoryview) -> RankPipes:
        """Make and open the pipes; ``message`` is to be sent."""
        paths = [folder / f"call-{rank}", folder / f"answer-{rank}"]
        for path in paths:
            os.mkfifo(path, 0o600)
        # Both ways: opening a pipe for writing alone fails while it has no reader.
        return cls(rank, open_pipe(paths[0], os.O_RDWR | os.O_NONBLOCK),
                   open_pipe(paths[1], os.O_RDONLY | os.O_NONBLOCK), message)

    def send(self) -> bool:
        """Send what the pipe takes; return whether all is sent."""
        self.left = self.left[os.write(self.call, self.left[:BLOCK]):]
        return not self.left

    def receive(self) -> bool:
        """Read what the pipe holds; return whether it is closed."""
        data = os.read(self.answers, BLOCK)
        self.closed = not data
        self.received += data
        while len(self.received) >= HEAD.size:
            kind, size = HEAD.unpack_from(self.received)
            if len(self.received) < HEAD.size + size:
                break
            if kind == BEGUN:
                self.begun = True
            else:
                self.kind, self.answer = kind, bytes(self.received[HEAD.size:HEAD.size + size])
            del self.received[:HEAD.size + size]
        return self.closed

    def close(self) -> None:
        for pipe in (self.call, self.answers):
            os.close(pipe)


class FunctionJob:
    """A started job: its launcher, its ranks' pipes, and the order in which ranks answered or were lost."""

    def __init__(self, child: Child, ranks: Sequence[RankPipes]) -> None:
        self.child, self.ranks = child, ranks
        self.answered: list[RankPipes] = []
        self.lost: list[RankPipes] = []
        """Those noticed first: when a rank dies the launcher ends the others."""
        self.selector = selectors.DefaultSelector()
        for rank in ranks:
            self.selector.register(rank.call, selectors.EVENT_WRITE, rank)
            self.selector.register(rank.answers, selectors.EVENT_READ, rank)
        self.outputs = {"stdout": child.process.stdout, "stderr": child.process.stderr}
        self.decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self.outputs}
        for name, stream in self.outputs.items():
            assert stream is not None
            self.selector.register(stream, selectors.EVENT_READ, name)

    def results(self, timeout: float | None) -> list[Any]:
        """Wait for the end of the job; return its results or raise its failure."""
        with self.selector:
            self._wait(time.monotonic() + (math.inf if timeout is None else timeout), timeout)
            status = self.child.process.poll()
            status = 128 - status if status is not None and status < 0 else status
            ends_at = time.monotonic() + OUTPUT_S
            while self.outputs and time.monotonic() < ends_at and (self.step(TICK_S) or status is not None):
                pass
        failure = self._failure(status)
        if failure is not None:
            raise failure
        return [_loaded(rank) for rank in self.ranks]

    def _wait(self, ends_at: float, timeout: float | None) -> None:
        before, since = "", time.monotonic()
        while self.child.process.poll() is None:
            self.step(TICK_S)
            now, (state, bound_s) = time.monotonic(), self._state()
            if state != before:
                before, since = state, now
            if state in ("start", "run") and (now > ends_at or now - since > bound_s):
                what = "begun" if state == "start" else "returned"
                late = [str(rank.rank) for rank in self.ranks if not (rank.begun if state == "start" else rank.kind)]
                limit_s = timeout if now > ends_at else bound_s
                raise TimeoutError(f"hvdtrain.run: rank{'s' * (len(late) > 1)} {', '.join(late)} had not {what} within "
                                   f"{limit_s:g} s")
            if now - since > bound_s:
                return

    def _state(self) -> tuple[str, float]:
        """Return the state of the job and how long it may last."""
        if any(rank.kind != RESULT and not _is_echo(rank) for rank in self.answered):
            return "failed", OUTPUT_S
        if self.lost or any(rank.kind != RESULT for rank in self.answered):
            return "lost", PEER_S
        if len(self.answered) == len(self.ranks):
            return "done", LEAVE_S
        return ("run", math.inf) if all(rank.begun for rank in self.ranks) else ("start", START_S)

    def step(self, wait_s: float) -> bool:
        """Serve the pipes that are ready within ``wait_s``; return whether there was one."""
        lost = []
        ready = self.selector.select(wait_s)
        for key, _ in ready:
            if isinstance(key.data, str):
                self._copy(key.data, key.fileobj)
                continue
            rank: RankPipes = key.data
            if key.fd == rank.call:
                if rank.send():
                    self.selector.unregister(rank.call)
                continue
            if rank.receive():
                self.selector.unregister(rank.answers)
            if rank.kind and rank not in self.answered:
                self.answered.append(rank)
            if rank.closed and not rank.kind:
                lost.append(rank)
        self.lost = self.lost or lost
        return bool(ready)

    def _copy(self, name: str, stream: Any) -> None:
        data = os.read(stream.fileno(), BLOCK)
        if not data:
            self.selector.unregister(stream)
            del self.outputs[name]
        out: IO[str] = getattr(sys, name)  # looked up now: a notebook or a test may have replaced it
        out.write(self.decoders[name].decode(data, final=not data))
        out.flush()

    def _failure(self, status: int | None) -> Exception | None:
        """Return the error of the rank that failed first; None where all have returned."""
        refused = next((rank for rank in self.answered if rank.kind == REFUSED), None)
        if refused is not None:
            return UserError(*pickle.loads(refused.answer))
        errors = sorted((rank for rank in self.answered if rank.kind == ERROR), key=_is_echo)
        if errors and not (self.lost and _is_echo(errors[0])):
            return _raised(errors[0])
        if self.lost:
            return _ended(self.lost, status)
        missing = [rank for rank in self.ranks if not rank.kind]
        if missing and any(rank.begun for rank in self.ranks):
            return _ended(missing, status)
        if missing:
            return UserError(f"the launcher ended with {_in_words(status)} before any rank had begun",
                             "a launcher that starts ranks on this host",
                             "read its message above; `hvdtrain doctor` finds many causes")
        return None


def _loaded(rank: RankPipes) -> Any:
    import cloudpickle

    try:
        return cloudpickle.loads(rank.answer)
    except Exception as error:
        raise UserError(f"the result of rank {rank.rank} cannot be loaded here: {type(error).__name__}: {error}",
                        "an object that this process can load, too", "return numbers, arrays or lists") from error


def _is_echo(rank: RankPipes) -> bool:
    """Return whether the rank's error only reports that another rank went away."""
    return rank.kind == ERROR and bool(pickle.loads(rank.answer)[3])


def _raised(rank: RankPipes) -> RankFailed:
    host, line, trace, _, exception = pickle.loads(rank.answer)
    failure = RankFailed(f"rank {rank.rank} on host {host} raised {line}\n\nTraceback of rank {rank.rank}:\n{trace}",
                         rank.rank, host, traceback=trace)
    try:
        cause = pickle.loads(exception)
    except Exception:  # its class may want other arguments than it keeps
        cause = None
    failure.__cause__ = cause if isinstance(cause, BaseException) else None
    return failure


def _ended(ranks: Sequence[RankPipes], status: int | None) -> RankFailed:
    host, numbers = socket.gethostname(), ", ".join(str(rank.rank) for rank in ranks)
    which = f"rank {numbers}" if len(ranks) == 1 else f"one of the ranks {numbers}"
    return RankFailed(f"{which} on host {host} ended without a result: {_in_words(status)}", ranks[0].rank, host,
                      status)


def _in_words(status: int | None) -> str:
    """Return an exit status with its signal's name.

    >>> _in_words(7), _in_words(137)
    ('exit status 7', 'exit status 137 (SIGKILL)')
    """
    if status is None:  # the launcher ends the job at any other status
        return "exit status 0, or none that the launcher reported"
    names = {128 + number: f" ({number.name})" for number in signal.Signals}
    return f"exit status {status}{names.get(status, '')}"
