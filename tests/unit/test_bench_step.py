"""bench step: choice of contenders, what is made of the times, and the data that all contenders share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdtrain.bench import peers, step
from hvdtrain.bench.peers import contender
from hvdtrain.bench.workloads import BATCHES, WORKLOADS, part
from hvdtrain.data.feed import Feed
from hvdtrain.data.cursor import Cursor
from hvdtrain.data.sources import ArraySource
from hvdtrain.errors import UserError


def refused(*argv):
    """The sentence with which an option is refused."""
    with pytest.raises(UserError) as caught:
        step.main(list(argv))
    return str(caught.value)


@pytest.mark.parametrize("argv, word", [
    (["--workload", "mpl"], "did you mean 'mlp'"), (["--framework", "jax"], "torch"), (["--np", "0"], "--np"),
    (["--rounds", "x"], "--rounds"), (["--peer"], "--peers"), (["--contenders", ","], "no contender is left"),
    (["--contenders", "dpd"], "did you mean 'ddp'"), (["--contenders", "hvdtrain-mip"], "did you mean 'mpi'"),
    (["--contenders", "hvdtrain+fp61"], "did you mean 'fp16'"), (["--timeout", "0"], "--timeout"),
    (["--mpirun_args", "'open"], "--mpirun_args")])
def test_a_bad_option_is_refused_in_words(argv, word, monkeypatch):
    monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("hvdtrain.cli.verify.launcher", lambda ranks: ["mpirun"])
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
                                                 "accelerate", "fabric", "horovod"]
    assert step.chosen("tensorflow", 2, True, "") == ["hvdtrain", "hvdtrain-null", "horovod", "mwms"]
    assert step.chosen("torch", 1, True, "") == ["hvdtrain", "plain"]
    assert step.chosen("torch", 1, False, "") == ["hvdtrain"]
    assert step.chosen("torch", 2, True, "plain, ddp,plain") == ["plain", "ddp"]


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_name_that_is_chosen_exists(framework):
    for names in (step.OURS[framework], peers.peers(framework)):
        assert [contender(name, framework).name for name in names] == list(names)


def test_the_parts_of_our_names():
    found = contender("hvdtrain-horovod+powersgd", "torch")
    assert found.options == {"wire": "horovod", "compression": "powersgd"} and found.needs == "horovod"
    assert not found.exact and not found.peer
    assert contender("hvdtrain", "torch").exact and not contender("hvdtrain-null", "torch").exact
    assert contender("ddp", "torch").exact and not contender("ddp+fp16", "torch").exact


def test_what_is_not_installed_is_left_out_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    monkeypatch.setattr("hvdtrain.cli.verify.launcher", lambda ranks: ["mpirun", "-np", str(ranks)])
    plan = step._plan(step._parser().parse(["--contenders", "accelerate,ddp,plain"]), {})
    assert [c.name for c in plan.contenders] == ["ddp", "plain"]
    assert "accelerate is left out: accelerate is not installed" in capsys.readouterr().out
    assert plan.launch == {"ddp": ("mpirun", "-np", "2"), "plain": ()}, "plain is one process"


def test_all_jobs_get_the_same_command_and_environment(monkeypatch):
    monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("hvdtrain.cli.verify.launcher", lambda ranks: ["mpirun", "--oversubscribe", "-np", str(ranks)])
    args = step._parser().parse(["--contenders", "ddp,hvdtrain", "--threads", "3", "--hosts", "a:1,b:1", "--iface",
                                 "eth7", "--mpirun_args", "--mca plm_rsh_agent '/a b'", "--exchange", "bucket_mb=4"])
    plan = step._plan(args, {"PYTHONPATH": "/p"})
    assert plan.env["OMP_NUM_THREADS"] == "3" and plan.env["PYTHONPATH"] == "/p"
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
    assert step._environment(4096, 1, given)["OMPI_MCA_mpi_yield_when_idle"] == expected
    assert "OMPI_MCA_mpi_yield_when_idle" not in step._environment(1, 1, {})


def test_the_order_moves_on_each_round():
    assert [step.rotated("abc", n) for n in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert step.rotated([], 3) == []


def test_ratios_are_medians_of_rounds_not_ratios_of_medians():
    chosen = [contender(name, "torch") for name in ("hvdtrain", "ddp", "fabric", "ddp+fp16", "plain")]
    times = {"hvdtrain": [10.0, 40.0, 10.0], "ddp": [20.0, 20.0, 30.0], "fabric": [30.0, 60.0, 20.0],
             "ddp+fp16": [1.0, 1.0, 1.0], "plain": [5.0, 5.0, 5.0]}
    found = step.summarise(times, chosen, 2)
    assert found["hvdtrain"] == {"median_ms": 10.0, "min_ms": 10.0, "max_ms": 40.0, "to_hvdtrain": 1.0,
                                 "to_best_peer": 0.5}
    assert found["ddp"]["to_hvdtrain"] == 2.0 and found["ddp"]["to_best_peer"] == 1.0, "ddp+fp16 and plain do not count"
    assert found["fabric"]["to_hvdtrain"] == 2.0 and found["fabric"]["to_best_peer"] == 1.5
    compressing = {name: times[name] for name in ("hvdtrain", "ddp+fp16")}
    assert step.summarise(compressing, chosen, 2)["hvdtrain"]["to_best_peer"] == 10.0, "no other peer is there"
    alone = step.summarise({"hvdtrain": [6.0], "plain": [5.0]}, chosen, 1)
    assert alone["hvdtrain"]["to_best_peer"] == 1.2, "on one rank the plain loop is the peer"
    assert math.isnan(step.summarise({"ddp": [1.0]}, chosen, 2)["ddp"]["to_hvdtrain"])
    assert math.isnan(step.summarise({"hvdtrain": [1.0]}, chosen, 2)["hvdtrain"]["to_best_peer"])


def test_a_contender_that_does_something_else_is_found():
    chosen = [contender(name, "torch") for name in ("hvdtrain", "ddp", "fabric", "hvdtrain-null", "ddp+fp16", "plain")]
    good = {"loss": 2.0, "moved": 0.02, "equal": True}
    found = {"hvdtrain": good, "ddp": {**good, "loss": 2.001}, "fabric": {**good, "moved": 0.021},
             "hvdtrain-null": {**good, "loss": 3.0, "equal": False}, "ddp+fp16": {**good, "equal": False},
             "plain": {**good, "loss": 7.0}}
    assert step.disagreements(found, chosen, 2) == {"fabric": "moved unlike hvdtrain's", "ddp+fp16": "ranks differ"}
    assert step.disagreements({**found, "ddp": {**good, "loss": math.nan}}, chosen, 2)["ddp"]
    assert "plain" in step.disagreements(found, chosen, 1)


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
