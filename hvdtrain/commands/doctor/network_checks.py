"""Checks of names, networks and links between hosts. Pure.

MPI's TCP transport tries every network that two hosts seem to share. A bridge of a container or virtual machine program
has the same address on every host and leads nowhere: the job hangs at its first message.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.cluster.launchers import openmpi
from hvdtrain.cluster.links import SLOW, LinkTiming, PairLink, slow
from hvdtrain.comm import transport_sweep as shown
from hvdtrain.commands.doctor.facts import SLOWS, STOPS, Facts, Problem, known
from hvdtrain.core import terminal

VIRTUAL = re.compile(r"docker|br-|virbr|veth|vmnet|vboxnet|cni|flannel|cali|lxc|lxdbr|podman|kube|dummy|ifb")
"""Names of interfaces that do not lead to another host."""

Found = Iterator[Problem]


def usable(host: Facts) -> list[dict[str, Any]]:
    """Return the interfaces of a host that may lead to another: up, no loopback, none of `VIRTUAL`."""
    rows = host["interfaces"] if known(host["interfaces"]) else []
    return [row for row in rows if row["up"] and not VIRTUAL.match(row["name"])
            and not ipaddress.ip_address(row["address"]).is_loopback]


def common(hosts: Sequence[Facts]) -> list[str]:
    """Return the networks in which every host has a usable interface, in the first host's order."""
    shared = [[row["network"] for row in usable(host)] for host in hosts]
    return [network for network in dict.fromkeys(shared[0]) if all(network in each for each in shared[1:])]


def one_name(hosts: Sequence[Facts]) -> Found:
    """Check that every host has a name of its own: ranks of hosts with one name count as ranks of one host."""
    boots: dict[str, list[str]] = {}
    for host in hosts:
        boots.setdefault(host["host"], []).append(str(host["boot"]))
    for name, found in boots.items():
        if len(found) > 1:
            yield Problem(STOPS, (name,), f"{len(found)} hosts are named {name}: their ranks would count "
                          "as ranks of one host", "give each its own name: hostnamectl set-hostname NAME")


def loopback_names(hosts: Sequence[Facts]) -> Found:
    """Check, with several hosts, that a host's own name is no loopback address."""
    if len(hosts) < 2:
        return
    for host in hosts:
        addresses = host["addresses"] if known(host["addresses"]) else []
        if addresses and all(ipaddress.ip_address(a.split("%")[0]).is_loopback for a in addresses):
            own = usable(host)[0]["address"] if usable(host) else "ADDRESS"
            yield Problem(SLOWS, (host["host"],), f"the name {host['host']} means {', '.join(addresses)} on that host: "
                          "programs that announce the name (Gloo, horovodrun) make other hosts connect to themselves",
                          f"run there: echo '{own} {host['host']}' | sudo tee -a /etc/hosts")


def networks(hosts: Sequence[Facts]) -> Found:
    """Check that all hosts share a network, and that none only seems shared."""
    if len(hosts) < 2 or not all(known(host["interfaces"]) for host in hosts):
        return
    cut_off = tuple(host["host"] for host in hosts if not usable(host))
    if cut_off:
        yield Problem(STOPS, cut_off, "no interface leads to other hosts: only loopback and bridges of containers or "
                      "virtual machines are up", "bring the network up: ip link set eth0 up; or run containers with "
                      "docker run --network host")
        return
    shared, everywhere = common(hosts), tuple(host["host"] for host in hosts)
    if not shared:
        each = "; ".join(f"{host['host']}: {', '.join(dict.fromkeys(row['network'] for row in usable(host)))}"
                         for host in hosts)
        yield Problem(SLOWS, everywhere, f"no network has an interface of every host ({each}): they connect "
                      "through a router at best", f"name the networks to use: {pinned(hosts[0], _all_of(hosts))}")
    alike = _alike(hosts)
    if alike and shared:
        names = ", ".join(f"{name} ({address})" for address, name in alike.items())
        yield Problem(SLOWS, everywhere, f"{names} has the same address on several hosts: MPI's and NCCL's connections "
                      "may try it and hang",
                      f"name the network to use: {pinned(hosts[0], shared[0])} -x "
                      f"NCCL_SOCKET_IFNAME={_interface(hosts[0], shared[0])}")


def pinned(host: Facts, networks: str) -> str:
    """Return the options that keep the launcher of ``host`` and its MPI to networks ("10.0.0.0/24,10.1.0.0/24")."""
    found = host["mpirun"] if known(host["mpirun"]) else {"flavour": "openmpi", "version": ""}
    if found["flavour"] != "openmpi":
        return f"mpiexec -iface {_interface(host, networks.split(',')[0])}"
    daemons = (openmpi.FOUR if found["version"].startswith("4") else openmpi.FIVE).networks(networks)
    return f"mpirun --mca btl_tcp_if_include {networks} {' '.join(daemons)}"


def _all_of(hosts: Sequence[Facts]) -> str:
    return ",".join(dict.fromkeys(row["network"] for host in hosts for row in usable(host)))


def _alike(hosts: Sequence[Facts]) -> dict[str, str]:
    """Return addresses that more than one host has, loopback apart; by address the interface's name."""
    seen: dict[str, list[str]] = {}
    for host in hosts:
        for row in host["interfaces"]:
            if row["up"] and not ipaddress.ip_address(row["address"]).is_loopback:
                seen.setdefault(row["address"], []).append(row["name"])
    return {address: names[0] for address, names in seen.items() if len(names) > 1}


def _interface(host: Facts, network: str) -> str:
    return next(row["name"] for row in usable(host) if row["network"] == network)


def link_row(link: PairLink) -> dict[str, Any]:
    """Return a link as JSON has it, for the facts of its first host; `links_of` undoes it."""
    return asdict(link)


def links_of(hosts: Sequence[Facts]) -> list[PairLink]:
    """Return the links in the facts of all hosts, which refer to hosts by their places in ``hosts``."""
    rows = [row for host in hosts if known(host["links"]) for row in host["links"]]
    return [PairLink((row["hosts"][0], row["hosts"][1]), (row["ranks"][0], row["ranks"][1]), row["latency_s"],
                     LinkTiming(**row["there"]), LinkTiming(**row["back"]), LinkTiming(**row["both"]), row["at_once"])
            for row in rows]


def slow_links(hosts: Sequence[Facts]) -> Iterator[Problem]:
    """Check that every pair of hosts carries at least half of the median of the others."""
    for link, middle_Bps in slow(links_of(hosts)):
        a, b = (hosts[place] for place in link.hosts)
        cards = " and ".join(dict.fromkeys(f"ethtool {row['name']}" for host in (a, b) for row in usable(host)[:1]))
        yield Problem(SLOWS, (a["host"], b["host"]),
                      f"the link between {a['host']} and {b['host']} carries {shown.gbit(link.rate_Bps)} in each "
                      f"direction, expected at least {SLOW:g} of the other pairs' median of {shown.gbit(middle_Bps)}",
                      f"run {cards or 'ethtool'} on both to see at which speed they are connected, and change the "
                      "cable or port that is slow; until then leave the slow host out of -H")


def text(hosts: Sequence[Facts]) -> list[str]:
    """Return the tables of all pairs as `bench wire` prints them, and the sentences below."""
    if len(hosts) < 2:
        return [f"{shown.ONE_HOST}."]
    found, names = links_of(hosts), [host["host"] for host in hosts]
    if not found:
        return [f"links between hosts: {str(hosts[0]['links'] or 'not measured').rstrip('.')}."]
    each = [f"{title}\n{terminal.as_text(shown.HEADERS, rows)}\n" for title, rows in shown.tables(found, names)]
    return ["", *each, *(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in shown.words(found, names))]
