"""The links between hosts: what was measured of them, and a check of pairs that are slower than the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.cluster.links import SLOW, LinkTiming, PairLink, slow
from hvdtrain.comm.measure import transports as shown
from hvdtrain.commands.doctor.facts import Facts, known
from hvdtrain.commands.doctor.network_checks import usable
from hvdtrain.commands.doctor.problem import SLOWS, Problem
from hvdtrain.core import table


def told(link: PairLink) -> dict[str, Any]:
    """Return a link as JSON has it, for the facts of its first host; `links_of` undoes it."""
    return asdict(link)


def links_of(hosts: Sequence[Facts]) -> list[PairLink]:
    """Return the links in the facts of all hosts, which refer to hosts by their places in ``hosts``."""
    rows = [row for host in hosts if known(host["links"]) for row in host["links"]]
    return [PairLink((row["hosts"][0], row["hosts"][1]), (row["ranks"][0], row["ranks"][1]), row["latency_s"],
                     LinkTiming(**row["there"]), LinkTiming(**row["back"]), LinkTiming(**row["both"]), row["at_once"])
            for row in rows]


def slow_links(hosts: Sequence[Facts]) -> Iterator[Problem]:
    """Every pair of hosts carries at least half of what the others do in the middle."""
    for link, middle_Bps in slow(links_of(hosts)):
        a, b = (hosts[place] for place in link.hosts)
        cards = " and ".join(dict.fromkeys(f"ethtool {row['name']}" for host in (a, b) for row in usable(host)[:1]))
        yield Problem(SLOWS, (a["host"], b["host"]),
                      f"the link between {a['host']} and {b['host']} carries {shown.gbit(link.rate_Bps)} in each "
                      f"direction, expected at least {SLOW:g} of the other pairs' median of {shown.gbit(middle_Bps)}",
                      f"run {cards or 'ethtool'} on both to see at which speed they are connected, and change the "
                      "cable or port that is slow; until then leave the slow host out of -H")


def text(hosts: Sequence[Facts]) -> list[str]:
    """Return the tables of all pairs as `bench wire` shows them, and the sentences below; words where there are none.
    """
    if len(hosts) < 2:
        return [f"{shown.ONE_HOST}."]
    found, names = links_of(hosts), [host["host"] for host in hosts]
    if not found:
        return [f"links between hosts: {str(hosts[0]['links'] or 'not measured').rstrip('.')}."]
    each = [f"{title}\n{table.as_text(shown.HEADERS, rows)}\n" for title, rows in shown.tables(found, names)]
    return ["", *each, *(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in shown.words(found, names))]
