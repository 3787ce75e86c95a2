"""The timeline: each second of a rank has one cause, spans of all threads reach a trace."""

import threading

import pytest

from hvdtrain.core import timeline
from hvdtrain.core.timeline import CAUSES, Clock, Timeline, span


def test_each_second_goes_to_the_innermost_cause():
    now = [0.0]
    clock = Clock(lambda: now[0])
    now[0] = 1.0
    clock.push("compute")
    now[0] = 3.0
    clock.push("wait")
    now[0] = 7.0
    clock.pop()
    now[0] = 15.0
    clock.pop()
    now[0] = 31.0
    assert {k: v for k, v in clock.seconds().items() if v} == {"other": 17.0, "compute": 10.0, "wait": 4.0}
    assert set(clock.seconds()) == set(CAUSES) and sum(clock.seconds().values()) == 31.0


class Kept:
    def __init__(self):
        self.spans = []

    def take(self, name, lane, begin_s, end_s, args, cause=""):
        assert end_s >= begin_s > 0
        self.spans.append((name, lane, args))


def test_spans_reach_the_trace_from_every_thread_and_the_clock_from_one():
    own, kept = Timeline(), Kept()
    with timeline.active(own):
        with span("before", "update"):
            pass
        own.taker = kept
        with span("step", "compute", step=3), pytest.raises(KeyError), span("inner"):
            raise KeyError

        def work(given):
            with timeline.active(given, "saver"), span("write", "checkpoint"):
                pass

        thread = threading.Thread(target=work, args=(timeline.current(),))
        thread.start()
        thread.join()
    with span("outside", "update"):
        pass
    assert kept.spans == [("inner", "main", {}), ("step", "main", {"step": 3}), ("write", "saver", {})]
    seconds = own.clock.seconds()
    assert seconds["checkpoint"] == 0 and seconds["compute"] > 0 and timeline.current() is None
