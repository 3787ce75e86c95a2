"""Host lists: ``-H fast:4,old:2`` and host files, read strictly, and ranks placed on them.

Owns the syntax of both and the refusal of everything that is not a plain host name. Resolves no name. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hvdtrain.cluster.launchers.spec import Host
from hvdtrain.core.errors import UserError, count

MOST_SLOTS = 4096
"""More on one host is a slip of the keyboard."""

MOST_RANKS = 1 << 20
"""More in one job is too."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_SHAPE = "a host name or IPv4 address, and perhaps :slots, as in fast:4"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``-H``: ``name:slots`` with commas, one slot where none is said. A name given twice adds its slots."""
    return merged(_entry(part, "-H") for part in text.split(","))


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Read a host file: a host per line as ``name slots=4`` (Open MPI), ``name:4`` (MPICH) or ``name`` (one slot).

    ``#`` begins a comment. Open MPI's ``max_slots=`` and ``max-slots=`` are read over. A name given twice adds its
    slots, so that a scheduler's file with a line per slot means what it says.
    """
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_line(words, f"{where}, line {number}"))
    if not found:
        raise UserError(f"{where} names no host", "a line such as: fast slots=4", "write one line per host")
    return merged(found)


def merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Each host once, in the order of its first mention; `UserError` for more than `MOST_SLOTS` on one."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return bounded(tuple(Host(name, n) for name, n in slots.items()))


def bounded(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """``hosts`` as they are; `UserError` where one, or all together, are for more ranks than anybody means."""
    for host in hosts:
        if host.slots > MOST_SLOTS:
            raise UserError(f"{host.name} is for {count(host.slots, 'rank')}", f"at most {MOST_SLOTS} on one host",
                            "correct its slots or -np")
    total = sum(host.slots for host in hosts)
    if total > MOST_RANKS:
        raise UserError(f"the hosts are for {count(total, 'rank')}", f"at most {MOST_RANKS}",
                        "correct the slots or -np")
    return hosts


def is_address(name: str) -> bool:
    """Whether a host is named by its IPv4 address."""
    return _ADDRESS.fullmatch(name) is not None


def place(hosts: Sequence[Host], ranks: int, oversubscribe: bool) -> tuple[Host, ...]:
    """Put exactly ``ranks`` ranks on the hosts: in order while slots last, beyond that in proportion to the slots.

    Hosts left without a rank are left out. `UserError` where the slots do not suffice and ``oversubscribe`` is not set.
    """
    total = sum(host.slots for host in hosts)
    if ranks > total:
        if not oversubscribe:
            raise UserError(f"-np asks for {count(ranks, 'rank')} and the hosts have {count(total, 'slot')}",
                            f"-np {total} or less",
                            "raise the slots of a host, or say --oversubscribe")
        # Largest remainder; of equal remainders the first host's.
        shares = [ranks * host.slots // total for host in hosts]
        order = sorted(range(len(hosts)), key=lambda i: (-(ranks * hosts[i].slots % total), i))
        for i in order[:ranks - sum(shares)]:
            shares[i] += 1
        return tuple(Host(host.name, n) for host, n in zip(hosts, shares))
    placed, left = [], ranks
    for host in hosts:
        here = min(host.slots, left)
        left -= here
        if here:
            placed.append(Host(host.name, here))
    return tuple(placed)


def _line(words: list[str], where: str) -> Host:
    host, *rest = words
    slots = None
    for word in rest:
        key, equals, value = word.partition("=")
        if equals and key == "slots" and slots is not None:
            raise UserError(f"{where} says the slots of {host} twice", "slots=N once", "take one of the two away")
        if equals and key == "slots":
            slots = _slots(value, where)
        elif not (equals and key in ("max_slots", "max-slots") and value.isdigit()):
            raise UserError(f"{where} has the word {word!r}", "name slots=4, name:4 or name", "correct the line")
    entry = _entry(host, where)
    if slots is None:
        return entry
    if ":" in host:
        raise UserError(f"{where} says the slots of {entry.name} twice", "either name:4 or name slots=4",
                        "take one of the two away")
    return Host(entry.name, slots)


def _entry(text: str, where: str) -> Host:
    """One ``name`` or ``name:slots``."""
    text = text.strip()
    name, colon, slots = text.partition(":")
    if "@" in text:
        raise UserError(f"{where} has {text!r}", "a host without a user",
                        "name the user in ~/.ssh/config (Host, User), or say --ssh \"ssh -l USER\"")
    if text.count(":") > 1 or "[" in text:
        raise UserError(f"{where} has {text!r}, an IPv6 address or several colons", _SHAPE,
                        "give the address a name in /etc/hosts or ~/.ssh/config, and use that")
    if not _NAME.fullmatch(name):
        raise UserError(f"{where} has {text!r}", _SHAPE,
                        "list names only; ssh options belong in --ssh or ~/.ssh/config")
    if is_address(name) and any(int(part) > 255 for part in name.split(".")):
        raise UserError(f"{where} has the address {name!r}", "four numbers of 0 to 255", "correct it")
    return Host(name, _slots(slots, where) if colon else 1)


def _slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= MOST_SLOTS:
        raise UserError(f"{where} has {text!r} slots", f"a number of 1 to {MOST_SLOTS}",
                        "correct it, or leave the host out")
    return int(text)
