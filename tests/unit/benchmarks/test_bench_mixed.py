"""bench mixed: the options, who is slowed and how, the numbers, and rounds of jobs that are small programs."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import mixed, parts, peers, throttle, worker
from benchmarks import race as racing
from benchmarks.parts import Measured
from benchmarks.peers import Prepared, contender
from hvdtrain.core.errors import UserError


@pytest.mark.parametrize("argv, word", [
    (["--speeds", "1"], "two ranks or more"), (["--speeds", "1,0"], "above 0"), (["--speeds", "1,1.5"], "1 at most"),
    (["--speeds", "1,fast"], "--speeds is 'fast'"), (["--move", "3"], "5 steps or more"),
    (["--move", "10", "--equal"], "ranks that can change speeds"),
    (["--move", "10", "--emulate"], "cannot be throttled"),
    (["--contenders", "hvdtrain@atuo"], "did you mean 'auto'"), (["--contenders", "hvdtrain,plain"], "several ranks"),
    (["--rebalance", "margn=1"], "did you mean 'margin'"), (["--rebalance", "margin=-1"], "rebalance.margin is -1"),
    (["--emulate", "--contenders", "ddp"], "no contender is left"), (["--jsonl", "/"], "/ cannot be written")])
def test_a_bad_option_is_refused_in_words_before_any_job(argv, word, monkeypatch):
    monkeypatch.setattr(racing, "Job", lambda *job: pytest.fail("a job was started"))
    monkeypatch.setattr(racing.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("hvdtrain.cluster.horovod.horovod_reason", lambda framework: None)
    monkeypatch.setattr("hvdtrain.commands.verify.launcher", lambda ranks: ["mpirun"])
    monkeypatch.setattr(throttle, "available", lambda: "")
    with pytest.raises(UserError) as caught:
        mixed.main(argv)
    assert word in str(caught.value)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_name_that_is_chosen_exists(framework):
    for names in (mixed.CONTENDERS[framework], mixed.MOVED, mixed.EQUAL):
        assert [contender(name, framework).name for name in names] == list(names)
    assert contender("hvdtrain-mpi+int8@auto", framework).options == {"wire": "mpi", "compression": "int8",
                                                                      "balance": "auto"}


# --- numbers ---------------------------------------------------------------------------------------------------------

TIMES = {"solo 1": [100.0, 50.0], "solo 0.4": [250.0, 125.0], "hvdtrain": [125.0, 125.0],
         "hvdtrain@auto": [100.0, 50.0]}


def measured(times=TIMES, moved=None, emulated=False):
    samples = {name: [[8, 8], [11, 5]] for name in times}
    return Measured((1.0, 0.4), 8, times, samples, moved or {}, emulated)


def test_a_part_is_of_the_ranks_solo_speeds_in_the_same_round():
    found = measured()
    assert found.contenders == ["hvdtrain", "hvdtrain@auto"]
    assert found.solo_sums() == pytest.approx([80 + 32, 160 + 64])
    assert found.rates("hvdtrain") == [128.0, 128.0] and found.rates("solo 0.4") == [32.0, 64.0]
    assert found.percents("hvdtrain") == pytest.approx([100 * 128 / 112, 100 * 128 / 224])
    told = parts.summary(found)
    assert told["hvdtrain"]["percent"] == pytest.approx((114.286 + 57.143) / 2, abs=1e-3)
    assert told["hvdtrain@auto"]["to_hvdtrain"] == pytest.approx((0.8 + 0.4) / 2) and told["solo 1"]["percent"] is None
    assert parts.rows(told, dict.fromkeys(TIMES, "w"))[3] == (
        "hvdtrain@auto", "w", "75.0", "240.0", "142.9", "142.9", "142.9", "0.600", "11:5")


def test_ranks_of_one_speed_share_a_solo_job():
    found = Measured((0.5, 0.5, 0.25), 10, {"solo 0.5": [20.0], "solo 0.25": [40.0], "ddp": [40.0]}, {}, {})
    assert found.solo_sums() == pytest.approx([500 + 500 + 250]) and found.percents("ddp") == pytest.approx([60.0])


def test_emulated_speeds_are_parts_of_the_solo_speed():
    times = {"solo 1": [100.0], "hvdtrain": [200.0]}
    assert measured(times, emulated=True).solo_sums() == pytest.approx([80 * 1.4])
    assert measured(times).solo_sums() is None, "solo 0.4 failed"
    told = parts.summary(measured(times))
    assert told["hvdtrain"]["percent"] is None and parts.rows(told, dict.fromkeys(times, ""))[1][4:7] == ("-",) * 3


def test_windows_after_a_change():
    """A step of 16 samples at the solo sum of 112 (224) a second takes 1/7 (1/14) s: 100 %."""
    slow, full = [2 / 7] * 5, [1 / 7] * 5
    moved = {"hvdtrain@auto": [slow + full + full, [s / 2 for s in slow + slow + full] + [9.0] * 4]}
    found = measured(moved=moved)
    assert found.windows("hvdtrain@auto")[0] == pytest.approx([50, 100, 100])
    assert found.recovery("hvdtrain@auto")[0] == pytest.approx([50, 75, 100]), "the last 4 are no window"
    told = parts.summary(found)
    assert told["hvdtrain@auto"]["steps_to_target"] == 10
    assert parts.change_headers(told) == ("contender", "before", "1-5", "6-10", "11-15", "steps to 90 %")
    assert parts.change_rows(told) == [("hvdtrain@auto", "142.9", "50.0", "75.0", "100.0", "10")]
    never = parts.summary(measured(moved={"hvdtrain": [slow, slow]}))
    assert never["hvdtrain"]["steps_to_target"] is None and parts.change_rows(never)[0][-1] == "not reached"


# --- the worker's part -----------------------------------------------------------------------------------------------

class Two:
    """The control plane of rank 0 of two, whose other rank is slower in the first step."""

    size = 2

    def barrier(self, tag):
        """Nobody to wait for."""

    def gather(self, ends):
        return [ends, [ends[0] + 5.0, *(end + 5.0 for end in ends[1:-1]), ends[-1]]]


def test_steps_are_timed_to_their_end_on_the_slowest_rank():
    taken = []
    step_s = worker._timed(Prepared(taken.append, float, list, "none"), Two(), 7, 2, 3)
    assert taken == [7, 8, 9, 10, 11], "two of them untimed"
    assert len(step_s) == 3 and 5.0 < step_s[0] < 5.5 and abs(step_s[1]) < 0.5 and -5.5 < step_s[2] < -4.5


@pytest.mark.parametrize("line, order", [("go 5\n", (5, None)), ("go 5 0\n", (5, 0)), ("quit\n", None), ("", None),
                                         ("go 0\n", None)])
def test_orders(line, order, monkeypatch):
    monkeypatch.setattr(sys, "stdin", type("Lines", (), {"readline": staticmethod(lambda: line)}))
    assert worker._order() == order


# --- rounds of jobs that are small programs --------------------------------------------------------------------------

STAND_IN = """
import json, sys
from benchmarks.worker import MARK
name, ranks = sys.argv[1], int(sys.argv[2])
def say(**message):
    print(MARK + json.dumps(message), flush=True)
say(event="ready", ranks=ranks, hosts="1 host", wire="string", mpi="", parameters=7, settings={}, notes=[])
for line in sys.stdin:
    words = line.split()
    if words[0] == "quit":
        break
    steps = int(words[1])
    say(event="done", steps=steps, seconds=0.01 * steps, step_s=[0.01] * steps, samples=[32] * ranks, notes=[line])
"""


class Groups:
    """A throttle that only remembers."""

    log: list = []

    def __init__(self, speeds, threads):
        self.paths = [f"/group{at}" for at in range(len(speeds))]
        self.log[:] = [("made", *speeds)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append("removed")

    def set(self, at, speed):
        self.log.append((at, speed))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """``bench(*options) -> (exit status, records, command line by contender)``."""
    def run(*argv):
        lines = {}

        def stand_in(found, name, words, env, timeout_s, usual=racing.start):
            lines[name] = " ".join(words)
            usual(found, name, [sys.executable, "-c", STAND_IN, name, "1" if "solo" in name else "2"], env, timeout_s)

        monkeypatch.setattr(racing, "start", stand_in)
        monkeypatch.setattr(racing.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(peers.Contender, "lacks", lambda self, framework: "")
        monkeypatch.setattr("hvdtrain.commands.verify.launcher", lambda ranks: ["mpirun"])
        monkeypatch.setattr(mixed, "Throttle", Groups)
        path = tmp_path / "r.jsonl"
        status = mixed.main(["--jsonl", str(path), "--timeout", "20", "--steps", "2", *argv])
        return status, [json.loads(line) for line in path.read_text().splitlines()], lines

    return run


@pytest.mark.timeout(60)
def test_speeds_change_ranks_within_each_round(bench, monkeypatch, capsys):
    monkeypatch.setattr(throttle, "available", lambda: "")
    status, records, lines = bench("--rounds", "2", "--move", "7", "--contenders", "hvdtrain@auto",
                                   "--rebalance", "every_steps=4")
    assert status == 0
    there, back = [(0, 1.0), (1, 0.4)], [(0, 0.4), (1, 1.0)]
    assert Groups.log == [("made", 1.0, 0.4, 1.0, 0.4), *there, *back, *there, *back, "removed"]
    assert lines["hvdtrain@auto"].startswith("mpirun ") and "--rebalance every_steps=4" in lines["hvdtrain@auto"]
    assert lines["hvdtrain@auto"].endswith("--cgroup /group0 --cgroup /group1")
    assert lines["solo 1"].endswith("--cgroup /group2") and lines["solo 0.4"].endswith("--cgroup /group3")
    assert "--contender plain" in lines["solo 0.4"] and "mpirun" not in lines["solo 0.4"]
    rounds = [r for r in records[:-1] if r["contender"] == "hvdtrain@auto"]
    assert [r["round"] for r in rounds] == [0, 1] and all(r["moved_step_s"] == [0.01] * 7 for r in rounds)
    assert [r["notes"][-1] for r in rounds] == ["go 2 2\n", "go 2 9\n"], "the way back is untimed"
    assert all(r["percent"] == pytest.approx(100) and r["slowed"] == "by control groups" for r in rounds)
    assert records[-1]["contenders"]["hvdtrain@auto"]["steps_to_target"] == 0
    out = capsys.readouterr().out
    assert "reversed" in out and "steps to 90 %" in out and "global batch 64, ranks of speed 1,0.4" in out


@pytest.mark.timeout(60)
def test_without_groups_our_ranks_slow_themselves_and_peers_are_left_out(bench, monkeypatch, capsys):
    monkeypatch.setattr(throttle, "available", lambda: "nobody allows it")
    status, records, lines = bench("--rounds", "1", "--contenders", "hvdtrain,ddp")
    assert status == 0 and list(lines) == ["solo 1", "hvdtrain"]
    assert "--emulate_speed 1.0 --emulate_speed 0.4" in lines["hvdtrain"] and "--cgroup" not in lines["hvdtrain"]
    assert "--emulate_speed" not in lines["solo 1"]
    assert records[-1]["left_out"] == {"ddp": "its ranks cannot be slowed: nobody allows it"}
    assert records[-1]["contenders"]["hvdtrain"]["percent"] == pytest.approx(100 * 2 / 1.4)
    assert "by waiting" in capsys.readouterr().out


@pytest.mark.timeout(60)
def test_equal_ranks_are_not_slowed_at_all(bench, monkeypatch, capsys):
    monkeypatch.setattr(mixed, "Throttle", lambda *speeds: pytest.fail("groups were made"))
    status, records, lines = bench("--rounds", "1", "--equal", "--speeds", "1,0.4,0.4")
    assert status == 0 and list(lines) == ["solo 1", "hvdtrain", "hvdtrain@auto"]
    assert records[-1]["contenders"]["hvdtrain@auto"]["to_hvdtrain"] == 1.0 and records[-1]["speeds"] == [1, 1, 1]
    assert "not slowed" in capsys.readouterr().out
