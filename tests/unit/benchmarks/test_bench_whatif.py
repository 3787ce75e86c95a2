"""`benchmarks whatif`: the two jobs it starts, and how it holds the forecast against the second of them."""

import json
import sys

import pytest

from benchmarks import peers, race, throttle, whatif
from hvdtrain.core.errors import UserError

STAND_IN = """
import json, sys
from benchmarks.worker import MARK
ms, without_s = float(sys.argv[1]), json.loads(sys.argv[2])
def say(**message):
    print(MARK + json.dumps(message), flush=True)
say(event="ready", ranks=3, hosts="1 host", wire="string", mpi="", parameters=7, settings={}, notes=[])
for line in sys.stdin:
    words = line.split()
    if words[0] == "quit":
        break
    if words[0] == "whatif":
        say(event="whatif", step_s=0.020, without_s=without_s)
        continue
    steps = int(words[1])
    say(event="done", steps=steps, seconds=ms / 1e3 * steps, step_s=[], samples=[32] * 3, notes=[])
"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """``bench(ms of all, ms without, what is estimated, *options) -> (status, record, command lines)``."""
    def run(ms, less_ms, without_s, *argv):
        lines = {}

        def stand_in(found, name, words, env, timeout_s, usual=race.start):
            lines[name] = " ".join(words)
            own = ms if name == whatif.WHOLE else less_ms
            usual(found, name, [sys.executable, "-c", STAND_IN, str(own), json.dumps(without_s)], env, timeout_s)

        monkeypatch.setattr(race, "start", stand_in)
        monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(peers.Contender, "lacks", lambda self, framework: "")
        monkeypatch.setattr("hvdtrain.commands.verify.launcher", lambda ranks: ["mpirun", "-np", str(ranks)])
        monkeypatch.setattr(throttle, "available", lambda: "nobody allows it")
        path = tmp_path / "r.jsonl"
        status = whatif.main(["--jsonl", str(path), "--timeout", "20", "--steps", "2", "--rounds", "2",
                              "--speeds", "1,0.5,1", *argv])
        return status, [json.loads(line) for line in path.read_text().splitlines()][-1:], lines

    return run


@pytest.mark.timeout(60)
def test_a_forecast_is_held_against_a_job_without_the_slowest_rank(bench, capsys):
    status, (row,), lines = bench(20.0, 15.0, [0.030, 0.0155, 0.030])
    assert status == 0 and row["gone"] == 1 and row["rounds_done"] == 2
    assert row["median"]["off"] == pytest.approx(100 * (15.5 / 15 - 1))
    assert row["median"]["gain"] == pytest.approx(100 * (20 / 15 - 1))
    whole, less = lines[whatif.WHOLE], lines[whatif.LESS]
    assert "mpirun -np 3" in whole and "--emulate_speed 1.0 --emulate_speed 0.5 --emulate_speed 1.0" in whole
    assert "mpirun -np 2" in less and less.count("--emulate_speed 1.0") == 2 and "0.5" not in less
    assert "--batch 32" in whole and "--batch 48" in less, "one global batch"
    assert "off by +3.3 %" in capsys.readouterr().out


@pytest.mark.timeout(60)
def test_a_forecast_that_does_not_hold_is_a_failure(bench):
    assert bench(20.0, 15.0, [0.030, 0.018, 0.030])[0] == 1
    assert bench(20.0, 15.0, [0.030, None, 0.030])[0] == 1


def test_a_batch_that_the_others_cannot_share_is_refused(bench):
    with pytest.raises(UserError, match="a batch that 2 ranks can share equally"):
        bench(1.0, 1.0, [], "--batch", "7")
    with pytest.raises(UserError, match="a rank from 0 to 2"):
        bench(1.0, 1.0, [], "--without", "3")
