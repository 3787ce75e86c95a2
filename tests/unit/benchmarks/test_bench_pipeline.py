"""bench pipeline: options, jobs that are small programs, what is made of their times, and which of two ways to take."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import estimates, peers, pipeline, race, stages, throttle, worker
from benchmarks.estimates import StepWork
from benchmarks.peers import Prepared, contender, pipelining
from benchmarks.workloads import WORKLOADS
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError

STAND_IN = """
import json, sys
from benchmarks.worker import MARK
ms, cut = float(sys.argv[1]), json.loads(sys.argv[2])
def say(**message):
    print(MARK + json.dumps(message), flush=True)
facts = dict(ranks=2, hosts="1 host", wire="string", mpi="", parameters=1000000, settings={}, notes=[], pipeline=cut)
say(event="ready", **facts)
for line in sys.stdin:
    words = line.split()
    if words[0] == "quit":
        break
    steps = int(words[1])
    spent = [dict(cpu=.01, wait=w * steps, idle=(w - .05) * steps, compute=.3 * steps - w * steps, update=.01 * steps,
                  step=.4 * steps, sent=8e6 * steps) for w in (.1, .2)]
    say(event="done", steps=steps, seconds=ms / 1e3 * steps, step_s=[], spent=spent, samples=[8] * 2, notes=[])
"""
OURS = {"cut": ["block_3"], "places": [1, 0], "blocks": [["embed", "block_0"], ["block_3", "head"]],
        "predicted_step_s": 0.2, "predicted_busy_s": [0.1, 0.15]}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """``bench({contender: (ms a step, cut)}, *options) -> (status, records, command lines)``."""
    def run(jobs, *argv):
        lines = {}

        def stand_in(found, name, words, env, timeout_s, usual=race.start):
            lines[name] = " ".join(words)
            ms, cut = jobs[name]
            usual(found, name, [sys.executable, "-c", STAND_IN, str(ms), json.dumps(cut)], env, timeout_s)

        monkeypatch.setattr(race, "start", stand_in)
        allowed(monkeypatch)
        path = tmp_path / "r.jsonl"
        status = pipeline.main(["--jsonl", str(path), "--timeout", "20", "--steps", "2", "--rounds", "2", *argv])
        return status, [json.loads(line) for line in path.read_text().splitlines()], lines

    return run


def allowed(monkeypatch):
    """Let everything be installed, and nobody throttle a processor."""
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(peers.Contender, "lacks", lambda self, framework: "")
    monkeypatch.setattr("hvdtrain.commands.verify.launcher", lambda ranks: ["mpirun", "-np", str(ranks)])
    monkeypatch.setattr("hvdtrain.cluster.topology.affinity", lambda: [0, 1])
    monkeypatch.setattr(throttle, "available", lambda: "nobody allows it")


@pytest.mark.timeout(60)
def test_a_peer_is_cut_as_ours_and_the_sentence_stands_beside_what_was_measured(bench, capsys):
    jobs = {"hvdtrain/pipeline": (300.0, OURS), "pipelining": (400.0, None), "hvdtrain-mpi": (200.0, None)}
    status, rows, lines = bench(jobs, "--contenders", ",".join(reversed(jobs)), "--link", "1gbit")
    assert status == 0 and list(lines)[0] == "hvdtrain/pipeline", "its cut is there before others are started"
    assert "--cut" not in lines["hvdtrain/pipeline"] and "--micro_batches 8" in lines["hvdtrain/pipeline"]
    assert "--order 1f1b --micro_batches 8 --cut block_3 --places 1,0" in lines["pipelining"]
    assert "--cut" not in lines["hvdtrain-mpi"] and "mpirun -np 2" in lines["hvdtrain-mpi"]
    *rounds, summary = rows
    assert {(r["contender"], r["round"]) for r in rounds} == {(name, n) for name in jobs for n in range(2)}
    own = summary["contenders"]["pipelining"]
    assert own["ours_to_it"] == pytest.approx(0.75) and summary["slowed"] == "no quota"
    # Places are [1, 0]. Of what a rank waits, 0.05 s are the exchange after its last backward.
    assert [s["idle_s"] for s in summary["stages"]] == pytest.approx([0.15, 0.05])
    assert [s["busy_s"] for s in summary["stages"]] == pytest.approx([0.1, 0.2])
    told = capsys.readouterr().out
    assert "0.750 of pipelining's step, to reach: 1.00" in told
    assert "off by +2.5 points, to reach: 3; by processor time" in told
    assert "no quota: nobody allows it" in told and "reckoned: " in told
    assert "measured: data parallel: 300 ms a step cut over the ranks, 200 ms with whole copies" in told


@pytest.mark.timeout(60)
def test_rounds_end_in_time(bench, capsys):
    status, rows, _ = bench({"hvdtrain/pipeline": (5.0, OURS)}, "--contenders", "hvdtrain/pipeline", "--rounds", "50",
                            "--within", "0.001")
    assert status == 0 and rows[-1]["rounds_done"] == 1 and "no more rounds" in capsys.readouterr().out


@pytest.mark.parametrize("argv, word", [
    (["--batch", "3"], "equal micro-batches"), (["--np", "1"], "--np is '1'"), (["--order", "zb"], "--order is 'zb'"),
    (["--quota", "1.5"], "--quota is '1.5'"), (["--np", "4", "--quota", "0.6"], "--quota 0.5"),
    (["--link", "fast"], "--link is 'fast'"), (["--link", "0gbit"], "--link is '0gbit'"),
    (["--contenders", "plain"], "several ranks"), (["--contenders", "pipelinin"], "did you mean 'pipelining'"),
    (["--jsonl", "/"], "/ cannot be written")])
def test_a_bad_option_is_refused_in_words_before_any_job(argv, word, monkeypatch):
    monkeypatch.setattr(race, "Job", lambda *job: pytest.fail("a job was started"))
    allowed(monkeypatch)
    with pytest.raises(UserError) as caught:
        pipeline.main(argv)
    assert word in str(caught.value)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_name_that_is_chosen_exists(framework):
    for names in (pipeline.CONTENDERS[framework], pipeline.ON_HOSTS[framework]):
        found = [contender(name, framework) for name in names]
        assert [c.name for c in found] == list(names) and found[0].cuts and not found[0].peer
    assert contender("hvdtrain-mpi/pipeline", framework).options["wire"] == "mpi"
    assert not contender("hvdtrain-mpi", framework).cuts and "pipelining" not in peers.peers(framework)


def test_rates():
    assert pipeline.link("1gbit") == 125e6 and pipeline.link("100mbit") == 12.5e6 and pipeline.link("none") == 0


# --- what is made of the times ---------------------------------------------------------------------------------------

def rank(wait_s, compute_s=0.2, sent=8e6):
    return {"cpu": compute_s, "wait": wait_s, "idle": wait_s, "compute": compute_s, "update": 0.0,
            "step": wait_s + compute_s, "sent": sent}


def test_the_last_row_is_of_all_stages_together():
    each = stages.stages([[rank(0.1), rank(0.2)]] * 2, 1, OURS)
    assert stages.stage_rows(each, 1.0) == [
        ("0", "1", "2", "200.0", "100.0", "50.0", "50.0", "0.0", "200.0", "50.0"),
        ("1", "0", "2", "200.0", "150.0", "33.3", "25.0", "8.3", "200.0", "33.3"),
        ("all", "-", "4", "400.0", "250.0", "42.9", "37.5", "5.4", "400.0", "42.9")]


def test_a_rank_that_computed_beyond_its_quota_was_busier_than_the_clock_says():
    """0.2 s of processor time in 0.4 s: half of a core, all that a quota of a half gives."""
    each = stages.stages([[rank(0.2), rank(0.2)]], 1, OURS)
    assert stages.share_by_processor(each, 0.5) == pytest.approx(0.0) and stages.shares(each)[0] == pytest.approx(50.0)


def test_blocks_of_every_chunk_of_a_stage_count():
    cut = {"places": [0, 1], "blocks": [["a"], ["b", "c"], ["d", "e"], ["f"]]}
    assert [s["blocks"] for s in stages.stages([[rank(0.1), rank(0.2)]], 1, {**OURS, **cut})] == [3, 3]


def test_what_was_missed_is_said():
    each = stages.stages([[rank(0.2), rank(0.2)]], 1, OURS)
    assert stages.reached({"pipelining": {"ours_to_it": 1.013}}, "pipelining", each, 1.0) == [
        "1.013 of pipelining's step, to reach: 1.00, missed",
        "idle share off by +12.5 points, to reach: 3, missed; by processor time +12.5"]


def test_cargo_of_a_cut_is_what_all_ranks_sent_over_cuts_directions_and_micro_batches():
    found = stages.work([[rank(0.1, 0.3), rank(0.2, 0.1)]] * 2, 1, OURS, 8, 1000, 125e6)
    assert found == StepWork(2, pytest.approx(0.4), 4000.0, 1e6, 8, 125e6, pytest.approx(0.75))


def test_results_unlike_one_process_are_named():
    found = {"one process": {"loss": 2.0, "moved": 1.0}, "a": {"loss": 2.001, "moved": 1.0},
             "b": {"loss": 2.1, "moved": float("nan")}}
    assert pipeline.unlike(found) == {"b": "loss and moved unlike one process"}


# --- which of the two ------------------------------------------------------------------------------------------------

MLP = StepWork(2, 0.2, 38e6, 1e6, 8, 125e6)
"""Two hosts at 1 Gbit/s: 9.5M parameters of which little is computed."""


@pytest.mark.parametrize("work, take", [
    (MLP, "take the pipeline: "),
    (StepWork(2, 2.0, 1e6, 2e6, 8, 125e6), "take data parallelism: "),       # a small model, much computing
    (StepWork(2, 2.0, 40e6, 2e6, 8, 125e6), "either: measure both: "),
    (StepWork(2, 0.2, 38e6, 1e6, 8, 125e9), "take data parallelism: "),     # the link no longer counts: the bubble does
    (StepWork(2, 0.2, 38e6, 100e6, 8, 125e6), "take data parallelism: ")])  # large cargo
def test_the_sentence_takes_what_is_faster(work, take):
    assert estimates.sentence(work).startswith(take)


def test_the_sentence_says_the_bytes_and_the_idle_share():
    assert estimates.sentence(MLP).endswith(
        "about 184.5 ms a step as a pipeline over 2 hosts, 304 ms to 404 ms with replicas; at 125 MB/s each host sends "
        "36.2 MiB of gradients a step, or 15.3 MiB cross each boundary, and the pipeline stands idle for 46 %")


def test_without_a_link_to_wait_for_the_idle_share_is_that_of_the_order():
    free = StepWork(4, 1.0, 1e6, 0.0, 16, 1e9)
    assert estimates.idle_share(free) == pytest.approx(3 / 19)
    assert estimates.data_parallel_s(free)[0] == pytest.approx(0.25)


def test_the_slowest_stage_and_the_busiest_link_set_the_pace():
    assert estimates.pipeline_s(StepWork(2, 0.8, 1.0, 0.0, 8, 1.0, slowest=0.75)) == pytest.approx(0.1 + 7 * 0.075)
    # Of three hosts the one in the middle sends both ways: 2 x 1 s a micro-batch, against (0 + 4 s) / 3 of the way.
    assert estimates.pipeline_s(StepWork(3, 1e-9, 1.0, 1.0, 4, 1.0)) == pytest.approx(4 + 3 * 2)


# --- the worker's part -----------------------------------------------------------------------------------------------

class Pair:
    """The control plane of rank 0 of two, whose other rank has twice as much."""

    size, rank = 2, 0

    def gather(self, mine):
        return [mine, 2 * mine]


def test_parts_of_a_model_add_up():
    import numpy as np

    prepared = Prepared(print, lambda: 0.5, lambda: [np.full(3, 2.0)], "w", split=True)
    assert worker._outcome(prepared, Pair(), [np.zeros(3)]) == {"loss": 1.5, "moved": 6.0, "equal": None}


def test_a_rank_of_a_pipeline_gets_the_batches_of_all_ranks():
    workload = WORKLOADS["tiny"]
    setup = peers.Setup(workload, "torch", 2, 0, 1, Pair(), workload.arrays(16, 0), [])
    assert [len(x) for x, _ in setup.whole_batches] == [4, 4, 4, 4]


def test_a_peer_that_is_told_no_cut_takes_about_as_many_blocks_for_each_stage():
    names = ["a", "b", "c", "d", "e"]
    assert pipelining.even(names, 2) == ("c",) and pipelining.even(names, 4) == ("b", "c", "d")
    assert [[name for name, _ in chunk] for chunk in pipelining.chunks([(name, None) for name in names], ("b", "d"))
            ] == [["a"], ["b", "c"], ["d", "e"]]


@pytest.mark.parametrize("work",
                         [StepWork(2, 0.2, 37.8e6, 262144, 4, 125e6), StepWork(2, 1.0, 9.7e6, 131072, 8, 1.25e9)])
def test_the_sentences_of_the_page_are_those_that_are_reckoned(work):
    page = ROOT.parent / "docs" / "explanation" / "pipeline.md"
    assert f"> {estimates.sentence(work)}\n" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("numbers", [[0, 1], [1, 0]])
def test_a_peer_s_ranks_meet_where_its_number_0_is(numbers, monkeypatch):
    from benchmarks.peers import torch_common

    class Rank:
        size, local_rank, local_size = 2, 0, 1

        def __init__(self, rank):
            self.rank, self.node = rank, f"host{rank}"

        def gather(self, mine):
            if isinstance(mine, str):
                return ["host0", "host1"]
            return [mine if r == self.rank else (f"10.0.0.{r}", 7000) if n == 0 else None
                    for r, n in enumerate(numbers)]

    monkeypatch.setattr(torch_common, "free_port", lambda: 7000)
    leader = numbers.index(0)
    for rank, number in enumerate(numbers):
        monkeypatch.setattr(torch_common, "own_address", lambda iface, rank=rank: f"10.0.0.{rank}")
        setup, env = peers.Setup(WORKLOADS["tiny"], "torch", 2, 0, 1, Rank(rank), (), []), {}
        torch_common.rendezvous(setup, env, number)
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["RANK"]) == (f"10.0.0.{leader}", "7000", str(number))
