"""bench mixed as a user starts it: ranks are slowed, change speeds, and no control group is left. No timings judged."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from runner import run

from benchmarks import throttle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_table_and_records_of_ranks_that_change_speeds(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    reason = throttle.available()
    if reason:
        pytest.skip(f"processors cannot be throttled here: {reason}")
    parent = throttle._home().parent
    before = set(parent.glob(f"{throttle.PREFIX}*"))
    path = tmp_path / "r.jsonl"
    job = run([sys.executable, "-m", "benchmarks", "mixed", "--workload", "tiny", "--contenders",
               "hvdtrain@static,ddp", "--rounds", "1", "--steps", "3", "--warmup", "2", "--move", "5", "--timeout",
               "90", "--rebalance", "probe_s=0.2", "--jsonl", str(path)], 220)
    assert (job.returncode, job.orphans) == (0, []), job.text
    assert set(parent.glob(f"{throttle.PREFIX}*")) == before, "a group was left"
    *rounds, summary = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["contender"]: r["ranks"] for r in rounds} == {"solo 1": 1, "solo 0.4": 1, "hvdtrain@static": 2, "ddp": 2}
    for r in rounds:
        assert r["ms"] > 0 and r["speeds"] == [1.0, 0.4] and r["slowed"] == "by control groups"
        alone = r["ranks"] == 1
        assert (r["percent"] is None, r["moved_step_s"] is None) == (alone, alone)
        assert alone or len(r["moved_step_s"]) == 5 and min(r["moved_step_s"]) > 0
        assert sum(r["samples"]) == (8 if alone else 16)
    assert next(r for r in rounds if r["contender"] == "ddp")["samples"] == [8, 8]
    assert summary["missing"] == [] and len(summary["contenders"]["ddp"]["windows_percent"]) == 1
    assert "% of solo sum" in job.stdout and "steps to 90 %" in job.stdout
