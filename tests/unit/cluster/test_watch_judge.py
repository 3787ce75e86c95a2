"""The verdict on ranks that are frozen, hang or are gone: by table, and what must hold for any sights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cluster.liveness.watch.judge import Judge, Others, Sight, WatchdogVerdict

BOUND_S, PAUSE_S = 10.0, 0.5
WAITS = Sight(0, waits=True, step=9, phase="vote", steps=8, longest_s=0.1)
STEPS = Sight(1, step=9, phase="backward and exchange", steps=8, longest_s=0.1)
STOPPED = replace(STEPS, state="T")


def looks(rows, n=60, others=Others(), pause_s=PAUSE_S):
    """Return the first verdict of ``n`` looks, and after how many seconds. ``rows``: sights, or a function."""
    judge = Judge(BOUND_S, PAUSE_S)
    for i in range(n):
        found = judge.look(i * pause_s, rows(i) if callable(rows) else rows, others)
        if found:
            return found, i * pause_s
    return None, n * pause_s


def test_a_stopped_rank_is_named_at_the_bound():
    assert looks([WAITS, STOPPED]) == (WatchdogVerdict("hang", (1,), BOUND_S, stopped=True), BOUND_S)
    assert looks([STOPPED]) == (WatchdogVerdict("hang", (1,), BOUND_S, stopped=True), BOUND_S)


@pytest.mark.parametrize("phase", ["start", "saving", "evaluation", "data", "step_end of Mine", "vote", "end"])
def test_a_stopped_rank_is_named_in_every_phase(phase):
    found, _ = looks([WAITS, replace(STOPPED, phase=phase, steps=0, leaving=phase == "end")])
    assert found is not None and found.ranks == (1,)


@pytest.mark.parametrize("rows, others", [
    ([WAITS, replace(STOPPED, state="t")], Others()),  # in a debugger
    ([replace(WAITS, state="T"), STOPPED], Others()),  # the whole job, by Ctrl-Z
    ([STOPPED], Others(1, 0, 1)),
    ([WAITS, replace(STEPS, phase="saving")], Others()),
    ([WAITS, replace(STEPS, phase="evaluation")], Others()),
    ([WAITS, replace(STEPS, phase="step_end of Mine")], Others()),
    ([WAITS, replace(STEPS, phase="data")], Others()),
    ([WAITS, replace(STEPS, steps=0)], Others()),  # compiles
    ([WAITS, replace(STEPS, longest_s=5.0)], Others()),  # takes long each time
    ([WAITS, replace(STEPS, first_s=60.0)], Others()),  # may compile again
    ([replace(WAITS, waits=False), STEPS], Others()),
    ([WAITS, STEPS], Others(2, 1, 0)),  # another one does not wait either
    ([WAITS, STEPS], Others(known=False)),
    ([WAITS, replace(WAITS, rank=1)], Others()),
    ([replace(WAITS, state=""), replace(STEPS, leaving=True)], Others()),  # says itself why
])
def test_no_verdict_on(rows, others):
    assert looks(rows, others=others)[0] is None


@pytest.mark.parametrize("others", [Others(), Others(3, 3, 0)])
def test_a_rank_that_hangs_in_a_step_while_all_others_wait_is_named(others):
    found, after_s = looks([WAITS, STEPS], others=others)
    assert found == WatchdogVerdict("hang", (1,), BOUND_S) and BOUND_S <= after_s <= BOUND_S + 2 * PAUSE_S


def test_an_endless_loop_is_given_processor_time():
    def rows(share):
        return lambda i: [WAITS, replace(STEPS, state="R", cpu_s=i * PAUSE_S * share)]

    assert looks(rows(1.0))[0] == WatchdogVerdict("hang", (1,), BOUND_S)
    assert looks(rows(0.25))[0] is None and looks(rows(0.0))[0] is None
    found, after_s = looks(rows(0.25), 200)
    assert found is not None and after_s == pytest.approx(4 * BOUND_S, abs=2)


def test_one_that_goes_on_between_looks_does_not_hang():
    assert looks(lambda i: [WAITS, replace(STEPS, since=i // 10)])[0] is None
    assert looks(lambda i: [WAITS, STOPPED if i % 10 else STEPS])[0] is None


def test_a_lost_rank_is_named_after_a_moment():
    judge, gone = Judge(BOUND_S, PAUSE_S), replace(STEPS, state="")
    assert judge.look(0.0, [WAITS, STEPS]) is None and judge.look(5.0, [WAITS, gone]) is None
    assert judge.look(5.04, [WAITS, gone]) == WatchdogVerdict("lost", (1,), 0.0)


def test_the_first_of_those_that_are_gone_is_the_lost_one():
    judge = Judge(BOUND_S, PAUSE_S)
    judge.look(5.0, [WAITS, replace(STEPS, state="Z"), Sight(2)])
    found = judge.look(5.2, [replace(WAITS, state=""), replace(STEPS, state=""), Sight(2)])
    assert found is not None and found.ranks == (1,)


def test_ranks_that_are_gone_together_were_ended_from_outside():
    judge, gone = Judge(BOUND_S, PAUSE_S), [replace(WAITS, state=""), replace(STEPS, state="")]
    judge.look(4.5, [WAITS, STEPS])
    assert judge.look(5.0, gone) is None and judge.look(5.04, gone) is None


def test_time_that_the_watcher_did_not_see_accuses_nobody():
    judge = Judge(BOUND_S, PAUSE_S)
    assert judge.look(0.0, [WAITS, STOPPED]) is None
    assert judge.look(1000.0, [WAITS, STOPPED]) is None  # the host was suspended, or the watcher had no processor
    assert looks([WAITS, STOPPED], pause_s=100.0)[0] is not None  # but it counts


states = st.sampled_from(["R", "S", "D", "T", "t", "Z", ""])
sights = st.lists(st.builds(Sight, rank=st.integers(0, 3), state=states, cpu_s=st.floats(0, 100),
                            step=st.integers(-1, 3), waits=st.booleans(), leaving=st.booleans(),
                            phase=st.sampled_from(["start", "vote", "data", "saving", "update"]),
                            steps=st.integers(0, 3), longest_s=st.floats(0, 3)),
                  unique_by=lambda sight: sight.rank, min_size=1, max_size=4)


@given(st.lists(st.tuples(st.floats(0, 30), sights), max_size=30))
def test_nothing_is_frozen_or_hangs_before_the_bound_was_seen(rows):
    judge, now, seen_s, last = Judge(BOUND_S, PAUSE_S), 0.0, 0.0, None
    for passed_s, row in rows:
        now += passed_s
        seen_s += 0.0 if last is None else min(passed_s, 2 * PAUSE_S)
        last = now
        found = judge.look(now, row)
        if found is not None and found.kind == "hang":
            assert seen_s >= BOUND_S - 1e-6
            accused = [sight for sight in row if sight.rank in found.ranks]
            assert len(accused) == len(found.ranks) and not any(sight.gone for sight in accused)
            assert all(sight.stopped for sight in accused) is found.stopped
        if found is not None and found.kind == "lost":
            assert {sight.rank for sight in row if sight.gone} >= set(found.ranks)
            assert not any(sight.leaving for sight in row)
        if found is not None:
            return
