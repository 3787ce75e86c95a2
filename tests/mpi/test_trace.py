"""Traces of both frameworks over real wires: buckets on the wire, profilers' events, nothing outside of the window."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import FRAMEWORKS, bits, config, fitted, make_model, samples
from test_training import usable

from hvdtrain.config import ExchangeConfig
from hvdtrain.config.sections import TraceConfig
from hvdtrain.engine.assemble import assemble
from hvdtrain.reports.trace import chrome

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@pytest.mark.parametrize("wire", ["horovod", "shared"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_buckets_are_seen_on_the_wire_and_beside_the_frameworks_own_events(control, tmp_path, framework, wire):
    usable(wire, framework)
    if control.size != 2:
        pytest.skip("each rank's file is joined alike on any number of ranks: tried on 2")
    out = Path(control.bcast(str(tmp_path)))
    settings = config(collectives=wire, global_batch=32, max_steps=6, out=str(out / "plain"),
                      exchange=ExchangeConfig(bucket_mb=0.0005))
    plain = fitted(assemble(settings, make_model(framework), samples(64)))
    traced = fitted(assemble(replace(settings, out=str(out / "traced"), trace=TraceConfig("2:4", profiler=True)),
                             make_model(framework), samples(64)))
    assert bits(plain) == bits(traced), "to look on changes nothing"
    if control.rank:
        return
    with gzip.open(out / "traced" / chrome.NAME, "rt") as file:
        found = json.load(file)
    about, n_buckets = found["otherData"], len(traced.dp.buckets)
    assert n_buckets > 1 and len(about["clocks"]) == control.size
    assert all(row["within_us"] == 0 and row["dropped"] == 0 for row in about["clocks"])
    assert all(0 < row["profiler_within_us"] < 1000 for row in about["clocks"])
    rows = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {e["cat"] for e in events} >= {framework, "compute", "update", "input"}
    for pid in range(1, control.size + 1):
        sent = [e for e in events if e["pid"] == pid and rows[e["tid"]].startswith("wire")]
        assert len(sent) == 2 * n_buckets and all(e["dur"] > 0 for e in sent)
        steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == pid and rows[e["tid"]] == "step"]
        assert all(any(a <= e["ts"] and e["ts"] + e["dur"] <= b for a, b in steps) for e in sent)
    assert all(percent is not None and 0 <= percent <= 100 for percent in about["overlap_percent"])
