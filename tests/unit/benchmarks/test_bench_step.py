"""bench step: choice of contenders, what is made of the times, and the data that all contenders share."""

from __future__ import annotations

import importlib
import json
import math
import sys
import types

import numpy as np
import pytest

from benchmarks import peers, standings, step, worker
from benchmarks import race as racing
from benchmarks.peers import Prepared, contender, horovod_torch
from benchmarks.workloads import BATCHES, WORKLOADS, mnist_tensorflow, mnist_torch, part
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.types import Cursor
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import ArraySource


def refused(*argv):
    """Return the sentence with which an option is refused."""
    with pytest.raises(UserError) as caught:
        step.main(list(argv))
    return str(caught.value)


@pytest.mark.parametrize("argv, word", [
    (["--workload", "mpl"], "did you mean 'mlp'"), (["--framework", "jax"], "torch"), (["--np", "0"], "--np"),
    (["--rounds", "x"], "--rounds"), (["--peer"], "--peers"), (["--contenders", ","], "no contender is left"),
    (["--contenders", "dpd"], "did you mean 'ddp'"), (["--contenders", "hvdtrain-mip"], "did you mean 'mpi'"),
    (["--contenders", "hvdtrain+fp61"], "did you mean 'fp16'"), (["--timeout", "0"], "--timeout"),
    (["--mpirun_args", "'open"], "--mpirun_args"),
    (["--exchange", "bucket_m=4"], "did you mean 'bucket_mb'"), (["--exchange", "bucket_mb"], "KEY=VALUE"),
    (["--exchange", "bucket_mb=["], "KEY=VALUE"), (["--exchange", "bucket_mb=-4"], "exchange.bucket_mb is -4"),
    (["--exchange", "bucket_mb=wide"], "exchange.bucket_mb is"), (["--exchange", "powersgd_rank=2"], "--powersgd_rank"),
    (["--jsonl", "/"], "/ cannot be written"), (["--powersgd-rank", "2"], "did you mean '--powersgd_rank'")])
def test_a_bad_option_is_refused_in_words_before_any_job(argv, word, monkeypatch):
    monkeypatch.setattr("hvdtrain.cluster.horovod.horovod_reason", lambda framework: None)
    monkeypatch.setattr(racing, "Job", lambda *job: pytest.fail("a job was started"))
    monkeypatch.setattr(racing.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("hvdtrain.commands.verify.launcher", lambda ranks: ["mpirun"])
    assert word in refused(*argv)


def test_under_a_launcher_it_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert "under a launcher" in refused()


def test_help_imports_no_framework(capsys):
    with pytest.raises(SystemExit) as left:
        step.main(["--help"])
    assert left.value.code == 0
    assert "mwms" in capsys.readouterr().out


def test_which_contenders_are_chosen():
    assert step.chosen("torch", 2, False, "") == ["hvdtrain", "hvdtrain-null", "hvdtrain-horovod", "hvdtrain-mpi"]
    assert step.chosen("torch", 2, True, "") == ["hvdtrain", "hvdtrain-null", "ddp", "ddp+fp16", "ddp+powersgd",
                                                 "accelerate", "fabric", "horovod", "horovod-tuned"]
    assert step.chosen("tensorflow", 2, True, "") == ["hvdtrain", "hvdtrain-null", "horovod", "horovod-tuned", "mwms"]
    assert step.chosen("torch", 1, True, "") == ["hvdtrain", "plain"]
    assert step.chosen("torch", 1, False, "") == ["hvdtrain"]
    assert step.chosen("torch", 2, True, "plain, ddp,plain") == ["plain", "ddp"]


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_name_that_is_chosen_exists(framework):
    for names in (step.OURS[framework], peers.peers(framework)):
        assert [contender(name, framework).name for name in names] == list(names)


def test_adam_is_raced_with_its_state_whole_and_divided():
    names = ["hvdtrain/whole", "hvdtrain/zero1", "hvdtrain-mpi/zero2"]
    assert [contender(name, "torch").options["adam"] for name in names] == ["whole", "zero1", "zero2"]
    found = standings.summarise({"hvdtrain/whole": [10.0, 20.0], "hvdtrain/zero1": [5.0, 30.0]},
                                [contender(name, "torch") for name in names[:2]], 2)
    assert found["hvdtrain/zero1"]["to_hvdtrain"] == 1.0
    with pytest.raises(UserError, match="there is no contender 'hvdtrain/zero3'"):
        contender("hvdtrain/zero3", "torch")


def test_what_is_compiled_is_compared_with_compiled_peers():
    assert contender("hvdtrain/compiled", "torch").options["compile"] == "auto"
    assert contender("hvdtrain/remat2", "torch").options["remat"] == "every:2"
    names = ["hvdtrain", "hvdtrain/compiled", "ddp", "ddp-compiled"]
    found = standings.summarise(dict(zip(names, ([8.0], [6.0], [9.0], [7.0]))),
                                [contender(name, "torch") for name in names], 2)
    assert [found[name]["best_peer"] for name in names[:2]] == ["ddp", "ddp-compiled"]
    assert contender("plain-compiled", "tensorflow").compiled and "ddp-compiled" not in peers.peers("torch")


def test_horovods_api_is_raced_in_one_loop(monkeypatch):
    calls = []

    class Api(types.SimpleNamespace):
        def __getattr__(self, name):
            return lambda *args, **kwargs: (calls.append((self.module, name, *kwargs)), 2)[1]

    pytest.importorskip("torch")
    for module in ("horovod.torch", "hvdtrain.torch"):
        monkeypatch.setitem(sys.modules, module, Api(module=module))
    monkeypatch.setattr(horovod_torch, "_transport", lambda: "shared")
    setup = peers.Setup(WORKLOADS["tiny"], "torch", 2, 0, 1, types.SimpleNamespace(size=2), (), [])
    found = {name: horovod_torch.prepare(setup, **contender(name, "torch").options).wire
             for name in ("horovod-tuned", "hvdtrain.torch")}
    assert found == {"horovod-tuned": "horovod", "hvdtrain.torch": "shared"}
    assert [call[1:] for call in calls[:5]] == [call[1:] for call in calls[5:]] == [
        ("init",), ("size",), ("DistributedOptimizer", "named_parameters"), ("broadcast_parameters", "root_rank"),
        ("broadcast_optimizer_state", "root_rank")]
    assert {call[0] for call in calls[5:]} == {"hvdtrain.torch"}
    own = contender("hvdtrain.torch", "torch")
    assert own.exact and not own.peer and own.ranks(2) == 2, "compared with uncompressed peers, and never one of them"


@pytest.mark.parametrize("framework, build", [("torch", mnist_torch), ("tensorflow", mnist_tensorflow)])
def test_the_mnist_workload_has_the_layers_of_horovods_examples(framework, build):
    pytest.importorskip(framework)
    model, work = build(), WORKLOADS["mnist"]
    shapes = [tuple(p.shape) for p in (model.parameters() if framework == "torch" else model.trainable_variables)]
    assert [math.prod(shape) for shape in shapes] == [250, 10, 5000, 20, 16000, 50, 500, 10]
    assert work.model(framework) == f"benchmarks.workloads:{build.__name__}"
    x = work.arrays(2, 0)[0]
    logits = model(importlib.import_module("torch").from_numpy(x) if framework == "torch" else x)
    assert tuple(logits.shape) == (2, 10)


def test_the_parts_of_our_names():
    found = contender("hvdtrain-horovod+powersgd", "torch")
    assert found.options == {"wire": "horovod", "compression": "powersgd"} and found.needs == "horovod"
    assert not found.exact and not found.peer and found.compression == "powersgd"
    for name, compression in (("hvdtrain", "none"), ("hvdtrain-null", ""), ("hvdtrain+auto", ""), ("ddp", "none"),
                              ("ddp+fp16", "fp16"), ("ddp+powersgd", "powersgd"), ("fabric", "none")):
        assert contender(name, "torch").compression == compression
        assert contender(name, "torch").exact == (compression == "none")
    assert [contender(name, "torch").ranks(4) for name in ("ddp", "plain")] == [4, 1]


def test_what_is_not_installed_is_left_out_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(racing.importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    monkeypatch.setattr("hvdtrain.commands.verify.launcher", lambda ranks: ["mpirun", "-np", str(ranks)])
    plan = step._plan(step._parser().parse(["--contenders", "accelerate,ddp,plain"]), {})
    assert [c.name for c in plan.contenders] == ["ddp", "plain"]
    assert "accelerate is left out: accelerate is not installed" in capsys.readouterr().out
    assert list(plan.left_out) == ["accelerate"] and "hvdtrain[bench]" in plan.left_out["accelerate"]
    assert plan.launch == {"ddp": ("mpirun", "-np", "2"), "plain": ()}, "plain is one process"


def test_a_horovod_without_this_framework_is_left_out(monkeypatch):
    monkeypatch.setattr("hvdtrain.cluster.horovod.horovod_reason", lambda framework: f"no {framework} part")
    for name in ("horovod", "hvdtrain-horovod"):
        assert contender(name, "tensorflow").lacks("tensorflow") == "no tensorflow part"
    assert contender("hvdtrain", "torch").lacks("torch") == ""


def test_a_job_tells_what_boot_set_whoever_trains_in_it():
    control, notes = types.SimpleNamespace(notes=["btl_tcp_flags=send was set"]), ["btl_tcp_flags=send was set", "own"]
    assert worker._notes(Prepared(print, float, list, "gloo"), control) == control.notes
    assert worker._notes(Prepared(print, float, list, "mpi", notes=notes), control) == notes, "each once"


def test_what_is_set_for_all_is_noted_for_all():
    given, made = {"OMPI_MCA_mpi_yield_when_idle": "0"}, {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert racing.set_for_all(given, given) == racing.set_for_all({}, {}) == ()
    assert "yield_when_idle=1 was set" in racing.set_for_all(made, {})[0]


def test_all_jobs_get_the_same_command_and_environment(monkeypatch):
    monkeypatch.setattr(racing.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("hvdtrain.commands.verify.launcher",
                        lambda ranks: ["mpirun", "--oversubscribe", "-np", str(ranks)])
    args = step._parser().parse(["--contenders", "ddp,hvdtrain", "--threads", "3", "--hosts", "a:1,b:1", "--iface",
                                 "eth7", "--mpirun_args", "--mca plm_rsh_agent '/a b'", "--exchange", "bucket_mb=4"])
    plan = step._plan(args, {"PYTHONPATH": "/p"})
    assert plan.env["OMP_NUM_THREADS"] == "3" and plan.env["PYTHONPATH"] == f"{ROOT.parent}:/p"
    lines = [step.command(args, plan, c, "/scratch") for c in plan.contenders]
    assert [[w for w in line if w not in ("ddp", "hvdtrain")] for line in lines][0] == \
        [w for w in lines[1] if w not in ("ddp", "hvdtrain")]
    text = " ".join(lines[0])
    for words in ("--mca plm_rsh_agent /a b --host a:1,b:1", "-x OMP_NUM_THREADS -x PYTHONPATH", "--threads 3",
                  "--iface eth7", "--exchange bucket_mb=4", "--contender ddp"):
        assert words in text
    assert "/a b" in lines[0], "quoted words stay whole"


@pytest.mark.parametrize("given, expected", [({}, "1"), ({"OMPI_MCA_mpi_yield_when_idle": "0"}, "0")])
def test_mpi_yields_for_all_where_cores_are_short(given, expected):
    assert racing.environment(4096, 1, given)["OMPI_MCA_mpi_yield_when_idle"] == expected
    assert "OMPI_MCA_mpi_yield_when_idle" not in racing.environment(1, 1, {})


def test_the_order_moves_on_each_round():
    assert [racing.rotated("abc", n) for n in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert racing.rotated([], 3) == []


def names(*chosen, framework="torch"):
    return [contender(name, framework) for name in chosen]


def test_ratios_are_medians_of_rounds_not_ratios_of_medians():
    chosen = names("hvdtrain", "ddp", "fabric", "ddp+fp16", "plain")
    times = {"hvdtrain": [10.0, 40.0, 10.0], "ddp": [20.0, 20.0, 30.0], "fabric": [30.0, 60.0, 20.0],
             "ddp+fp16": [1.0, 1.0, 1.0], "plain": [5.0, 5.0, 5.0]}
    found = standings.summarise(times, chosen, 2)
    assert found["hvdtrain"] == {"median_ms": 10.0, "quartiles_ms": (10.0, 25.0), "min_ms": 10.0, "max_ms": 40.0,
                                 "to_hvdtrain": 1.0, "best_peer": "ddp", "to_best_peer": 0.5,
                                 "to_best_peer_quartiles": pytest.approx((5 / 12, 1.25))}
    assert found["ddp"]["to_hvdtrain"] == 2.0 and found["ddp"]["to_best_peer"] == 1.0, "ddp+fp16 and plain do not count"
    assert found["fabric"]["to_hvdtrain"] == 2.0 and found["fabric"]["to_best_peer"] == 1.5
    alone = standings.summarise({"hvdtrain": [6.0], "plain": [5.0]}, chosen, 1)
    assert alone["hvdtrain"]["to_best_peer"] == 1.2, "on one rank the plain loop is the peer"


def test_a_peer_is_one_of_the_same_compression():
    chosen = names("hvdtrain", "hvdtrain+fp16", "hvdtrain+int8", "hvdtrain+auto", "hvdtrain-null", "ddp", "ddp+fp16")
    found = standings.summarise({c.name: [float(i + 1)] for i, c in enumerate(chosen)}, chosen, 2)
    assert {name: s["best_peer"] for name, s in found.items()} == {
        "hvdtrain": "ddp", "hvdtrain+fp16": "ddp+fp16", "hvdtrain+int8": None, "hvdtrain+auto": None,
        "hvdtrain-null": None, "ddp": "ddp", "ddp+fp16": "ddp+fp16"}
    assert found["hvdtrain+fp16"]["to_best_peer"] == pytest.approx(2 / 7)
    about = {name: {"wire": "w"} for name in found}
    assert standings.rows(found, about)[1:3] == [
        ("hvdtrain+fp16", "w", "2.00", "2.00 to 2.00", "2.000", "0.286", "0.286 to 0.286", "ddp+fp16"),
        ("hvdtrain+int8", "w", "3.00", "3.00 to 3.00", "3.000", "-", "-", "-")]


def test_nothing_stands_in_for_plain_hvdtrain():
    chosen = names("hvdtrain-mpi", "hvdtrain+fp16", "ddp")
    found = standings.summarise({"hvdtrain-mpi": [1.0], "hvdtrain+fp16": [2.0], "ddp": [1.0]}, chosen, 2)
    assert all(s["to_hvdtrain"] is None for s in found.values()) and found["hvdtrain-mpi"]["to_best_peer"] == 1.0
    assert standings.rows(found, {name: {"wire": ""} for name in found})[0][4] == "-"


def test_remarks_are_made_once():
    assert standings.remarks({"a": ["x", "y"], "b": ["x"]}) == ["all: x", "a: y"]
    assert standings.remarks({"a": ["x"]}) == ["a: x"] and standings.remarks({"a": []}) == []


def test_a_contender_that_does_something_else_is_found():
    chosen = names("hvdtrain", "ddp", "fabric", "hvdtrain-null", "ddp+fp16", "plain")
    good = {"loss": 2.0, "moved": 0.02, "equal": True}
    found = {"hvdtrain": good, "ddp": {**good, "loss": 2.001}, "fabric": {**good, "moved": 0.021},
             "hvdtrain-null": {**good, "loss": 3.0, "equal": False}, "ddp+fp16": {**good, "equal": False},
             "plain": {**good, "loss": 7.0}}
    assert standings.disagreements(found, chosen, 2) == {"fabric": "moved unlike the median, 0.020000",
                                                         "ddp+fp16": "ranks differ"}
    assert "plain" in standings.disagreements(found, chosen, 1)


def test_the_first_contender_is_not_the_measure():
    chosen, good = names("hvdtrain", "ddp", "fabric", "ddp+fp16"), {"loss": 2.0, "moved": 0.02, "equal": True}
    found = {"hvdtrain": {**good, "loss": 4.0}, "ddp": good, "fabric": good}
    assert standings.disagreements(found, chosen, 2) == {"hvdtrain": "loss unlike the median, 2.000000"}
    found = {"hvdtrain": {**good, "loss": math.nan}, "ddp": good, "fabric": {**good, "moved": math.inf},
             "ddp+fp16": {**good, "loss": math.nan, "equal": False}}
    assert standings.disagreements(found, chosen, 2) == {
        "hvdtrain": "loss is not finite", "fabric": "moved is not finite",
        "ddp+fp16": "loss is not finite; ranks differ"}
    nowhere = {name: {**good, "loss": math.nan} for name in ("hvdtrain", "ddp")}
    assert list(standings.disagreements(nowhere, chosen, 2)) == ["hvdtrain", "ddp"]


# --- rounds of jobs that are small programs --------------------------------------------------------------------------

STAND_IN = """
import json, sys
from benchmarks.worker import MARK
name, lasts, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def say(**message):
    print(MARK + json.dumps(message), flush=True)
say(event="ready", ranks=ranks, hosts=f"{ranks} hosts", wire="string", mpi="", parameters=7, settings={"S": name},
    notes=["boot set this"])
for n, line in enumerate(sys.stdin):
    if line.split() == ["quit"] or n == lasts:
        break
    say(event="done", steps=2, seconds=0.004, notes=["boot set this", f"{name} {n}"])
"""


@pytest.fixture
def race(monkeypatch, tmp_path):
    """``race({contender: rounds it lasts}, *options) -> (exit status or SystemExit, records)``; plain has 1 rank."""
    def run(lasts, *argv):
        monkeypatch.setattr(step, "command", lambda args, plan, c, scratch: [
            sys.executable, "-c", STAND_IN, c.name, str(lasts[c.name]), "1" if c.alone else "2"])
        monkeypatch.setattr("hvdtrain.commands.verify.launcher", lambda ranks: ["mpirun"])
        path = tmp_path / "r.jsonl"
        try:
            status = step.main(["--contenders", ",".join(lasts), "--jsonl", str(path), "--timeout", "20", *argv])
        except SystemExit as left:
            status = left
        return status, [json.loads(line) for line in path.read_text().splitlines()]

    return run


@pytest.fixture(autouse=True)
def everything_is_installed(request, monkeypatch):
    if "race" in request.fixturenames:
        monkeypatch.setattr(peers.Contender, "lacks",
                            lambda self, framework: "no fabric" if self.name == "fabric" else "")
        monkeypatch.setattr(racing.importlib.util, "find_spec", lambda name: object())


@pytest.mark.timeout(60)
def test_records_of_rounds_and_what_was_left_out(race, capsys):
    status, records = race({"plain": 9, "hvdtrain-mpi": 9, "fabric": 9, "ddp": 1}, "--rounds", "3")
    assert status == 1, "ddp failed"
    out = capsys.readouterr().out
    assert "7 parameters, batch 64 a rank, 2 ranks of" in out and "2 hosts; median of 3 rounds" in out
    assert "note: left out: fabric: no fabric" in out.split("x best peer")[1]
    assert "all: boot set this" in out and "hvdtrain-mpi: hvdtrain-mpi 2" in out
    rounds, summary = records[:-1], records[-1]
    assert [(r["contender"], r["round"]) for r in rounds] == [
        ("plain", 0), ("hvdtrain-mpi", 0), ("ddp", 0), ("hvdtrain-mpi", 1), ("plain", 1), ("plain", 2),
        ("hvdtrain-mpi", 2)]
    for r in rounds:
        assert r["ms"] == 2.0 and r["settings"] == {"S": r["contender"]} and "boot set this" in r["notes"]
    assert summary["ranks"] == 2 and summary["hosts"] == "2 hosts" and summary["base"] is None
    assert summary["left_out"] == {"fabric": "no fabric"} and summary["missing"] == ["ddp"]
    assert summary["contenders"]["hvdtrain-mpi"]["to_hvdtrain"] is None and summary["rounds_done"] == 3


@pytest.mark.timeout(60)
def test_no_round_is_counted_without_a_job(race, capsys):
    status, records = race({"ddp": 1}, "--rounds", "50")
    assert status == 1 and len(records) == 1
    out = capsys.readouterr().out
    assert "round 1/50" in out and "round 2/50" not in out and "no round was completed" in out


@pytest.mark.timeout(60)
def test_what_is_ended_tells_its_complete_rounds(race, capsys, monkeypatch):
    turns, usual = [], racing.turn

    def turn(job, orders, timeout_s):
        turns.append(job.name)
        if len(turns) == 6:
            raise SystemExit(143)
        return usual(job, orders, timeout_s)

    monkeypatch.setattr(racing, "turn", turn)
    left, records = race({"hvdtrain": 99, "ddp": 99}, "--rounds", "20")
    assert left.code == 143
    assert "median of 2 of 20 rounds" in capsys.readouterr().out
    assert [r["kind"] for r in records] == ["round"] * 5 + ["summary"]
    assert records[-1]["rounds_done"] == 2 and records[-1]["contenders"]["hvdtrain"]["to_best_peer"] == 1.0


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_data_comes_from_the_seed(name):
    work = WORKLOADS[name]
    x, y = work.arrays(6, 3)
    assert x.shape == (6, *work.shape) and np.array_equal(work.arrays(6, 3)[0], x)
    assert not np.array_equal(work.arrays(6, 4)[0], x)
    assert 0 <= y.min() and y.max() < (work.vocab or work.classes)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_peer_gets_the_batches_that_our_feed_cuts(size):
    arrays = WORKLOADS["tiny"].arrays(BATCHES * 4 * size, 0)
    for rank in range(size):
        feed = Feed(ArraySource(arrays), 4 * size, rank=rank, size=size, shuffle=False, prefetch=0)
        ours = [batch.micros for batch in feed.epoch(Cursor())]
        theirs = part(arrays, 4, rank, size)
        assert len(ours) == len(theirs) == BATCHES
        for (micro,), batch in zip(ours, theirs):
            assert all(np.array_equal(a, b) for a, b in zip(micro, batch))
