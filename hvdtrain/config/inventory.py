"""Hosts, devices, links and prices of an inventory: the YAML file of ``--inventory`` as typed, checked data.

Owns the format of the file. The catalogue of devices and every estimate are left to `hvdtrain.planning.hardware`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.config import yaml_file
from hvdtrain.config.schema import shown
from hvdtrain.core.errors import UserError, nearest

_DEVICES = re.compile(r"(?:(\d{1,5})\s*[x*]\s*)?(\S.*\S|\S)")
MOST_RANKS = 65_536
"""Devices of an inventory, all hosts together: plans of more ranks were never tried."""

MOST_NUMBER = 1e30
"""Bound of every number: a float holds it, and products of a few."""


@dataclass(frozen=True)
class InventoryDevice:
    """Facts of a device that the catalogue lacks. None: unknown. ``flops``: peak FLOP/s by type, such as bf16."""

    name: str
    memory_gb: float | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_GBps: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class InventoryHost:
    """A host, or ``count`` hosts with the same devices. ``devices``: (count, name). None: unknown.

    ``name`` may hold * and ?, as in a shell, and then stands for several hosts. ``price_per_hour``, ``power_w``: of one
    host, in `Inventory.currency` and watts. ``mtbf_hours``: mean time between failures of one host.
    """

    name: str
    devices: tuple[tuple[int, str], ...]
    price_per_hour: float | None = None
    power_w: float | None = None
    count: int = 1
    mtbf_hours: float | None = None

    @property
    def ranks(self) -> int:
        """Return the devices of one host."""
        return sum(count for count, _ in self.devices)


@dataclass(frozen=True)
class InventoryLinks:
    """Bandwidths of the links. None: unknown. ``between_hosts_gbit``: Gbit/s; ``within_host_GBps``: GB/s."""

    between_hosts_gbit: float | None = None
    within_host_GBps: float | None = None


@dataclass(frozen=True)
class Inventory:
    """Content of an inventory file; ``path``: the file, for messages."""

    path: str
    hosts: tuple[InventoryHost, ...]
    links: InventoryLinks = InventoryLinks()
    currency: str = "USD"
    devices: Mapping[str, InventoryDevice] = field(default_factory=dict)

    def host_of(self, node: str) -> InventoryHost | None:
        """Return the entry of the host ``node``, an exact name before a pattern; None where no entry fits."""
        exact = (host for host in self.hosts if _same_host(host.name.lower(), node.lower()))
        alike = (host for host in self.hosts if fnmatch.fnmatchcase(node.lower(), host.name.lower()))
        return next(exact, None) or next(alike, None)

    def price_of(self, node: str) -> float:
        """Return the price of an hour of the host ``node``; `UserError` without one."""
        host = self.host_of(node)
        if host is None:
            raise UserError(f"{self.path!r} has no host {node!r}", nearest(node, [h.name for h in self.hosts]),
                            "add the host, or an entry with the name '*' for all other hosts")
        if host.price_per_hour is None:
            raise UserError(f"{self.path!r} has no price of host {host.name!r}",
                            "price_per_hour of each host where a budget is given", "add price_per_hour to the host")
        return host.price_per_hour


def read(path: str) -> Inventory:
    """Return the inventory in the file ``path``; `UserError` names the first value that is not possible."""
    return parse(yaml_file.read(path, "--inventory"), path)


def parse(given: Mapping[str, Any], path: str) -> Inventory:
    """Return the inventory that the mapping ``given`` from the file ``path`` means. Pure."""
    where = repr(path)
    _known(given, where, ("hosts", "links", "currency", "devices"))
    currency = given.get("currency", "USD")
    if not (isinstance(currency, str) and re.fullmatch(r"\w{1,8}|[$€£¥]", currency)):
        raise _refusal(where, "currency", currency, "a short name such as EUR")
    devices = _mapping(given.get("devices", {}), where, "devices")
    links = _mapping(given.get("links", {}), where, "links")
    _known(links, f"{where}, links", ("between_hosts_gbit", "within_host_GBps"))
    hosts = given.get("hosts")
    if not isinstance(hosts, list) or not hosts:
        raise _refusal(where, "hosts", hosts, 'a list such as [{name: a, devices: "2 x A100-40GB"}]')
    found = tuple(_host(host, f"{where}, host {n}") for n, host in enumerate(hosts, 1))
    names = [host.name.lower() for host in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{where} has the host {twice!r} twice", "each host once",
                        "rename one of them, or give one entry a count")
    if sum(host.count * host.ranks for host in found) > MOST_RANKS:
        raise UserError(f"{where} has over {MOST_RANKS:,} devices", f"{MOST_RANKS:,} at most", "leave hosts out")
    return Inventory(path, found, InventoryLinks(*(_amount(links, key, f"{where}, links", _POSITIVE) for key in
                                                   ("between_hosts_gbit", "within_host_GBps"))), currency,
                     {name: _facts(name, one, f"{where}, devices.{name}") for name, one in devices.items()})


def devices_of(text: str) -> tuple[tuple[int, str], ...] | None:
    """Return (count, name) of each kind in a text such as "2 x A100 + 2 x RTX 3090"; None for another form. Pure.

    >>> devices_of("2 x A100-40GB"), devices_of("CPU"), devices_of("0 x V100")
    (((2, 'A100-40GB'),), ((1, 'CPU'),), None)
    """
    found = [_DEVICES.fullmatch(part.strip()) for part in re.split(r"[+,]", text)]
    kinds = tuple((int(match[1] or 1), match[2]) for match in found if match)
    return kinds if len(kinds) == len(found) and all(count > 0 for count, _ in kinds) else None


def _same_host(name: str, node: str) -> bool:
    """Return whether two names mean one host: they are equal, or one is the other's first part."""
    return name == node or name.partition(".")[0] == node.partition(".")[0] and ("." in name) != ("." in node)


def _host(given: Any, where: str) -> InventoryHost:
    host = _mapping(given, where, "it")
    _known(host, where, ("name", "devices", "price_per_hour", "power_w", "count", "mtbf_hours"))
    name, text, count = host.get("name"), host.get("devices"), host.get("count", 1)
    if not (isinstance(name, str) and re.fullmatch(r"[^\s,:]+", name.strip())):
        raise _refusal(where, "name", name, "the host's name, without spaces, commas and colons; '*' for all other "
                       "hosts")
    kinds = devices_of(text) if isinstance(text, str) else None
    if kinds is None:
        raise _refusal(where, "devices", text, 'a text such as "2 x A100-40GB"')
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RANKS:
        raise _refusal(where, "count", count, "the number of such hosts, 1 or more")
    return InventoryHost(name.strip(), kinds, _amount(host, "price_per_hour", where, _AT_LEAST_0),
                         _amount(host, "power_w", where, _POSITIVE), count,
                         _amount(host, "mtbf_hours", where, _POSITIVE))


def _facts(name: str, given: Any, where: str) -> InventoryDevice:
    facts = _mapping(given, where, "it")
    _known(facts, where, ("memory_gb", "flops", "bandwidth_GBps", "power_w"))
    flops = _mapping(facts.get("flops", {}), where, "flops")
    _known(flops, f"{where}, flops", ("fp32", "tf32", "bf16", "fp16", "fp8", "fp64"))
    peaks = {key: _amount(flops, key, f"{where}, flops", _PEAK) for key in flops}
    return InventoryDevice(name, _amount(facts, "memory_gb", where, _POSITIVE),
                       {key: peak for key, peak in peaks.items() if peak is not None},
                       _amount(facts, "bandwidth_GBps", where, _POSITIVE), _amount(facts, "power_w", where, _POSITIVE))


_POSITIVE: tuple[Callable[[float], bool], str] = (lambda value: value > 0, "a number above 0")
_PEAK: tuple[Callable[[float], bool], str] = (lambda value: 1e6 < value < 1e24, "FLOP/s such as 312e12")
_AT_LEAST_0: tuple[Callable[[float], bool], str] = (lambda value: value >= 0, "a number of 0 or more")


def _amount(given: Mapping[str, Any], key: str, where: str, bound: tuple[Callable[[float], bool], str]) -> float | None:
    """Return the number ``key``, None where it lacks; `UserError` for anything else."""
    if key not in given:
        return None
    value: Any = given[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and abs(value) < MOST_NUMBER and bound[0](value)):  # NaN is not, either
        raise _refusal(where, key, value, bound[1])
    return float(value)


def _mapping(given: Any, where: str, what: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise _refusal(where, what, given, "a mapping, one key: value a line")
    return given


def _known(given: Mapping[str, Any], where: str, names: tuple[str, ...]) -> None:
    for key in given:
        if key not in names:
            raise UserError(f"{where} has the key {key!r}", nearest(str(key), names), "correct or remove the key")


def _refusal(where: str, key: str, value: Any, expected: str) -> UserError:
    return UserError(f"{where}: {key} is {shown(value)}", expected, "correct the inventory")
