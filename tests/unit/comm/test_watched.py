"""Buckets in a trace: how long each queues, and when it is on the transport, also where nobody waits for it yet."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from hvdtrain.backends.numpy import Ops
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.compressors import create
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.comm.reducer.transport import Asker, TracedBucket
from hvdtrain.config import Config
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.core.timeline import Timeline, active
from hvdtrain.core.timeline.spans import SpanRecorder


class Handle:
    """Done when it is told so, or gone."""

    def __init__(self, error: bool = False) -> None:
        self.ended, self.asked, self.error = threading.Event(), threading.Event(), error

    def wait(self) -> None:
        """Never needed here."""

    def done(self) -> bool:
        self.asked.set()
        if self.error:
            raise ValueError("handle is gone")
        return self.ended.is_set()


@pytest.mark.parametrize("error", [False, True])
def test_a_request_is_done_before_anybody_waits_for_it(error: bool) -> None:
    taken, handle = SpanRecorder(10), Handle(error)
    watched = TracedBucket(taken, 400, True, Asker())
    watched.made("b0.r0", handle)
    assert handle.asked.wait(5)
    handle.ended.set()
    ends_at = time.monotonic() + 5
    while not watched._arrived_s:
        assert time.monotonic() < ends_at
        time.sleep(0.001)
    before_s = time.perf_counter()
    watched.taken()
    queue, wire = taken.spans
    assert (queue.lane, wire.lane, wire.name) == ("queue", "wire", "b0.r0") and wire.end_s <= before_s
    assert queue.begin_s <= queue.end_s == wire.begin_s <= wire.end_s and wire.args == {"bytes": 400, "beside": True}


def test_each_request_of_a_compressor_is_seen_on_a_wire_that_moves_when_it_is_waited_for() -> None:
    specs = [ParamSpec(name, (128, 96), "float32") for name in ("a", "b")]
    buckets: list[Bucket] = plan_buckets(specs, 0.04)

    def rank(control: Any, wire: Any) -> Any:
        own, taken = Timeline(), SpanRecorder(100)
        with active(own):
            reducer = Reducer(buckets, create("powersgd", Config()), wire, Ops())
            for taker in (None, taken):
                own.taker = taker
                reducer.begin()
                for bucket in reversed(buckets):
                    reducer.start(bucket.index, np.ones(bucket.n, np.float32))
                reducer.finish()
        return taken.spans

    for spans in LockstepWorld(2).run(rank):
        sent = [span for span in spans if span.lane == "wire"]
        assert [span.name.rpartition(".")[0] for span in sent].count("world.b0") > 1, "several requests"
        assert {span.name.split(".")[1] for span in sent} == {"b0", "b1"}
        assert sum(span.lane == "queue" for span in spans) == len(sent), "nothing of the step that was not watched"
        assert all(span.end_s > span.begin_s and not span.args["beside"] for span in sent)
