"""collectives auto over real wires: ranks decide alike, Horovod is gone where it is not taken, a resumed run keeps on.

The hosts are made up: MPI still shares memory between ranks of one machine, which makes all wires those of one host.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_runs import FRAMEWORKS, apart, config, fitted, make_model, samples, weights

from hvdtrain.cluster import horovod
from hvdtrain.cluster.topology import HostRanks, Topology
from hvdtrain.comm import transport_sweep, wires
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.config import CheckpointConfig
from hvdtrain.engine import assemble as assembling
from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks import auto_compression, auto_wire
from hvdtrain.engine.callbacks.auto_compression import WARM_STEPS, WINDOW_STEPS
from hvdtrain.engine.callbacks.auto_wire import AutoWire
from hvdtrain.planning.compressor_choice import CompressorChoice
from hvdtrain.planning.transport_choice import WireChoice

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

STEPS = 2 * (WARM_STEPS + WINDOW_STEPS) + 52


@pytest.fixture(autouse=True)
def hosts(monkeypatch):
    """Each rank is said to be on a host of its own, the last two on one where there are three."""
    def survey(control):
        first = HostRanks("a", (0,), 2)
        return Topology((first, HostRanks("b", tuple(range(1, control.size)), 2)))

    monkeypatch.setattr(assembling, "survey", survey)


def auto_of(run):
    return next(c for c in run.callbacks if isinstance(c, AutoWire))


def run_of(framework, out, **changes):
    setting = config(global_batch=8, max_steps=STEPS, epochs=STEPS, collectives="auto", out=str(out),
                     checkpoint=CheckpointConfig(), **changes)
    return assemble(setting, make_model(framework), samples(16))


def test_a_run_measures_decides_and_goes_on_alike(control, tmp_path, capsys):
    framework = "torch"
    out = Path(control.bcast(str(tmp_path / "run")))
    ran = wires._runs_horovod(framework)  # another file's tests may have started it, and use it still
    run = fitted(run_of(framework, out))
    auto = auto_of(run)
    mine = auto.choice, auto.settled, run.collectives.name, [n for n in run.notes if "collectives auto" in n]
    assert auto.settled and auto.choice == mine[2] and len(mine[3]) == 2
    assert all(other == mine for other in control.gather(mine))
    values = weights(run)
    assert all(apart(other, values) == 0 for other in control.gather(values))
    if auto.choice != "horovod":
        assert wires._runs_horovod(framework) == ran, "its thread would look for work all the time"
    if control.rank == 0:
        assert "collectives auto" in capsys.readouterr().out
    again = run_of(framework, out, resume="auto")
    assert again.collectives.name == auto.choice and auto_of(again).settled


@pytest.mark.tensorflow_size(2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_wire_can_be_gone_over_to_and_gives_the_same_sums(framework, control, tmp_path, monkeypatch):
    """The transports take turns by order of the test; the curve is that of one wire."""
    out = Path(control.bcast(str(tmp_path)))
    names = [n for n in ("mpi", "shared", "horovod") if n != "horovod" or horovod.horovod_reason(framework) is None]

    def train(name, turns):
        setting = config(global_batch=8, max_steps=8, epochs=8, collectives="auto", out=str(out / name))
        run = assemble(setting, make_model(framework), samples(16))
        seen = []

        class Turn(AutoWire):
            def step_end(self, run):
                seen.append(run.collectives.name)
                assert run.wires.use(run, turns[len(seen) % len(turns)]) == ""

        run.callbacks.append(Turn())
        run.callbacks[-1].fit_start = run.callbacks[-1].fit_end = lambda run: None
        fitted(run)
        assert set(seen) == {*turns, seen[0]}
        return weights(run)

    want, got = train("one", ["mpi"]), train("turns", names)
    assert apart(want, got) < 1e-5
    assert all(apart(other, got) == 0 for other in control.gather(got))
    control.barrier("turns")


def test_a_wait_longer_than_reckoned_tries_the_next_best_on_all_ranks(control, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_wire.transport_choice, "doubt", lambda *_: ("mpi", "made up"))
    monkeypatch.setattr(auto_wire.transport_choice, "decide", lambda rows: WireChoice(rows[-1].name, "made up"))
    monkeypatch.setattr(horovod, "horovod_reason", lambda framework: "not here" if control.size > 2 else None)
    if control.size == 2 and horovod.horovod_libraries("torch") in (None, []):
        pytest.skip("Horovod is not built")
    monkeypatch.setattr(auto_wire.transport_choice, "better", lambda first, a, tried,
                        b: (tried, f"{tried} from now on"))
    run = run_of("torch", Path(control.bcast(str(tmp_path / "run"))))
    if run.wires.names[-1] == "mpi":
        monkeypatch.setattr(auto_wire.transport_choice, "decide", lambda rows: WireChoice(rows[0].name, "made up"))
    fitted(run)
    assert run.collectives.name == auto_of(run).choice == "mpi"
    assert run.notes[-1] == "collectives auto: mpi from now on"


def test_a_short_run_takes_the_rule_and_says_so(control, tmp_path):
    run = fitted(assemble(config(global_batch=8, max_steps=3, collectives="auto",
                                 out=control.bcast(str(tmp_path / "run"))), make_model("torch"), samples(16)))
    want = "shared" if control.size > 2 else "mpi"
    assert run.collectives.name == want and run.notes[-1].endswith("not measured in a run of 3 updates")


def test_the_sweep_is_the_same_everywhere_and_sane(control, comm):
    from hvdtrain.backends.numpy.ops import Ops

    two = {"mpi": MpiCollectives(comm, 60), "again": MpiCollectives(comm, 60)}
    found = transport_sweep.measure(two, Ops(), control, 1e9, 0.3)
    assert all(other == found for other in control.gather(found))
    assert [m.name for m in found] == list(two)
    for m in found:
        assert m.link.seconds(1e6) > 0 and 0 <= m.busy_cores < 64 and m.idle_cores == 0 and m.most_bytes > 1 << 18
    small, _ = transport_sweep.measure(two, Ops(), control, 1e5, 0.3)
    assert small.most_bytes == 1 << 19, "no more than a step sends"


def test_a_quota_on_one_rank_keeps_horovod_from_all(control, tmp_path, monkeypatch):
    monkeypatch.setattr(wires, "cpu_quota", lambda: 0.3 if control.rank == 1 else float("inf"))
    monkeypatch.setattr(wires.horovod, "start_horovod", lambda *a, **k: pytest.fail("Horovod was started"))
    run = run_of("torch", Path(control.bcast(str(tmp_path / "run"))))
    assert "horovod" not in run.wires.names and "rank 1 on" in run.wires.left_out["horovod"]
    assert np.all([n == run.wires.names for n in control.gather(run.wires.names)])
    run.leave()


@pytest.mark.usefixtures("few_ranks")
def test_wire_and_compressor_are_decided_together_and_alike(control, tmp_path, monkeypatch):
    """Made up is what is taken: fp16, over the first of the other wires."""
    tables = []

    def decide(rows, margin):
        tables.append({(r.name, r.wire) for r in rows})
        return CompressorChoice("fp16", 0.1, "made up", next((r.wire for r in rows if r.wire), ""))

    monkeypatch.setattr(auto_compression.compressor_choice, "decide", decide)
    monkeypatch.setattr(auto_compression.compressor_choice, "verdict", lambda *_: (True, "stays"))
    monkeypatch.setattr(auto_wire.AutoWire, "_check", lambda *_: pytest.fail("checked beside the compressor"))
    out = Path(control.bcast(str(tmp_path / "run")))
    run = fitted(run_of("torch", out, compression="auto"))
    first, = {name for name, wire in tables[0] if not wire} - {"none"} and {run.notes[0].split()[2].strip(",")}
    others = {wire for _, wire in tables[0]} - {""}
    assert others == set(run.wires.names) - {first} and {("fp16", ""), ("none", "")} <= tables[0]
    auto = auto_of(run)
    mine = auto.choice, auto.settled, run.dp.compression, [n for n in run.notes if "auto" in n]
    assert mine[:3] == (run.collectives.name, True, "fp16") and (not others or run.collectives.name in others)
    assert all(other == mine for other in control.gather(mine))
    again = run_of("torch", out, compression="auto", resume="auto")
    assert (again.collectives.name, again.dp.compression) == (auto.choice, "fp16")
