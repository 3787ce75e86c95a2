"""One small process per host that watches the ranks there: names one that is frozen or gone, and ends the job.

Owns a rank's side: who starts the process, and what it is handed. `process` is that process, `judge` its rules,
`system` its eyes. It needs no rank's interpreter lock, and outlives the rank that started it, but not all of them.
The first rank of a host that comes here starts it, before MPI and frameworks do; the others find it by a name that is
their job's. Importing this package imports nothing.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.core.launcher import LaunchFacts

DEFAULT_S = 30.0
"""Longest time for which a rank may stand still, where nothing else is said."""
KEY = "HVDTRAIN_HEARTBEAT_TIMEOUT_S"
"""Environment variable of the key ``heartbeat_timeout_s``, for programs without a configuration."""
LEAST_S = 2.0

TRIES, TRY_S = 50, 0.01
"""How often a rank looks for the watcher that another one is just starting, and how long it waits in between."""

_state: dict[str, Any] = {}


def stacks_signal() -> int:
    """Return the number of the signal on which a rank writes its stacks: one that hardly anybody else uses."""
    return int(signal.SIGRTMAX) - 2


def bound_of(env: Mapping[str, str]) -> float:
    """Return ``heartbeat_timeout_s`` as ``env`` says it; the default where it says none that is possible."""
    try:
        value = float(env.get(KEY, DEFAULT_S))
    except ValueError:
        return DEFAULT_S
    return value if value == 0 or value >= LEAST_S else DEFAULT_S


def start(facts: LaunchFacts, bound_s: float | None = None) -> None:
    """Have this rank watched: find the watcher of this host or start it, and hand it what it needs. Sends no message.

    ``bound_s``: longest time for which a rank may stand still; 0: watch nothing; None: as the environment says. A later
    call changes it. Does nothing in a job of one process, for which nobody waits, but for a supervisor that could start
    it again. Raises nothing: a job that is not watched runs all the same.
    """
    from hvdtrain.cluster.liveness.causes import DIRECTORY

    bound_s = bound_of(os.environ) if bound_s is None else bound_s
    if facts.kind == "solo" or facts.size == 1 and DIRECTORY not in os.environ:
        return
    if _state.get("pid") == os.getpid():
        if bound_s != _state["bound_s"]:
            _tell_bound(bound_s)
        return
    if bound_s == 0:
        return
    try:
        _state.update(pid=os.getpid(), bound_s=bound_s, socket=None)
        _state["socket"] = _join(facts, bound_s)
    except (OSError, AttributeError, ValueError):
        return  # no such sockets here, or no room for a process: waits keep their own bounds


def _tell_bound(bound_s: float) -> None:
    from hvdtrain.cluster.liveness.watch.messages import BOUND, Message

    _state["bound_s"] = bound_s
    tell(Message(BOUND, value=bound_s).packed())


def tell(data: bytes, fds: list[int] | None = None) -> bool:
    """Send a message to the watcher, nothing for b""; return whether there is one."""
    connection = _state.get("socket") if _state.get("pid") == os.getpid() else None
    try:
        if connection is not None and data:
            socket.send_fds(connection, [data], fds or [])
        return connection is not None
    except OSError:
        return False


def _join(facts: LaunchFacts, bound_s: float) -> socket.socket | None:
    """Connect to this host's watcher, and say who this is."""
    from hvdtrain.cluster.liveness import pulse
    from hvdtrain.cluster.liveness.watch.messages import HELLO, Message, address

    page = pulse.page()
    if page < 0:
        return None
    connection = _connect(address(os.environ, facts))
    if connection is None:
        return None
    atexit.register(pulse.leaving)
    stacks = os.memfd_create("hvdtrain-stacks")
    faulthandler.register(stacks_signal(), file=stacks, all_threads=True, chain=False)
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        stderr = os.open(os.devnull, os.O_WRONLY)
    hello = Message(HELLO, (facts.rank, facts.size, facts.local_rank, facts.local_size), bound_s)
    socket.send_fds(connection, [hello.packed()], [page, stacks, stderr])
    os.close(stderr)
    return connection


def _connect(name: bytes) -> socket.socket | None:
    """A connection to the watcher, which is started where there is none; None where somebody else has the name."""
    for _ in range(TRIES):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(1.0)
        try:
            connection.connect(name)
        except ConnectionRefusedError:
            connection.close()
            _serve(name)
            continue
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if int.from_bytes(credentials[4:8], sys.byteorder) == os.geteuid():
            return connection
        connection.close()
        return None
    return None


def _serve(name: bytes) -> None:
    """Take the name and start the watcher behind it; waits a moment where another rank has just taken it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        try:
            listener.bind(name)
        except OSError:
            time.sleep(TRY_S)
            return
        listener.listen(1024)
        from hvdtrain.core import ROOT

        script = str(Path(__file__).with_name("process.py"))
        # -I -S: nothing of the user's or of site-packages is read. A session of its own: signals that a launcher sends
        # to the rank's group do not reach it.
        _state["child"] = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(listener.fileno()), str(ROOT.parent)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()], start_new_session=True, cwd="/")
