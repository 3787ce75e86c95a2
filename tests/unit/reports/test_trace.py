"""A trace: which steps, rows that viewers can draw, clocks on one axis within their bound, a file of bounded size."""

from __future__ import annotations

import gzip
import json
import random
import time
from typing import Any

import pytest

from hvdtrain import Config
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config.sections import TraceConfig as Settings
from hvdtrain.config.texts import window_of
from hvdtrain.core.errors import UserError
from hvdtrain.core.timeline.spans import Span, SpanRecorder, longest
from hvdtrain.reports.trace import chrome
from hvdtrain.reports.trace import chrome as gather
from hvdtrain.reports.trace.chrome import SAME, Alignment, ClockOffset, rows


@pytest.mark.parametrize("text", ["20", "30:20", "20:20", "a:b", "-1:5", "20:30:2", " 2:3"])
def test_a_window_that_means_no_steps_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="trace.steps"):
        Config(trace=Settings(steps=text)).check()
    assert window_of("20:30") == (20, 30) and window_of("") is None


def test_readings_of_any_clock_lie_on_the_common_axis_within_the_bound() -> None:
    random.seed(5)
    for _ in range(300):
        jump_s, drift = random.uniform(-1e4, 1e4), random.uniform(-2e-4, 2e-4)
        turn = random.random()  # the drift of a part of the window; all of one sign
        rates = (drift * turn * 2, drift * (1 - turn) * 2)

        def ahead_s(t: float) -> float:
            return jump_s + rates[0] * min(t, 5.0) + rates[1] * max(0.0, t - 5.0)

        def measured(t: float) -> ClockOffset:
            below_s, above_s = random.uniform(0, 3e-4), random.uniform(0, 3e-4)
            return ClockOffset(t + ahead_s(t), ahead_s(t) - below_s, ahead_s(t) + above_s)

        alignment = Alignment(measured(0.0), measured(10.0))
        for t in (0.0, *(random.uniform(0, 10) for _ in range(20)), 10.0):
            assert abs(alignment.shared_s(t + ahead_s(t)) - t) <= alignment.within_s + 1e-9
        assert alignment.within_s < 3e-4 + abs(drift) * 10 + 3e-4


def test_clocks_of_ranks_are_measured_around_a_window_to_within_their_bound() -> None:
    shift_P, drift_P, names_P = (0.0, 1234.5, -77.25, -77.25), (0.0, 3e-4, -2e-4, -2e-4), ["a", "b", "c", "c"]

    def rank(control: Any, wire: Any) -> Any:
        begin = time.perf_counter()

        def shown(true: float) -> float:
            return true + shift_P[control.rank] + drift_P[control.rank] * (true - begin)

        def now() -> float:
            return shown(time.perf_counter())

        before = gather.clocks(control, names_P, now)
        true_s = [time.perf_counter() for _ in range(50) if not time.sleep(0.001)]
        seen = [(true, shown(true)) for true in true_s]  # of one reading: another thread may run between two
        return before, gather.clocks(control, names_P, now), seen

    found = LockstepWorld(4).run(rank)
    assert all(row[:2] == found[0][:2] for row in found), "every rank knows the same"
    for r, (before, after, seen) in enumerate(found):
        alignment = Alignment(before[r], after[r])
        assert all(abs(alignment.shared_s(own) - true) <= alignment.within_s + 2e-5 for true, own in seen)
        assert alignment.within_s < 0.05 and (r == 0) == (alignment.within_s == 0)
    assert found[0][0][2][1:] == found[0][0][3][1:], "ranks that read one clock have one offset"


def test_processes_of_one_machine_read_one_clock() -> None:
    name = gather.clock_name()
    assert name and name == gather.clock_name()
    found = LockstepWorld(2).run(lambda control, wire: gather.clocks(control, [name, name]))
    assert [m.offset_s for m in found[1]] == [0.0, 0.0]


def test_events_of_a_row_are_apart_or_within_each_other() -> None:
    random.seed(3)
    spans = [Span(f"b{i}", "wire", begin, begin + random.uniform(0, 3)) for i, begin in
             enumerate(random.uniform(0, 20) for _ in range(200))]
    nested = [Span("around", "main", 0, 9), Span("within", "main", 0, 4), Span("at its end", "main", 4, 9)]
    found = rows([*spans, *nested])
    assert [name for name, _ in found[:3]] == ["main", "wire", "wire 2"]
    assert found[0][1] == nested
    assert sorted(span for name, row in found[1:] for span in row) == sorted(spans)
    for _, row in found:
        for i, a in enumerate(row):
            for b in row[i + 1:]:
                assert b.begin_s >= a.end_s or a.begin_s <= b.begin_s and b.end_s <= a.end_s


def test_a_trace_is_a_file_of_processes_threads_and_events(tmp_path: Any) -> None:
    late = Alignment(ClockOffset(100.0, 50.0, 50.000010), ClockOffset(101.0, 50.0, 50.000010))
    ranks = [chrome.RankTrace("one", SAME, [Span("gradients", "main", 50.0, 50.5, "compute", {"blocks": 3})]),
             chrome.RankTrace("two", late, [Span("b0", "wire", 100.25, 100.5, "wire", {"what": "x" * 999})], 7)]
    assert chrome.write(tmp_path / chrome.NAME, ranks, 50.0, {"steps": [20, 30]}) == 2
    assert [path.name for path in tmp_path.iterdir()] == [chrome.NAME]
    with gzip.open(tmp_path / chrome.NAME, "rt") as file:
        found = json.load(file)
    about = found["otherData"]
    assert about["steps"] == [20, 30] and about["clocks_within_us"] == 5.0
    assert about["clocks"][1] == {"rank": 1, "host": "two", "within_us": 5.0, "ahead_before_us": 50000005.0,
                                  "ahead_after_us": 50000005.0, "dropped": 7, "profiler_within_us": 0.0}
    first, second = (event for event in found["traceEvents"] if event["ph"] == "X")
    assert first == {"ph": "X", "name": "gradients", "cat": "compute", "pid": 1, "tid": 1000, "ts": 0.0, "dur": 5e5,
                     "args": {"blocks": 3}}
    assert second["ts"] == pytest.approx(249995.0) and second["dur"] == pytest.approx(250000.0)
    assert len(second["args"]["what"]) == chrome.LONGEST_TEXT
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["name"].endswith("_name")}
    assert named == {(1, 0): "rank 0 on one", (1, 1000): "main", (2, 0): "rank 1 on two", (2, 2000): "wire"}


def test_what_a_trace_has_no_room_for_is_counted() -> None:
    taken = SpanRecorder(3)
    for i in range(5):
        taken.take(f"s{i}", "main", i, i + 1, {}, "compute")
    assert [span.name for span in taken.spans] == ["s0", "s1", "s2"] and taken.dropped == 2
    spans = [Span("long", "x", 0, 9), Span("short", "x", 9, 10), Span("longer", "x", 10, 30)]
    assert longest(spans, 2) == ([spans[0], spans[2]], 1) and longest(spans, 3) == (spans, 0)
    assert longest(spans, 0) == ([], 3)
    assert chrome.room(1) * 1 <= chrome.MOST_EVENTS and chrome.room(1000) * 1000 <= chrome.MOST_EVENTS


def test_spans_of_all_ranks_come_to_rank_0_alone() -> None:
    def rank(control: Any, wire: Any) -> Any:
        return gather.to_root(control, [Span("a", "main", control.rank, 9.0, "", {"n": 1})] * control.rank,
                              {"rank": control.rank})

    first, *others = LockstepWorld(3).run(rank)
    assert [about["rank"] for _, about in first] == [0, 1, 2]
    assert [spans for spans, _ in first] == [[Span("a", "main", r, 9.0, "", {"n": 1})] * r for r in range(3)]
    assert others == [[], []]
