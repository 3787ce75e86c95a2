"""The bench as a user starts it: `bench wire` under mpirun, `bench compressors` in a graph. No timings are judged."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from runner import mpirun, run

from hvdtrain.cluster.horovod import horovod_reason
from hvdtrain.commands.bench.wire import HEADERS, KINDS

WIRE = ["-m", "hvdtrain", "bench", "wire", "--max", "16K", "--repeats", "3"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def need(framework, horovod=False):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    reason = horovod_reason(framework) if horovod else None
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("framework, collectives", [("torch", "horovod"), ("torch", "mpi"), ("tensorflow", "horovod")])
def test_every_collective_of_a_wire(framework, collectives, tmp_path):
    need(framework, collectives == "horovod")
    path = tmp_path / "wire.jsonl"
    job = mpirun(2, [*WIRE, "--framework", framework, "--collectives", collectives, "--jsonl", str(path)], 120)
    assert (job.returncode, job.orphans) == (0, []), job.text
    lines = job.stdout.splitlines()
    titles = [line for line in lines if line.endswith("#wrong")]
    assert len(titles) == len(KINDS) and all(name in titles[0] for name in HEADERS), job.stdout
    rows = [line.split() for line in lines if line.split()[:1] in (["4096"], ["16384"])]
    assert len(rows) == 2 * len(KINDS) and all(len(r) == 9 and r[-1] == "0" for r in rows), job.stdout
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["collective"], r["size_bytes"]) for r in records] == [(k, n) for k in KINDS for n in (4096, 16384)]
    for r in records:
        assert r["wrong"] == 0 and r["time_us"] > 0 and r["algbw_GBps"] > 0 and r["busbw_GBps"] > 0
        assert (r["framework"], r["wire"], r["ranks"]) == (framework, collectives, 2)
        assert r["versions"][framework] and r["mpi"] and r["hosts"].startswith("1 host") and r["algorithm"]


def test_shared_memory_sums_in_place():
    need("torch")
    job = mpirun(2, [*WIRE, "--collectives", "shared", "--kinds", "allreduce", "--markdown"], 60)
    assert (job.returncode, job.orphans) == (0, []), job.text
    assert "allreduce: torch over shared, shared memory; 2 ranks" in job.stdout
    assert job.stdout.count("| 0 |\n") == 2 and "| size (B) | count |" in job.stdout, job.stdout


def test_what_a_look_at_the_gradients_costs():
    need("torch")
    job = mpirun(2, ["-m", "benchmarks", "finite", "--workload", "tiny", "--rounds", "2", "--steps", "2"], 60)
    assert (job.returncode, job.orphans) == (0, []), job.text
    assert "torch tiny, 2 rank(s), 2 rounds of 2 steps: " in job.stdout and "looking adds " in job.stdout, job.text


def test_one_process_alone():
    job = run([sys.executable, *WIRE, "--framework", "numpy", "--collectives", "mpi", "--kinds",
               "broadcast,allreduce"], 60)
    assert (job.returncode, job.orphans) == (0, []), job.text
    rows = [line.split() for line in job.stdout.splitlines() if line.split()[:1] in (["4096"], ["16384"])]
    assert len(rows) == 4 and all(row[-1] == "0" for row in rows), "sums of one process are wrong"
    assert "numpy over mpi" in job.stdout and "1 rank," in job.stdout
    assert "note: one host: there is no link between hosts to measure" in job.stdout


def test_a_mistake_is_one_message_and_status_2():
    job = mpirun(2, [*WIRE, "--kinds", "allreduse"], 60)
    assert job.returncode == 2 and "Traceback" not in job.text and not job.orphans, job
    assert job.stderr.count("hvdtrain: ") == 1 and "did you mean 'allreduce'" in job.stderr, job.stderr


def test_compressors_in_a_graph(tmp_path):
    need("tensorflow")
    path = tmp_path / "c.jsonl"
    job = run([sys.executable, "-m", "hvdtrain", "bench", "compressors", "--framework", "tensorflow", "--shapes",
               "48x40,48", "--repeats", "2", "--steps", "3", "--jsonl", str(path)], 120)
    assert (job.returncode, job.orphans) == (0, []), job.text
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records and all(r["in_graph"] and r["error_first"] < 1.5 for r in records)
    assert next(r for r in records if r["compressor"] == "none")["error_first"] < 1e-6
