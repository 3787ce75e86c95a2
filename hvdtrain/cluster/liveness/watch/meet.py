"""How the watchers of several hosts come to know each other: over the ranks' control plane, once, after it is up.

Owns a host's addresses and the job's token. A rank's side; the watcher is handed a bound socket and the list.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.liveness import watch
from hvdtrain.cluster.liveness.watch.messages import HOST, READY, SECRET, Message

if TYPE_CHECKING:
    from hvdtrain.core.protocols import Control

MOST_ADDRESSES = 4
_SIOCGIFADDR = 0x8915
_INCLUDE = "OMPI_MCA_btl_tcp_if_include"


def meet(control: Control) -> None:
    """Tell this host's watcher of those on the other hosts; collective. Nothing in a job on one host."""
    if control.size == 1:
        return
    own = addresses(control.node, os.environ) if control.local_rank == 0 and watch.tell(b"") else []
    wire = _bound(own)
    port = wire.getsockname()[1] if wire else 0
    rows = control.gather((control.node, own, port, secrets.token_bytes(32) if control.rank == 0 else b""))
    if wire is None:
        return
    with wire:
        nodes = list(dict.fromkeys(row[0] for row in rows))
        if len(nodes) == 1:
            return
        watch.tell(Message(SECRET, (nodes.index(control.node), len(nodes), 0, 0), blob=rows[0][3]).packed())
        for number, node in enumerate(nodes):
            of_node: list[tuple[int, Any]] = [(rank, row) for rank, row in enumerate(rows) if row[0] == node]
            row = next((row for _, row in of_node if row[2]), None)
            if node != control.node and row is not None:
                watch.tell(Message(HOST, (number, row[2], len(of_node), of_node[0][0]), blob=node.encode()[:32],
                                   text=",".join(row[1])).packed())
        watch.tell(Message(READY).packed(), [wire.fileno()])


def _bound(own: list[str]) -> socket.socket | None:
    """A datagram socket at this host's address, or at all of them where it has several."""
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

    The interfaces that MPI was told to use, if it was told by name; else what its name means, and every other one.
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
    """The IPv4 address of an interface; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            reply = fcntl.ioctl(asks.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(reply[20:24])
