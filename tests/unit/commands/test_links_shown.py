"""Links between hosts as the doctor and `bench links` show them: facts, tables, slow pairs, no links."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_doctor_checks import host

from hvdtrain.cluster.links import SINGLY, LinkTiming, PairLink, rounds
from hvdtrain.comm import transport_sweep as shown
from hvdtrain.commands.bench import wire
from hvdtrain.commands.bench.session import Session
from hvdtrain.commands.doctor import checks, gather
from hvdtrain.commands.doctor import cli as table
from hvdtrain.commands.doctor import network_checks as link_checks
from hvdtrain.core.errors import WaitTimeout

NAMES = ["a", "b", "c", "d"]


def link(a, b, mbit=1000.0, at_once=1):
    way = LinkTiming(250_000, 2e6 / (mbit * 1e6), 6)
    return PairLink((a, b), (2 * a, 2 * b), 25e-6, way, way, way, at_once)


def test_a_pair_is_three_rows_under_the_columns_of_nccl_tests():
    ways = (LinkTiming(size, 8e-6, n) for size, n in ((1000, 5), (2000, 6), (4000, 7)))
    one = PairLink((0, 2), (0, 4), 25e-6, *ways)
    there, back, both = shown.records(one, NAMES)
    assert (there["from"], there["to"], back["from"], back["to"]) == ("a", "c", "c", "a")
    assert both["link_Gbitps"] == pytest.approx(4.0) and both["busbw_GBps"] == both["algbw_GBps"] == pytest.approx(0.5)
    assert [r["collective"] for r in (there, back, both)] == ["send", "send", "sendrecv"]
    assert shown.cells(there) == ["a to c", "1000", "1000", "uint8", "none", "-1", "8.00", "0.1250", "0.1250", "1.00",
                                  "25.00"]
    assert shown.cells(both)[0] == "both directions at once"
    assert all(len(shown.cells(row)) == len(shown.HEADERS) for row in (back, both))
    (title, rows), = shown.tables([one], NAMES)
    assert title == "a and c: link over MPI, ranks 0 and 4" and len(rows) == 3


def test_the_slowest_pair_is_named():
    said, = shown.words([link(0, 1), link(0, 2, 100.0), link(1, 2)], NAMES[:3])
    assert said == ("the slowest pair of hosts: a and c, 0.1000 Gbit/s in each direction with both in use, "
                    "latency 25.00 us; median of the others 1.00 Gbit/s")
    assert shown.words([link(0, 1)], NAMES[:2])[0].startswith("the only pair of hosts: a and b, 1.00 Gbit/s")


def test_of_many_hosts_it_is_said_what_was_sampled_and_how():
    names = [f"n{i}" for i in range(12)]
    found = [link(a, b, 1000.0 - a - b, at_once=6) for group in rounds(12)[:4] for a, b in group]
    said = " | ".join(shown.words(found, names))
    assert "24 of 66 pairs were measured, each host with 4 of the others" in said
    assert f"the {SINGLY} slowest pairs are shown" in said and "up to 6 pairs were measured at a time" in said
    assert len(shown.tables(found, names)) == SINGLY


def hosts_of(found):
    names = sorted({h for one in found for h in one.hosts})
    return json.loads(json.dumps([host(host=NAMES[i], boot=str(i), links=[
        link_checks.link_row(one) for one in found if one.hosts[0] == i]) for i in names]))


def test_the_doctor_keeps_links_in_facts_and_shows_what_the_bench_shows():
    found = [link(0, 1), link(0, 2, 100.0), link(1, 2)]
    hosts = hosts_of(found)
    assert sorted(link_checks.links_of(hosts), key=lambda one: one.hosts) == found
    text = "\n".join(link_checks.text(hosts))
    for title, rows in shown.tables(found, NAMES[:3]):
        assert title in text and all(row[6] in text for row in rows)
    assert "The slowest pair of hosts: a and c, 0.1000 Gbit/s" in text
    assert text in table.text(hosts, [], plain=True)


def test_a_slow_pair_slows_a_run_and_is_told_with_its_remedy():
    problems = [p for p in checks.diagnose(hosts_of([link(0, 1), link(0, 2, 100.0), link(1, 2)])) if "link" in p.got]
    problem, = problems
    assert (problem.severity, problem.hosts) == ("slows", ("a", "c"))
    assert problem.got == ("the link between a and c carries 0.1000 Gbit/s in each direction, expected at least 0.5 of "
                           "the other pairs' median of 1.00 Gbit/s")
    assert problem.do.startswith("run ethtool eth0 on both")
    assert not list(link_checks.slow_links(hosts_of([link(0, 1), link(0, 2, 600.0), link(1, 2)])))


def test_no_links_are_said_in_words(monkeypatch):
    assert link_checks.text([host()]) == ["one host: there is no link between hosts to measure."]
    pair = [host(), host(host="b", ranks=[1])]
    monkeypatch.setattr(gather.boot, "has_mpi", lambda: False)
    gather._add_links(pair)
    assert link_checks.text(pair) == [f"links between hosts: unknown: {shown.NO_MPI}."]
    monkeypatch.setattr(gather.boot, "has_mpi", lambda: True)
    monkeypatch.setattr(gather.boot, "mpi_comm", lambda: None)

    def hangs(comm, hosts, timeout_s):
        raise WaitTimeout("waited 10 s")

    monkeypatch.setattr(gather.links, "measure", hangs)
    gather._add_links(pair)
    assert pair[0]["links"] == "unknown: WaitTimeout: waited 10 s" and not list(link_checks.slow_links(pair))
    monkeypatch.setattr(gather.links, "measure", lambda comm, hosts, timeout_s: [link(0, 1)])
    gather._add_links(pair)
    assert link_checks.links_of(pair) == [link(0, 1)] and pair[1]["links"] == []


def test_the_bench_measures_prints_and_keeps(monkeypatch, capsys):
    from hvdtrain.backends.numpy import Ops
    from hvdtrain.cluster.control import SoloControl
    from hvdtrain.cluster.topology import arrange
    from hvdtrain.comm.collectives.base import NullCollectives

    monkeypatch.setattr(wire.boot, "has_mpi", lambda: True)
    monkeypatch.setattr(wire.boot, "mpi_comm", lambda: None)
    monkeypatch.setattr(wire.measuring, "measure", lambda comm, hosts: [link(0, 1)] if hosts == [(0,), (1,)] else None)
    kept = []
    session = Session(SoloControl(), NullCollectives(), Ops(), "numpy",
                      topology=arrange([("x", [0], np.inf), ("y", [0], np.inf)]))
    wire._tell_links(session, kept.append, markdown=True)
    text = capsys.readouterr().out
    assert "x and y: link over MPI" in text and "| x to y | 250000 |" in text and "the only pair of hosts" in text
    assert [(row["from"], row["to"], row["wire"]) for row in kept] == [("x", "y", "mpi"), ("y", "x", "mpi"),
                                                                       ("x", "y", "mpi")]
    session.topology = arrange([("x", [0], np.inf)])
    wire._tell_links(session, kept.append, markdown=False)
    assert capsys.readouterr().out == f"note: {shown.ONE_HOST}\n" and len(kept) == 3
