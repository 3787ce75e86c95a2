"""Decisions of a supervisor: a table of histories, and properties that hold for any."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.launchers.spec import HostSlots
from hvdtrain.cluster.liveness.causes import KINDS
from hvdtrain.commands.launch import restart_policy
from hvdtrain.commands.launch.restart_policy import (
    End,
    HostCandidate,
    Launch,
    LaunchAttempt,
    next_launch,
    refit,
    started_hosts,
)

A, B = HostSlots("a", 2), HostSlots("b", 1)
BOTH = [HostCandidate(A, here=True), HostCandidate(B)]


def after(*kinds, hosts=BOTH, restarts=9, **fields):
    """Return the decision after attempts of these kinds, each a step further than the one before."""
    return next_launch(attempts(*kinds, **fields), hosts, restarts)


def attempts(*kinds, host="a", **fields):
    """Return attempts on both hosts."""
    return [replace(LaunchAttempt(i + 1, kind, "words", 0, host, (A, B), i, i + 1, i + 1, 8), **fields)
            for i, kind in enumerate(kinds)]


def test_the_first_attempt_takes_every_host_at_once():
    assert next_launch((), BOTH, 0) == Launch((A, B), why="the first attempt")
    assert next_launch((), [], 0).hosts == (), "an allocation decides"


@pytest.mark.parametrize("kind, status", [("done", 0), ("user", 2), ("requeue", 75), ("interrupted", 130)])
def test_ends_that_are_passed_on(kind, status):
    found = after("lost", kind)
    assert isinstance(found, End) and found.status == status


@pytest.mark.parametrize("kind", ["exception", "non_finite", "disk", "lost", "hang", "unreachable", "echo"])
def test_the_first_restart_is_at_once(kind):
    found = after(kind, begin=-1, end=-1, checkpoint=-1)
    assert isinstance(found, Launch) and found.wait_s == 0 and found.hosts == (A, B)


@pytest.mark.parametrize("kind", ["exception", "non_finite", "disk"])
def test_the_programs_own_trouble_ends_it_when_it_comes_again_at_one_step(kind):
    again = after(kind, kind, end=7, checkpoint=5)
    assert isinstance(again, End) and again.status == 1 and "as before" in again.why
    assert isinstance(after(kind, kind), Launch), "at another step, after a newer checkpoint"
    between = [*attempts(kind, end=7, checkpoint=5), *attempts("lost", end=6, checkpoint=5),
               *attempts(kind, end=7, checkpoint=5)]
    assert isinstance(next_launch(between, BOTH, 9), End), "a lost rank in between changes nothing"
    newer = [*attempts(kind, end=7, checkpoint=5), *attempts(kind, end=7, checkpoint=6)]
    assert isinstance(next_launch(newer, BOTH, 9), Launch), "a newer checkpoint: it came further"


@pytest.mark.parametrize("kind", ["lost", "hang", "unreachable"])
def test_a_lost_rank_ends_it_after_five_at_one_step(kind):
    for n in range(1, 6):
        found = after(*[kind] * n, end=7, checkpoint=5)
        assert isinstance(found, End) == (n == 5), found


def test_the_restarts_that_were_asked_for():
    assert isinstance(after("lost", "lost", restarts=2), Launch)
    over = after("lost", "lost", "lost", restarts=2)
    assert isinstance(over, End) and over.status == 1 and "the 2 restarts are used up" in over.why
    assert after("lost", restarts=0).status == 1


def test_waits_double_while_no_step_is_gained_and_stop_when_one_is():
    def waits(n):
        return next_launch([replace(one, end=-1, begin=-1, checkpoint=-1, kind="lost" if i % 2 else "disk", host="")
                            for i, one in enumerate(attempts(*["lost"] * n))], BOTH, 99)

    assert waits(1).wait_s == 0
    assert waits(2).wait_s == 2
    idle = [*attempts("lost", end=9, checkpoint=5), *attempts("lost", begin=5, end=8, checkpoint=5)]
    assert next_launch(idle, BOTH, 9).wait_s == 1
    gained = [*idle, *attempts("lost", begin=5, end=12, checkpoint=5)]
    assert next_launch(gained, BOTH, 9).wait_s == 0


def test_memory_is_never_tried_again_at_the_same_size():
    smaller = after("oom", micro_batch=8)
    assert smaller.micro_batch == 4 and "micro-batches of 4" in smaller.why
    again = [*attempts("oom", end=3, checkpoint=2, micro_batch=8), *attempts("oom", end=3, checkpoint=2, micro_batch=4)]
    assert next_launch(again, BOTH, 9).micro_batch == 2
    assert after("oom", micro_batch=1).status == 1
    assert after("oom", micro_batch=0).status == 1, "a program whose sizes are not known"


def test_a_host_that_failed_twice_is_left_out_and_returns():
    once = after("lost", host="b")
    assert once.hosts == (A, B)
    out = after("lost", "hang", host="b")
    assert out.hosts == (A,) and out.left_out == ("b",) and "without b" in out.why
    history = [*attempts("lost", "hang", host="b"), replace(attempts("lost", "lost", "lost")[2], left_out=("b",))]
    back = next_launch(history, BOTH, 9)
    assert back.hosts == (A, B) and "with b again" in back.why
    silent = next_launch(history, [BOTH[0], HostCandidate(B, answers=False)], 9)
    assert silent.hosts == (A,)


def test_the_last_host_stays_and_rank_0_is_where_the_folder_is():
    assert after("lost", "lost", hosts=[BOTH[0]]).hosts == (A,)
    assert after("lost", hosts=[replace(one, answers=False) for one in BOTH]).hosts == (A,)
    apart = [BOTH[0], HostCandidate(B, keeps=False)]
    assert after("lost", "lost", hosts=apart).hosts[0] == A, "b alone would start from nothing"
    assert after("lost", hosts=apart[::-1]).hosts == (A, B)


def test_lists_are_cut_and_extended_by_host():
    four = (HostSlots("a", 2), HostSlots("b", 2))
    assert refit(["3", "2", "1", "0"], four, (HostSlots("b", 2),)) == ["1", "0"]
    assert refit(["3", "2", "1", "0"], four, (HostSlots("a", 3), HostSlots("b", 1))) == ["3", "2", "2", "1"]
    assert refit(["3", "2", "1", "0"], four, (HostSlots("c", 1), HostSlots("a", 1))) == ["3", "3"]


ONE = st.builds(LaunchAttempt, st.just(1), st.sampled_from([k for k in KINDS if k != "done"]), st.just(""),
                st.integers(-1, 2), st.sampled_from(["", "a", "b", "c"]), st.just((A, B)), st.integers(-1, 4),
                st.integers(-1, 6), st.integers(-1, 4), st.integers(0, 9),
                st.sampled_from([(), ("a",), ("b",), ("a", "b")]))
SEEN = st.lists(st.builds(HostCandidate, st.sampled_from([A, B, HostSlots("c", 4)]), st.booleans(), st.booleans(),
                          st.booleans()), min_size=1, max_size=3, unique_by=lambda one: one.host.name)


@settings(max_examples=300, deadline=None)
@given(st.lists(ONE, max_size=12), SEEN, st.integers(0, 12))
def test_any_history(history, hosts, restarts):
    found = next_launch(history, hosts, restarts)
    if isinstance(found, End):
        assert history and (found.status != 0) and found.why
        return
    assert len(history) <= restarts or not history, "so it ends"
    assert 0 < len(found.hosts) <= len(hosts) and {h.name for h in found.hosts} <= {c.host.name for c in hosts}
    assert len({h.name for h in found.hosts}) == len(found.hosts)
    assert 0 <= found.wait_s <= restart_policy.LONGEST_WAIT_S
    if history:
        last = history[-1]
        assert last.kind not in ("user", "requeue", "interrupted", "done")
        assert last.kind != "oom" or 0 < found.micro_batch < last.micro_batch
        kept = {h.name for h in found.hosts}
        answering = [c for c in hosts if c.answers]
        assert not answering or kept & {c.host.name for c in answering}


@settings(max_examples=60, deadline=None)
@given(st.lists(ONE, min_size=40, max_size=40), SEEN, st.integers(0, 30))
def test_every_supervision_ends(drawn, hosts, restarts):
    history = []
    while isinstance(next_launch(history, hosts, restarts), Launch):
        history.append(drawn[len(history)])
    assert len(history) <= restarts + 1


def test_the_hosts_of_an_allocation_are_those_whose_ranks_started():
    marks = [{"rank": 2, "host": "b", "name": "start"}, {"rank": 0, "host": "a"}, {"rank": 1, "host": "a"},
             {"rank": 0, "host": "a", "name": "fit"}, {"rank": "x", "host": "c"}, {"name": "step"}]
    assert started_hosts(marks) == (HostSlots("a", 2), HostSlots("b", 1)) and started_hosts([]) == ()
