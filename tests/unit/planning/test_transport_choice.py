"""Choice of collectives auto: candidates, estimates, the decision and reasons for doubt. Numbers only."""

import pytest

from hvdtrain.planning.linear import Link
from hvdtrain.planning.simulator import short_of_cores
from hvdtrain.planning.transport_choice import (
    MeasuredTransport,
    TransportCost,
    TransportJob,
    WireChoice,
    better,
    by_rule,
    candidates,
    changed,
    decide,
    doubt,
    estimate,
    rationed,
    table,
)

NO = float("inf")


def row(name, wire_ms, busy_ms=0.0, cost_ms=None):
    return TransportCost(name, wire_ms / 1e3, busy_ms / 1e3, (wire_ms if cost_ms is None else cost_ms) / 1e3, 0.0, 1e8)


@pytest.mark.parametrize("job, names, left_out", [
    (TransportJob((2,)), ["shared"], {"mpi": "all ranks share", "horovod": "all ranks share"}),
    (TransportJob((1, 1)), ["mpi", "horovod"], {"shared": "it would be mpi"}),
    (TransportJob((3, 1)), ["shared", "mpi", "horovod"], {}),
    (TransportJob((3, 1), rationed="a quota gives rank 2 half a core"), ["shared", "mpi"],
     {"horovod": "half a core, which its thread would use up"}),
    (TransportJob((1, 1), no_horovod="not built"), ["mpi"], {"shared": "it would be mpi", "horovod": "not built"}),
    (TransportJob((2, 2), no_shared="other namespaces"), ["mpi", "horovod"], {"shared": "other namespaces"}),
    (TransportJob((2,), no_shared="other namespaces"), ["mpi", "horovod"], {"shared": "other namespaces"}),
    (TransportJob((2, 2), waits_within=True), ["shared", "mpi"], {"horovod": "sync_batchnorm"}),
], ids=range(8))
def test_candidates(job, names, left_out):
    found, why = candidates(job)
    assert found == names and sorted(why) == sorted(left_out)
    assert all(part in why[name] for name, part in left_out.items())


def test_a_quota_of_one_rank_counts_for_all():
    assert rationed([("a", NO, 2), ("a", 2.0, 2)]) == ""
    assert rationed([("a", NO, 2), ("b", 0.3, 2), ("b", 0.6, 2)]) == "a quota gives rank 1 on b 0.3 of 2 cores"


@pytest.mark.parametrize("hosts, threads, short", [([(1, 2), (1, 2)], 1, 0.0), ([(1, 2), (3, 2)], 1, 1.0),
                                                   ([(2, 3)], 1, 0.5), ([(1, 2)], 2, 1.0), ([(4, 64)], 15, 0.0)])
def test_cores_that_are_short(hosts, threads, short):
    assert short_of_cores(hosts, threads) == pytest.approx(short)


def test_the_reckoning_adds_processor_time_where_cores_are_short():
    found = [MeasuredTransport("mpi", Link(0.001, 1e-9), 0.5),
             MeasuredTransport("horovod", Link(0.002, 0.0), 1.0, 0.02)]
    free, short = estimate(found, 1e6, 0.0), estimate(found, 1e6, 1.0)
    assert [r.cost_s for r in free] == pytest.approx([0.002, 0.002])
    assert [r.cost_s for r in short] == pytest.approx([0.003, 0.004])
    assert free[0].busy_s == pytest.approx(0.001) and free[0].rate_Bps == pytest.approx(1e9) and free[1].rate_Bps == 0


@pytest.mark.parametrize("rows, name, runner_up, words", [
    ([row("mpi", 100), row("horovod", 80)], "horovod", "mpi", "80 ms a step at most, mpi 100 ms"),
    ([row("mpi", 103, 10), row("horovod", 100, 90)], "mpi", "horovod", "within 5%, and it takes less processor time"),
    ([row("mpi", 106, 10), row("horovod", 100, 90)], "horovod", "mpi", "100 ms"),
    ([row("shared", 100, 10), row("mpi", 102, 20), row("horovod", 300, 90)], "shared", "mpi", "within 5%"),
    ([row("mpi", 1)], "mpi", None, "no other")])
def test_the_decision(rows, name, runner_up, words):
    choice = decide(rows)
    assert (choice.name, choice.runner_up) == (name, runner_up) and words in choice.reason


def test_by_rule_says_so():
    assert by_rule(["mpi", "horovod"], "a run of 5 updates").reason == (
        "mpi, plain MPI from rank to rank (flat), by rule: a run of 5 updates")


ROWS = [row("mpi", 100), row("shared", 120), row("horovod", 140)]


@pytest.mark.parametrize("step_ms, wait_ms, tried", [(300, 90, None), (300, 124, None), (300, 126, "shared"),
                                                     (300, 119, None), (300, 500, "shared"), (3000, 150, None)])
def test_a_wait_longer_than_reckoned_makes_it_try_the_next_best(step_ms, wait_ms, tried):
    found = doubt(ROWS, WireChoice("mpi", ""), step_ms / 1e3, wait_ms / 1e3, ("shared", "horovod"))
    assert (found and found[0]) == tried


@pytest.mark.parametrize("costs, easy, wait_ms, tried", [
    ((100, 113, 114), ("b", "c"), 50, "b"), ((100, 113, 114), ("c",), 50, "c"), ((100, 113, 114), (), 50, None),
    ((100, 116, 117), ("b", "c"), 50, None), ((100, 113, 114), ("b", "c"), 14, None)])
def test_one_that_was_reckoned_about_as_good_is_tried_where_steps_wait(costs, easy, wait_ms, tried):
    """Of steps of 300 ms; 15 are seen."""
    found = doubt([row(n, ms) for n, ms in zip("abc", costs)], WireChoice("a", ""), 0.3, wait_ms / 1e3, easy)
    assert (found and found[0]) == tried and (not found or "within 15%" in found[1])


def test_of_two_the_faster_one_stays():
    assert better("mpi", 0.2, "shared", 0.19) == (
        "shared", "shared from now on: mpi took 200 ms a step, shared 190 ms")
    assert better("mpi", 0.2, "shared", 0.2)[0] == "mpi"


@pytest.mark.parametrize("waits, anew", [([50, 50, 50], True), ([50, 50], False), ([50, 19, 50], False),
                                         ([19, 50, 50, 50], True), ([5, 50, 50], False), ([4, 4, 4], True),
                                         ([21, 21, 21], True), ([6, 6, 6], False)])
def test_a_link_has_changed_when_three_windows_say_so(waits, anew):
    """Settled: steps of 100 ms of which 10 wait; 20 is twice that, and 5 ms are seen."""
    assert changed((0.1, 0.010), [(0.1, w / 1e3) for w in waits]) is anew


def test_what_is_hidden_may_change_by_any_factor():
    assert not changed((0.1, 0.0001), [(0.1, 0.004)] * 3)
    assert not changed((0.1, 0.004), [(0.1, 0.0)] * 3)


def test_the_table_marks_the_choice():
    lines = table(ROWS, {"nothing": "why"}, "shared", 38e6).splitlines()
    assert lines[0] == "collectives auto: 36.2 MiB of gradients a step, predicted"
    assert [line[0] for line in lines[3:6]] == [" ", ">", " "] and lines[-1] == "   nothing not considered: why"
