"""Plan of a model partitioned over ranks beside its measurements, and ranks made slow."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import CLASSES, FEATURES, config, fitted, lockstep, samples

from hvdtrain.backends.numpy.model import Model
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import PipelineConfig
from hvdtrain.core.mesh import Mesh
from hvdtrain.engine.build_model import Slowed
from hvdtrain.engine.callbacks.stages import StageMeter, StageSeconds, StageTimes
from hvdtrain.parallel.pipeline.messages import measure_links
from hvdtrain.parallel.pipeline.partition import planned
from hvdtrain.planning.linear import Link
from hvdtrain.planning.pipeline.blocks import Block, DeviceProfile, Needs


def test_idle_is_what_is_neither_computing_nor_exchange() -> None:
    seen = StageTimes((StageSeconds(10.0, 6.0, 2.0, 1.0), StageSeconds(10.0, 4.0, 1.0, 4.0)), 5)
    assert seen.wire_s == 1.0
    assert seen.passes_s == 8.0
    assert seen.idle_share == pytest.approx((2 + 1 + 3) / (2 + 1 + 3 + 10))
    assert StageTimes((StageSeconds(0.0, 0.0, 0.0, 0.0),), 1).idle_share == 0.0


def test_run_records_what_was_planned_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(max_steps=6, global_batch=24, pipeline=PipelineConfig(2), emulate_speed=[0.5, 1.0],
                      progress="plain")
    runs = lockstep(2, settings, lambda rank: Model((FEATURES, 30, 30, 30, CLASSES), 0), samples(48), fitted)
    root = runs[0]
    stages = next(c for c in root.callbacks if isinstance(c, StageMeter))
    assert stages.seen is not None and stages.seen.steps == 4
    record = root.records.latest["pipeline"].values
    assert record["stage"] == "measured" and record["steps"] == 4
    assert [(row["stage"], row["rank"]) for row in record["stages"]] == list(enumerate(root.mesh.copies[0]))
    assert record["idle_share"] == stages.seen.idle_share
    shown = capsys.readouterr().out
    assert "predicted" in shown and "ms measured" in shown


def test_slow_rank_gets_fewer_blocks() -> None:
    settings = config(max_steps=1, global_batch=24, pipeline=PipelineConfig(2), emulate_speed=[0.25, 1.0])
    model = lambda rank: Model((FEATURES, *[20] * 9, CLASSES), 0)  # noqa: E731
    runs = lockstep(2, settings, model, samples(48), lambda run: run)
    assert len(runs[0].parts.layout.blocks) < len(runs[1].parts.layout.blocks) / 2


@pytest.mark.parametrize("name", ["forward", "loss", "backward"])
def test_stages_of_a_slow_rank_are_stretched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = iter([0.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    monkeypatch.setattr("time.sleep", slept.append)

    class Stage:
        def __getattr__(self, asked: str) -> Any:
            return lambda *args: (asked, len(args))

    arguments = {"forward": 4, "loss": 5, "backward": 3}[name]
    assert getattr(Slowed(Stage(), 0.25), name)(*range(arguments)) == (name, arguments)  # type: ignore[arg-type]
    assert slept == [9.0]


def test_links_are_those_of_the_slowest_neighbours_of_copies_alike() -> None:
    """Two copies within a host, and one over two."""
    mesh, hosts = [2, 2, 3], ["a", "a", "a", "a", "b", "b", "c"]

    def work(control: Any, wire: Any) -> list[Link]:
        return measure_links(control, Mesh.of(mesh, control.rank), 1000, hosts)

    found = LockstepWorld(7).run(work, timeout_s=30.0)
    assert all(rows == found[0] for rows in found)
    assert found[0][0] == found[0][1]
    assert all(row.alpha_s > 0 and row.beta_s_per_byte >= 0 for row in found[0])
    alone = LockstepWorld(1).run(lambda control, wire: measure_links(control, Mesh.of([1], 0), 10, ["a"]), timeout_s=9)
    assert alone == [[Link(0.0, 0.0)]]


def test_messages_make_the_predicted_step_longer() -> None:
    rows = [DeviceProfile(tuple(Block(f"b{i}", 1.0, 0, 0, 0.0, 100) for i in range(4)), 1, 0, Needs(), "cpu")] * 2
    settings = config(global_batch=8, pipeline=PipelineConfig(2))
    quick = planned(rows, settings, Mesh.of([2], 0))
    slow = planned(rows, settings, Mesh.of([2], 0), (), [Link(0.5, 0.01)])
    assert slow.step_s >= quick.step_s + 2 * 1.5
    assert slow.idle_share > quick.idle_share
