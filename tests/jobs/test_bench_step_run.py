"""bench step as a user starts it: the contenders agree, a table and records come out, and failures are reported."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from runner import run

STEP = [sys.executable, "-m", "benchmarks", "step", "--workload", "tiny", "--timeout", "90"]
EXACT = {"torch": {"hvdtrain": "torch", "hvdtrain.torch": "horovod", "ddp": "torch", "accelerate": "accelerate",
                   "fabric": "lightning_fabric", "horovod": "horovod"},
         "tensorflow": {"hvdtrain": "tensorflow", "horovod": "horovod", "mwms": "tensorflow"}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def need(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.mark.parametrize("framework", EXACT)
def test_contenders_take_the_same_steps(framework, tmp_path):
    need(framework)
    names = [name for name, module in EXACT[framework].items() if importlib.util.find_spec(module)]
    job = run([*STEP, "--framework", framework, "--contenders", ",".join(names), "--check"], 380)
    assert job.returncode == 0, job.text
    assert not job.orphans
    rows = {line.split()[0]: line.split() for line in job.stdout.splitlines() if line.split()}
    losses = [float(rows[name][-3]) for name in names]
    assert max(losses) - min(losses) <= 1e-3 * losses[0] and all(rows[name][-1] == "yes" for name in names)


@pytest.mark.parametrize("framework", EXACT)
def test_one_process_takes_the_plain_loops_steps(framework):
    need(framework)
    job = run([*STEP, "--framework", framework, "--np", "1", "--peers", "--check"], 200)
    assert job.returncode == 0, job.text
    assert "plain" in job.stdout and "unlike" not in job.stdout


def test_a_table_and_records_of_every_round(tmp_path):
    need("torch")
    records = tmp_path / "records.jsonl"
    job = run([*STEP, "--contenders", "hvdtrain,ddp,plain", "--rounds", "3", "--steps", "4",
               "--markdown", "--jsonl", str(records)], 200)
    assert job.returncode == 0, job.text
    assert not job.orphans
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    rounds = [row for row in rows if row["kind"] == "round"]
    assert sorted({(row["contender"], row["round"]) for row in rounds}) == \
        [(name, n) for name in ("ddp", "hvdtrain", "plain") for n in range(3)]
    assert all(row["ms"] > 0 and row["seed"] == 0 and row["versions"]["torch"] and row["hosts"] for row in rounds)
    ranks = {row["contender"]: row["ranks"] for row in rounds}
    assert ranks == {"hvdtrain": 2, "ddp": 2, "plain": 1}
    assert "mpirun" in rounds[0]["launch"][0]
    summary = rows[-1]
    assert summary["kind"] == "summary" and summary["missing"] == [] and summary["left_out"] == {}
    assert summary["base"] == "hvdtrain" and summary["rounds_done"] == 3 and summary["ranks"] == 2
    assert summary["floor"] is None and "floor of a step" not in job.stdout, "one host"
    assert summary["contenders"]["hvdtrain"]["best_peer"] == "ddp"
    assert summary["contenders"]["hvdtrain"]["to_hvdtrain"] == 1.0
    assert summary["contenders"]["ddp"]["to_best_peer"] == 1.0 and summary["contenders"]["ddp"]["wire"] == "gloo"
    assert "| hvdtrain | shared |" in job.stdout and "2,410 parameters" in job.stdout


def test_a_contender_that_fails_is_reported_with_its_last_lines():
    need("torch")
    job = run([*STEP, "--contenders", "ddp", "--iface", "no_such_card", "--rounds", "1"], 200)
    assert job.returncode == 1, job.text
    assert not job.orphans
    assert "no_such_card" in job.stderr and "ddp ended with exit status" in job.stderr


def test_an_exchange_that_hvdtrain_would_refuse_is_refused_before_any_job():
    job = run([*STEP, "--contenders", "ddp", "--exchange", "no_such_key=1"], 60)
    assert job.returncode == 2 and "'no_such_key=1'" in job.stderr and "$" not in job.stdout, job.text
