"""Summary of a trace: exchange beside computing, and the critical path of a step."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.core.timeline.spans import Span
from hvdtrain.reports.trace.chrome import SAME, Alignment, ClockOffset, RankTrace
from hvdtrain.reports.trace.summary import common_s, course_of, critical, overlaps, union


def _courses(*ranks: list[Span]) -> list[Any]:
    return [course_of(RankTrace("host", SAME, spans)) for spans in ranks]


def _blocked(name: str, begin_s: float, end_s: float) -> Span:
    return Span(name, "main", begin_s, end_s, "wait")


def _sent(name: str, begin_s: float, end_s: float, beside: bool = True) -> Span:
    return Span(name, "wire", begin_s, end_s, "", {"beside": beside})


def test_stretches_are_joined_and_compared() -> None:
    assert union([(3, 4), (0, 2), (1, 2.5), (5, 5)]) == [(0, 2.5), (3, 4)]
    assert common_s([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == pytest.approx(1 + 1 + 0.5)


def test_the_chain_goes_to_the_rank_that_came_last() -> None:
    # Two steps: rank 1 computes for 3 s, rank 0 for 1 s and waits; then both vote and update.
    def spans(compute_s: float) -> list[Span]:
        found = []
        for t in (0.0, 5.0):
            found += [Span("gradients", "main", t, t + 3.5, "compute"),
                      Span("backward", "main", t + 0.5, t + compute_s),
                      _blocked("b0", t + compute_s, t + 3.5), _sent("b0", t + compute_s, t + 3.5),
                      _blocked("vote", t + 3.5, t + 3.6), Span("update", "main", t + 3.6, t + 5, "update")]
        return found

    courses = _courses(spans(1.0), spans(3.0))
    chain = critical(courses, 2)
    assert sum(s for _, _, s in chain) == pytest.approx(5.0)
    # The update of the first step is followed by rank 1's gradients, so there the chain goes through rank 1's own.
    assert {(r, what): pytest.approx(s) for r, what, s in chain} == {
        (1, "gradients"): 0.5, (1, "backward"): 2.5, (1, "exchange b0"): 0.5, (0, "exchange vote"): 0.1,
        (1, "update"): 0.7, (0, "update"): 0.7}


def test_an_exchange_counts_from_when_the_last_rank_has_handed_over() -> None:
    # b0 is on the transport of rank 0 from 1 to 3, but rank 1 brings its part at 2; rank 0 computes until 2.5.
    mine = [Span("gradients", "main", 0, 3, "compute"), _blocked("b0", 2.5, 3), _sent("b0", 1, 3)]
    late = [Span("gradients", "main", 0, 3, "compute"), _blocked("b0", 2, 3), _sent("b0", 2, 3)]
    assert overlaps(_courses(mine, late)) == [50.0, 0.0]
    alone = [*mine[:2], _sent("b0", 1, 3, beside=False)]
    assert overlaps(_courses(alone, late)) == [0.0, 0.0], "a wire that moves only while it is waited for"
    assert overlaps(_courses([Span("gradients", "main", 0, 3, "compute")])) == [None]


def test_kernels_of_a_device_tell_what_runs_beside_an_exchange() -> None:
    spans = [Span("gradients", "main", 0, 1, "compute"), _sent("b0", 1, 5), _blocked("b0", 1, 5),
             Span("gemm", "gpu 0 stream 7", 0.5, 4, "kernel")]
    assert overlaps(_courses(spans, spans)) == [75.0, 75.0]


def test_a_clock_that_is_ahead_leads_nobody_astray() -> None:
    ahead = Alignment(ClockOffset(1000.0, 990.0, 990.0), ClockOffset(1010.0, 990.0, 990.0))
    first = [Span("gradients", "main", 10, 11, "compute"), _blocked("b0", 11, 14)]
    second = [Span("gradients", "main", 1000, 1003, "compute"), _blocked("b0", 1003, 1004)]
    courses = [course_of(RankTrace("a", SAME, first)), course_of(RankTrace("b", ahead, second))]
    assert critical(courses, 1) == [(1, "gradients", pytest.approx(3.0)), (1, "exchange b0", pytest.approx(1.0))]


def test_a_chain_ends_where_times_contradict_each_other() -> None:
    # Exchanges that end before they begin elsewhere: clocks within a bad bound. The chain still ends, in full length.
    first = [_blocked("a", 0, 2), _blocked("b", 2, 4)]
    second = [_blocked("a", 3, 5), _blocked("b", 5, 6)]
    chain = critical(_courses(first, second), 1)
    assert sum(s for _, _, s in chain) <= 6 and chain
    assert critical(_courses([], []), 1) == []
