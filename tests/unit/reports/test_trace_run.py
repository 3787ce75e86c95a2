"""A trace of whole runs, ranks as threads: the window, what is in the file, and runs that do not come that far."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import config, fitted, lockstep, make_model, samples

from hvdtrain.config import CheckpointConfig, DataConfig, ExchangeConfig
from hvdtrain.config.sections import TraceConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.timeline import Timeline, active, blocked, span
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.reports.trace import chrome


def run(tmp_path: Path, size: int = 2, steps: str = "3:6", max_steps: int = 8, work: Any = fitted, **more: Any) -> list:
    """Return runs of ``size`` ranks of 8 steps an epoch."""
    settings = config(out=str(tmp_path), trace=TraceConfig(steps), global_batch=16, max_steps=max_steps,
                      exchange=ExchangeConfig(bucket_mb=0.0001), **more)
    return lockstep(size, settings, lambda rank: make_model("numpy"), samples(128), work)


def read(path: Path) -> tuple[dict, list[dict]]:
    """Return what is in the file, and its events, each with the name of its "lane"."""
    with gzip.open(path / chrome.NAME, "rt") as file:
        found = json.load(file)
    lanes = {event["tid"]: event["args"]["name"] for event in found["traceEvents"] if event["name"] == "thread_name"}
    return found["otherData"], [event | {"lane": lanes[event["tid"]]} for event in found["traceEvents"]
                                if event["ph"] == "X"]


def test_a_window_of_steps_of_all_ranks_is_in_one_file(tmp_path: Path) -> None:
    first, _ = run(tmp_path, data=DataConfig(prefetch=2))
    about, events = read(tmp_path)
    told = first.records.latest["trace"].values
    assert told["steps"] == about["steps"] == [3, 6] and told["events"] == len(events) and told["dropped"] == 0
    assert told["bytes"] == (tmp_path / chrome.NAME).stat().st_size and told["within_s"] == 0
    for pid in (1, 2):
        mine = [event for event in events if event["pid"] == pid]
        assert [e["name"] for e in mine if re.fullmatch(r"step \d+", e["name"])] == ["step 4", "step 5", "step 6"]
        names = {event["name"] for event in mine}
        assert {"data", "gradients", "update", "fetch"} <= names
        wire = [event for event in mine if event["name"].endswith(".b0.r0") and event["cat"] == "other"
                and "bytes" in event.get("args", {})]
        assert len(wire) == 2 * 3, "of each step its queueing and its time on the wire"
    assert min(e["ts"] for e in events) == 0
    mains = [[e for e in events if e["pid"] == pid and e["lane"] == "main"] for pid in (1, 2)]
    begins, end = [min(e["ts"] for e in main) for main in mains], max(e["ts"] + e["dur"] for e in sum(mains, []))
    chain_us = 3e6 * sum(seconds for _, _, seconds in told["critical"])
    # The chain ends with the last rank and begins where one of them did; its shortest links are left out.
    assert 0.97 * (end - max(begins)) < chain_us < end - min(begins) + 1
    assert len(told["overlap_percent"]) == 2
    assert "trace of steps 3 to 6" in " ".join(first.notes)


@pytest.mark.parametrize("steps,found", [("0:2", [0, 2]), ("6:20", [6, 8])])
def test_a_window_may_begin_at_the_start_and_is_cut_by_the_end(tmp_path: Path, steps: str, found: list[int]) -> None:
    run(tmp_path, 1, steps)
    assert read(tmp_path)[0]["steps"] == found


def test_a_window_that_the_run_does_not_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="8 steps"):
        run(tmp_path, 1, "8:10")
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_past_the_window_says_that_there_is_no_trace(tmp_path: Path) -> None:
    run(tmp_path, 1, "1:2", 4, checkpoint=CheckpointConfig(at_end=True))
    (tmp_path / chrome.NAME).unlink()
    (again,) = run(tmp_path, 1, "1:2", 8, resume="auto")
    assert any("no trace" in note for note in again.notes) and not (tmp_path / chrome.NAME).exists()


def test_a_fit_that_ends_by_an_error_in_the_window_leaves_no_recorder(tmp_path: Path) -> None:
    class Fail(Callback):
        where = "all"

        def step_end(self, run: Any) -> None:
            if run.state.cursor.step == 4:
                raise ZeroDivisionError

    def work(run: Any) -> Any:
        run.callbacks.append(Fail())
        with pytest.raises(ZeroDivisionError):
            fitted(run)
        for callback in run.callbacks:
            getattr(callback, "close", lambda run: None)(run)
        return run.timeline.taker

    assert run(tmp_path, 1, work=work) == [None]
    assert not (tmp_path / chrome.NAME).exists()


def test_a_disk_that_is_full_costs_the_trace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chrome.gzip, "open", full)
    (found,) = run(tmp_path, 1)
    assert found.state.cursor.step == 8 and any("trace was not written" in note for note in found.notes)


def test_a_framework_without_a_profiler_is_told(tmp_path: Path) -> None:
    settings = config(out=str(tmp_path), trace=TraceConfig("1:2", profiler=True), global_batch=16, max_steps=3)
    (found,) = lockstep(1, settings, lambda rank: make_model("numpy"), samples(128), fitted)
    assert any("lacks events of the framework's profiler" in note for note in found.notes) and read(tmp_path)[1]


def test_spans_of_the_runs_own_thread_are_ranges_of_a_devices_profiler() -> None:
    own, seen, depth = Timeline(), [], [0]

    def push(name: str) -> None:
        depth[0] += 1
        seen.append(name)

    def pop() -> None:
        depth[0] -= 1

    with active(own), span("before"):
        own.marks = push, pop
        with span("update", "update"), blocked("vote"):
            assert depth[0] == 2
        own.marks = None
    with active(own, "input"), span("fetch"):
        pass
    assert seen == ["update", "vote"] and depth[0] == 0
