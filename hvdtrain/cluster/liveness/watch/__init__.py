"""Watchdog: one small process per host that names a rank that is frozen or gone, and ends the job.

Owns a rank's side: starting the process before MPI and frameworks (`process`; `judge` has its rules) and telling it of
other hosts. Importing this package imports nothing.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.core.launcher import LaunchFacts
    from hvdtrain.core.protocols import Control

DEFAULT_S = 30.0
"""Longest time for which a rank may stand still, by default."""
KEY = "HVDTRAIN_HEARTBEAT_TIMEOUT_S"
"""Environment variable of the key ``heartbeat_timeout_s``, for programs without a configuration."""
LEAST_S = 2.0

TRIES, TRY_S = 50, 0.01
"""Tries to reach the watchdog that another rank is just starting, and the pause between two."""

MOST_ADDRESSES = 4
_SIOCGIFADDR = 0x8915
_INCLUDE = "OMPI_MCA_btl_tcp_if_include"

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
    """Have this rank watched: find the watchdog of this host or start it, and hand it what it needs. Sends no message.

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
    """Send a message to the watchdog, none for b""; return whether there is one."""
    connection = _state.get("socket") if _state.get("pid") == os.getpid() else None
    try:
        if connection is not None and data:
            socket.send_fds(connection, [data], fds or [])
        return connection is not None
    except OSError:
        return False


def _join(facts: LaunchFacts, bound_s: float) -> socket.socket | None:
    """Connect to this host's watchdog, and hand over this rank's page, file for stacks and stderr."""
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
    """Connect to the watchdog, starting it where there is none; None where another user has the name."""
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
    """Take the name and start the watchdog behind it; waits a moment where another rank has just taken it."""
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


def meet(control: Control) -> None:
    """Tell this host's watchdog of those on the other hosts; collective, once, after the control plane is up."""
    from hvdtrain.cluster.liveness.watch.messages import HOST, READY, SECRET, Message

    if control.size == 1:
        return
    own = addresses(control.node, os.environ) if control.local_rank == 0 and tell(b"") else []
    wire = _bound_socket(own)
    port = wire.getsockname()[1] if wire else 0
    rows = control.gather((control.node, own, port, secrets.token_bytes(32) if control.rank == 0 else b""))
    if wire is None:
        return
    with wire:
        nodes = list(dict.fromkeys(row[0] for row in rows))
        if len(nodes) == 1:
            return
        tell(Message(SECRET, (nodes.index(control.node), len(nodes), 0, 0), blob=rows[0][3]).packed())
        for number, node in enumerate(nodes):
            of_node: list[tuple[int, Any]] = [(rank, row) for rank, row in enumerate(rows) if row[0] == node]
            row = next((row for _, row in of_node if row[2]), None)
            if node != control.node and row is not None:
                tell(Message(HOST, (number, row[2], len(of_node), of_node[0][0]), blob=node.encode()[:32],
                             text=",".join(row[1])).packed())
        tell(Message(READY).packed(), [wire.fileno()])


def _bound_socket(own: list[str]) -> socket.socket | None:
    """Return a datagram socket at this host's address, or at all of them where it has several."""
    if not own:
        return None
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        wire.bind((own[0] if len(own) == 1 else "", 0))
    except OSError:
        wire.close()
        return None
    return wire


def addresses(node: str, env: Mapping[str, str]) -> list[str]:
    """Return this host's IPv4 addresses by which others may reach it, the likeliest first; [] where there is none.

    Those of the interfaces that MPI was told to use by name; else the name's address and every other one.
    """
    wanted = {name for name in env.get(_INCLUDE, "").split(",") if re.fullmatch(r"[A-Za-z][\w.-]*", name)}
    found = [_address(name) for _, name in socket.if_nameindex() if not wanted or name in wanted]
    usable = [a for a in found if a and not a.startswith("127.")]
    try:
        named = socket.gethostbyname(node)
    except OSError:
        named = ""
    return sorted(dict.fromkeys(usable), key=lambda a: a != named)[:MOST_ADDRESSES]


def _address(interface: str) -> str:
    """Return the IPv4 address of an interface; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            reply = fcntl.ioctl(asks.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(reply[20:24])
