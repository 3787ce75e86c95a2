"""Rank of `hvdtrain.run`: receive a function through a named pipe, call it, send its result or its error.

Starts no MPI, as the function may set devices or load Horovod first. `hvdtrain.cluster.run_function` starts the ranks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

from hvdtrain.core.launcher import launch_facts

HEAD = struct.Struct("<cQ")
"""Before every message: its kind, and the bytes that follow."""

BEGUN, CALL, RESULT, ERROR, REFUSED = b"b", b"c", b"r", b"e", b"u"
"""Kinds of messages. REFUSED: the arguments of a `UserError` of `hvdtrain.run` itself."""

served: list[int] = []
"""The rank that this process is, where `hvdtrain.run` started it."""


def open_pipe(path: Path, flags: int) -> int:
    """Open a named pipe that belongs to this user; `PermissionError` for any other file."""
    pipe = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(pipe)
    if stat.S_ISFIFO(found.st_mode) and found.st_uid == os.geteuid():
        return pipe
    os.close(pipe)
    raise PermissionError(f"{path} is not a pipe of this user")


def main(folder: str) -> None:
    """Serve one call through the pipes in ``folder``; does not return after an error."""
    rank = launch_facts(os.environ).rank
    served.append(rank)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, also with PYTHONUNBUFFERED, by which pieces of two ranks' lines would mix.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    with open(open_pipe(Path(folder, f"call-{rank}"), os.O_RDONLY), "rb") as calls:
        # Closed at the end of the process: a rank that dies is noticed by it.
        with open(open_pipe(Path(folder, f"answer-{rank}"), os.O_WRONLY), "wb") as answers:
            _send(answers, BEGUN, b"")
            _, size = HEAD.unpack(calls.read(HEAD.size))
            kind, answer = _answer(calls.read(size))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            _send(answers, kind, answer)
        if kind != RESULT:
            calls.read()  # until the caller has ended the job: a status of this rank would make mpirun print about it
            os._exit(1)


def _send(answers: Any, kind: bytes, message: bytes) -> None:
    answers.write(HEAD.pack(kind, len(message)))
    answers.write(message)
    answers.flush()


def _answer(call: bytes) -> tuple[bytes, bytes]:
    """Call what ``call`` holds; return (kind, message)."""
    import cloudpickle

    try:
        function, args, kwargs = cloudpickle.loads(call)
    except Exception as error:
        return _refused(f"rank {served[0]} cannot load the function or its arguments: {_line(error)}",
                        "modules that a new Python process of this user can import",
                        "put the module's folder on PYTHONPATH, or define the function in the script or notebook")
    try:
        result = function(*args, **kwargs)
    except BaseException as error:  # also sys.exit(): a rank without a result is a failure
        return ERROR, _described(error)
    try:
        return RESULT, cloudpickle.dumps(result)
    except Exception as error:
        return _refused(f"the result of rank {served[0]}, of type {type(result).__name__}, cannot be pickled: "
                        f"{_line(error)}",
                        "an object that cloudpickle can pickle", "return numbers, arrays, lists or a state dict")


def _refused(*arguments: str) -> tuple[bytes, bytes]:
    return REFUSED, pickle.dumps(arguments)


def _line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _described(error: BaseException) -> bytes:
    """Return the pickled host, description, traceback, whether the error only echoes another rank's, exception."""
    import cloudpickle

    from hvdtrain.cluster.exit import is_echo

    assert error.__traceback__ is not None
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next)).rstrip()
    exception = b""
    if not type(error).__module__.startswith("mpi4py"):  # loading one would start MPI in the caller
        with contextlib.suppress(Exception):
            exception = cloudpickle.dumps(error)
    return pickle.dumps((socket.gethostname(), _line(error), trace, is_echo(error), exception))
