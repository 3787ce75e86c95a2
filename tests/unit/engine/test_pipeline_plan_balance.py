"""`balance` between copies of a model that is partitioned over ranks: whose speed counts, and what names mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import CLASSES, FEATURES, Record, apart, config, fitted, lockstep, samples

from hvdtrain.backends.numpy.model import Model
from hvdtrain.config import Named, PipelineConfig, RebalanceConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Mesh
from hvdtrain.engine import balance_plan as copies
from hvdtrain.engine import compare_ranks as per_rank
from hvdtrain.engine.callbacks import meter
from hvdtrain.engine.callbacks.balance import Balance, _world
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.parallel.pipeline.partition import planned
from hvdtrain.planning.batch.plan import plan
from hvdtrain.planning.batch.sampler import BatchShares
from hvdtrain.planning.linear import LinearTime, Speed
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs

FAST, SLOW = LinearTime(0.001, 0.0005), LinearTime(0.001, 0.002)
SIZES = (FEATURES, 16, 14, 12, CLASSES)


def model(rank: int) -> Model:
    return Model(SIZES, 1)


class Clock(Callback):
    """Stands before the meter: each rank computes a half of what its copy's line of the moment says, and waits for the
    other stage in the other half."""

    where = "all"

    def __init__(self, line_at: Any) -> None:
        self.line_at, self.total, self.own, self.micros = line_at, 0.0, 0, 0

    def step_end(self, run: Any) -> None:
        p = run.timeline.totals
        line = self.line_at(run.mesh.copy, run.state.cursor.step)
        self.total += line.seconds(p.own_samples - self.own, p.own_micros - self.micros)
        self.own, self.micros = p.own_samples, p.own_micros
        p.seconds["compute"] = run.schedule._ordered.idle_s = self.total / 2
        p.seconds["wait"] = self.total / 2
        p.step_s = 10.0 * p.steps


def balanced(monkeypatch: pytest.MonkeyPatch, line_at: Any, **changes: Any) -> list[tuple[Any, ...]]:
    """Return (samples of each step, weights, reading, notes) by rank, of runs whose probe finds FAST and SLOW."""
    monkeypatch.setattr(copies, "probe", lambda run: [Speed(line, 0, (8,), (1.0,)) for line in (FAST, SLOW)])

    class Parts(Callback):
        where = "all"

        def __init__(self) -> None:
            self.before, self.taken = 0, []

        def step_end(self, run: Any) -> None:
            self.taken.append(run.timeline.totals.own_samples - self.before)
            self.before = run.timeline.totals.own_samples

    def work(run: Any) -> tuple[Any, ...]:
        parts = Parts()
        run.callbacks[:0] = [Clock(line_at), parts]
        fitted(run)
        compared = next(c for c in run.callbacks if isinstance(c, meter.Meter))
        return parts.taken, run.parts.state.state()[0]["model"], compared.reading, run.notes

    settings = config(global_batch=48, max_steps=60, pipeline=PipelineConfig(2),
                      optimizer=Named("SGD", {"momentum": 0.5}),
                      **changes)
    return lockstep(4, settings, model, samples(192), work)


def test_static_gives_copies_what_their_speeds_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = balanced(monkeypatch, lambda copy, step: SLOW if copy else FAST, balance="static")
    want = plan([FAST, SLOW], 48, None, [8, 8])
    assert [set(taken) for taken, *_ in ranks] == [{n} for n in want.samples_P for _ in range(2)]
    held = {name: array for _, own, *_ in ranks for name, array in own.items()}
    (alone,) = lockstep(1, config(global_batch=48, max_steps=60, optimizer=Named("SGD", {"momentum": 0.5})), model,
                        samples(192), lambda run: fitted(run).parts.state.state()[0]["model"])
    assert apart([held[n] for n in sorted(held)], [alone[n] for n in sorted(alone)]) < 1e-9
    reading = ranks[0][2]
    assert len(reading.rows) == 2 and reading.lost["idle"] > 0 and reading.lost["channel"] > 0
    assert sum(row.samples for row in reading.rows) == 48


def test_auto_follows_a_copy_that_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = balanced(monkeypatch, lambda copy, step: SLOW if copy or step > 20 else FAST, balance="auto",
                     rebalance=RebalanceConfig(every_steps=5))
    for taken, *_ in ranks:
        assert taken[-1] == 24
    assert ranks[0][0][0] > 30
    assert any("the replicas take" in note for note in ranks[0][3])


def test_one_copy_takes_all_and_says_so() -> None:
    settings = config(global_batch=12, max_steps=1, pipeline=PipelineConfig(2), balance="auto")
    runs = lockstep(2, settings, model, samples(24), fitted)
    assert any("one replica" in note for note in runs[0].notes)


def test_probe_times_pipelines_and_leaves_the_model_as_it_was() -> None:
    """All ranks know a line of each copy, however fast; then the curve is that of a run without probe."""
    settings = config(global_batch=48, max_steps=3, pipeline=PipelineConfig(2), emulate_speed=[1.0, 1.0, 0.02, 0.02],
                      rebalance=RebalanceConfig(probe_s=0.01))

    def work(run: Any) -> tuple[Any, ...]:
        found = copies.probe(run)
        run.callbacks.append(record := Record())
        fitted(run)
        return found, record.losses

    probed = lockstep(4, settings, model, samples(96), work)
    assert all(speed.line.seconds(48, 8) > 0 for speed in probed[0][0]) and len(probed[0][0]) == 2
    assert all(found == probed[0][0] for found, _ in probed)
    plain = lockstep(4, config(global_batch=48, max_steps=3, pipeline=PipelineConfig(2)), model, samples(96),
                     lambda run: (run.callbacks.append(r := Record()), fitted(run), r.losses)[2])
    assert probed[0][1] == pytest.approx(plain[0], rel=1e-12)


def test_probe_halves_the_micro_batches_of_a_copy_that_runs_out_of_memory() -> None:
    settings = config(global_batch=48, max_steps=1, pipeline=PipelineConfig(2), rebalance=RebalanceConfig(probe_s=0.0))

    def work(run: Any, room: int) -> Any:
        stage, own = run.parts.stage, run.parts.stage.loss

        def loss(chunk: int, micro: int, came: Any, batch: Any, scale: float) -> Any:
            if run.control.rank == 3 and len(batch[0]) > room:
                raise MemoryError("of a test")
            return own(chunk, micro, came, batch, scale)

        stage.loss = loss
        found = copies.probe(run)
        fitted(run)
        return found

    for room, sizes, ceiling in ((1, (1,), 1), (5, (2, 3), 3)):
        found = lockstep(4, settings, model, samples(96), lambda run, room=room: work(run, room))
        assert all(speeds == found[0] for speeds in found)
        assert [(speed.sizes, speed.ceiling) for speed in found[0]] == [((2, 3, 6), 0), (sizes, ceiling)]
    with pytest.raises(UserError, match="out of memory with a micro-batch of 1 sample"):
        lockstep(4, settings, model, samples(96), lambda run: work(run, 0))


def test_ceiling_of_a_copy_is_that_of_its_fullest_stage() -> None:
    blocks = tuple(Block(f"b{i}", 1.0, 100, 10) for i in range(4))
    rows = [DeviceProfile(blocks, 2, capacity, Needs(1.0, 0.0), "gpu") for capacity in (1000, 2000)]
    plan_ = planned(rows, config(global_batch=16, pipeline=PipelineConfig(2)), Mesh.of([2], 0))
    # Stage 0, two blocks: 2 x 200 bytes of parameters and gradients, 2 in flight of 2 x 5 bytes a sample.
    assert plan_.mesh.copies == ((1, 0),)
    assert copies._ceiling(plan_, 0) == (1000 - 400) // 10
    assert copies._ceiling(None, 0) == 0


def test_limits_and_hosts_are_those_of_copies() -> None:
    mesh = Mesh.of([1, 2], 0)
    assert copies.lowest(mesh, {1: 9, 2: 5}) == [0, 5]
    nodes = {0: "a", 1: "b", 2: "b"}
    run = SimpleNamespace(mesh=mesh, topology=SimpleNamespace(
        host_of=lambda rank: SimpleNamespace(node=nodes[rank]),
        hosts=[SimpleNamespace(node="a"), SimpleNamespace(node="b")]))
    assert copies.hosts(run) == [("a", (0,)), ("b", (1,))]
    nodes[2] = "a"
    assert copies.hosts(run) == []


def test_shares_by_name_are_of_copies_or_refused() -> None:
    mesh, given = Mesh.of([1, 2], 0), config(shares={"a": 2.0, "b": 1.0})
    assert per_rank.of_copies(given, config(shares=[2.0, 1.0, 1.0]), mesh).shares == [2.0, 1.0]
    with pytest.raises(UserError, match="replica 1"):
        per_rank.of_copies(given, config(shares=[2.0, 1.0, 2.0]), mesh)
    assert per_rank.of_copies(config(), config(shares=[2.0, 1.0]), mesh).shares == [2.0, 1.0]


def test_plan_takes_a_least_number_of_micro_batches_of_each() -> None:
    made = plan([FAST, FAST], 40, None, [1, 8])
    assert [part.accumulate for part in made.parts] == [1, 8]
    assert made.samples_P[0] > made.samples_P[1]
    assert BatchShares.of([1, 1], [1, 8]).accumulate_P == (1, 8)


def test_balance_of_copies_is_told_by_copy() -> None:
    settings = config(global_batch=24, max_steps=1, pipeline=PipelineConfig(2), balance="static",
                      rebalance=RebalanceConfig(probe_s=0.01))
    runs = lockstep(4, settings, model, samples(48), fitted)
    record = runs[0].records.latest["balance"].values
    assert record["columns"][0] == "replica" and len(record["rows"]) == 2
    kept = next(c for c in runs[0].callbacks if isinstance(c, Balance)).state_dict()
    assert len(kept["plan"]["lines"]) == 2


def test_a_plan_of_an_earlier_checkpoint_is_of_the_same_world():
    """It names the section of a pipeline by the class' name of then."""
    settings, mesh = config(pipeline=PipelineConfig(2)), SimpleNamespace(copies=((0, 1),))
    run = SimpleNamespace(config=settings, spelled=settings, devices=[], mesh=mesh, control=SimpleNamespace(size=2),
                          topology=SimpleNamespace(describe=lambda: "one host"),
                          parts=SimpleNamespace(layout=SimpleNamespace(starts=((0, 1),))))
    assert _world(run).endswith("((0, 1),), Pipeline(stages=2, order='1f1b', depths=[], micro_batches=0, chunks=2, "
                                "cut=[])]")
