"""The floor of a step over several hosts: its formula, whom it is for, what it takes from what jobs told, its words."""

from __future__ import annotations

import types

import pytest

from benchmarks import floor, worker
from benchmarks.peers import Prepared, contender
from benchmarks.peers.ours import _Marks
from hvdtrain.cluster import boot, links
from hvdtrain.cluster.links import LinkTiming, PairLink
from hvdtrain.cluster.topology import HostRanks, Topology

LINK = {"hosts": 2, "slowest": "a and b", "rate_Bps": 100e6, "latency_s": 1e-5}


def told(first=0.02, update=0.004, compute=0.05, rate=100e6, **changes):
    marks = {"update_s": update, "compute_s": compute} | ({} if first is None else {"first_s": first})
    return {"link": LINK | {"rate_Bps": rate}, "gradient_bytes": 40_000_000, "marks": [marks] * 3} | changes


def contenders(*names):
    return [contender(name, "torch") for name in names]


# --- the formula ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("hosts, found", [(1, 0), (2, 1), (3, 4 / 3), (4, 3 / 2)])
def test_hosts_send_what_a_ring_sends(hosts, found):
    assert floor.sent_bytes(12, hosts) == pytest.approx(12 * found)


def test_the_floor_is_computing_or_the_way_of_the_bytes():
    least = floor.Floor(0.05, "plain-each", 0.02, 0.004, 40e6, 100e6, "a and b", 2)
    assert least.seconds() == pytest.approx(0.02 + 0.4 + 0.004)
    assert least.seconds(0.5) == pytest.approx(0.02 + 0.2 + 0.004)
    assert floor.Floor(0.5, "", 0.02, 0.004, 40e6, 100e6, "", 2).seconds() == 0.5
    assert floor.Floor(0.1, "", None, 0.004, 40e6, 100e6, "", 2).seconds() == pytest.approx(0.404)


def test_it_is_for_what_sends_all_bytes_or_half_of_them():
    for name in ("hvdtrain", "hvdtrain-mpi", "hvdtrain+fp16", "hvdtrain-shared+bf16"):
        assert floor.counts(contender(name, "torch")), name
    for name in ("hvdtrain-null", "hvdtrain+powersgd", "hvdtrain+auto", "hvdtrain@auto", "hvdtrain/zero1",
                 "hvdtrain/compiled", "hvdtrain/remat2", "hvdtrain/pipeline", "ddp", "ddp+fp16", "plain-each"):
        assert not floor.counts(contender(name, "torch")), name


# --- what it takes -------------------------------------------------------------------------------------------------

def test_the_least_marks_and_the_median_rate_of_hvdtrains_contenders():
    names = ("hvdtrain", "hvdtrain-mpi", "hvdtrain+fp16", "ddp", "plain-each", "hvdtrain-null")
    times = {name: [ms, ms + 1, ms + 2] for name, ms in zip(names, (440.0, 430.0, 240.0, 400.0, 50.0, 60.0))}
    about = {name: {} for name in names} | {"hvdtrain": told(0.03, rate=90e6), "hvdtrain-mpi": told(update=0.006),
                                            "hvdtrain+fp16": told(0.021, 0.005, rate=110e6)}
    least = floor.find(times, contenders(*names), about)
    assert least == floor.Floor(0.051, "plain-each", 0.02, 0.004, 40e6, 100e6, "a and b", 2)
    ratios = floor.record(least, times, contenders(*names))["contenders"]
    assert {name: found["ratio"] for name, found in ratios.items()} == {
        "hvdtrain": pytest.approx(441 / 424), "hvdtrain-mpi": pytest.approx(431 / 424),
        "hvdtrain+fp16": pytest.approx(241 / 224)}
    text = "\n".join(floor.lines(least, times, contenders(*names)))
    for words in ("compute 51.00 ms (plain-each)", "first bucket ready 20.00 ms", "bytes 38.1 MiB", "update 4.00 ms",
                  "0.8000 Gbit/s in each direction (a and b", "floor, uncompressed: 424.00 ms", "floor, fp16: 224.00",
                  "hvdtrain-mpi: 431.00 ms, 1.017 of the floor, uncompressed", "hvdtrain+fp16: 241.00 ms, 1.076"):
        assert words in text, text
    assert "ddp" not in text and "plain-each:" not in text


def test_without_a_contender_that_exchanges_nothing_the_phases_tell():
    least = floor.find({"hvdtrain": [440.0]}, contenders("hvdtrain"), {"hvdtrain": told()})
    assert least.compute_s == pytest.approx(0.054) and least.compute_of == "hvdtrain's own phases"
    null = floor.find({"hvdtrain": [440.0], "hvdtrain-null": [70.0]}, contenders("hvdtrain", "hvdtrain-null"),
                      {"hvdtrain": told(), "hvdtrain-null": {}})
    assert null.compute_s == pytest.approx(0.07) and null.compute_of == "hvdtrain-null"


def test_a_first_bucket_inside_a_graph_counts_as_ready_at_once_and_that_is_said():
    least = floor.find({"hvdtrain": [440.0]}, contenders("hvdtrain"), {"hvdtrain": told(None)})
    assert least.first_s is None and "inside a graph, not seen" in floor.lines(least, {}, [])[2]


@pytest.mark.parametrize("about", [{}, told(link=None), told(marks=[])])
def test_one_host_or_nothing_measured_has_no_floor(about):
    times = {"hvdtrain": [440.0]}
    assert floor.find(times, contenders("hvdtrain"), {"hvdtrain": about}) is None
    assert floor.find({}, contenders("hvdtrain"), {"hvdtrain": told()}) is None
    assert floor.record(None, times, contenders("hvdtrain")) is None


# --- what a rank tells ---------------------------------------------------------------------------------------------

class Both:
    """Two ranks, of which the other one says ``other``."""

    def __init__(self, other):
        self.other = other

    def gather(self, own):
        return [own, self.other]


def test_a_mark_is_the_median_of_the_rank_where_it_is_largest():
    prepared = Prepared(print, float, list, "mpi", marks=lambda: {"first_s": [1.0, 9.0, 2.0], "update_s": [3.0]})
    assert worker._marks(prepared, Both({"first_s": 1.5, "update_s": 4.0})) == {"first_s": 2.0, "update_s": 4.0}
    assert worker._marks(Prepared(print, float, list, "mpi"), Both({})) == {}


def test_the_first_bucket_of_each_step_is_stamped_and_all_are_put():
    put, seconds = [], {"compute": 0.0, "update": 0.0}
    run = types.SimpleNamespace(dp=types.SimpleNamespace(in_graph=False, put=lambda index, x: put.append(index)),
                                timeline=types.SimpleNamespace(totals=types.SimpleNamespace(seconds=seconds)))
    marks = _Marks(run)
    for step in range(3):
        marks.begin()
        run.dp.put(0, None)
        first = marks._now["first_s"]
        run.dp.put(1, None)
        assert marks._now["first_s"] == first
        seconds["compute"] += 2.0
        seconds["update"] += step
        marks.end()
    assert put == [0, 1] * 3
    found = marks.taken()
    assert (found["compute_s"], found["update_s"], len(found["first_s"])) == ([2.0] * 3, [0.0, 1.0, 2.0], 3)
    assert marks.taken() == {}


def test_a_bucket_that_is_put_while_a_graph_is_traced_is_no_mark():
    put = print
    run = types.SimpleNamespace(dp=types.SimpleNamespace(in_graph=True, put=put),
                                timeline=types.SimpleNamespace(totals=types.SimpleNamespace(
                                    seconds={"compute": 0.0, "update": 0.0})))
    marks = _Marks(run)
    marks.begin()
    marks.end()
    assert run.dp.put is put and "first_s" not in marks.taken()


def test_the_slowest_link_is_measured_where_there_are_several_hosts(monkeypatch):
    hosts = [HostRanks("a", (0, 1), 2), HostRanks("b", (2,), 2), HostRanks("c", (3,), 2)]
    ways = LinkTiming(1, 1.0), LinkTiming(1, 1.0)
    found = [PairLink((0, 1), (0, 2), 1e-5, *ways, LinkTiming(10, 1.0)),
             PairLink((1, 2), (2, 3), 2e-5, *ways, LinkTiming(5, 1.0))]
    monkeypatch.setattr("hvdtrain.cluster.topology.survey", lambda control: Topology(tuple(hosts)))
    monkeypatch.setattr(boot, "has_mpi", lambda: True)
    monkeypatch.setattr(boot, "mpi_comm", lambda: None)
    monkeypatch.setattr(links, "measure", lambda comm, ranks, s: found if ranks == [(0, 1), (2,), (3,)] else [])
    assert worker._link(None) == {"hosts": 3, "slowest": "b and c", "rate_Bps": 5.0, "latency_s": 2e-5}
    del hosts[1:]
    assert worker._link(None) is None
