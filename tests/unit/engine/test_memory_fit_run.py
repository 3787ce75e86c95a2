"""`micro_batch: auto` and `remat: auto` in whole runs of the numpy backend, ranks as threads.

Bytes of passes and blocks, and the ranks' room, are made up; measuring, deciding, cutting and training are real.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_runs import apart, bits, config, lockstep, make_model, samples, weights

from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.core.protocols import BlockCost
from hvdtrain.engine import loop
from hvdtrain.engine import memory_plan as settle
from hvdtrain.engine import memory_survey as survey
from hvdtrain.engine.callbacks import balance
from hvdtrain.planning.linear import LinearTime as Seconds
from hvdtrain.planning.linear import Speed
from hvdtrain.planning.memory.forecast import MeasuredMemory, MemoryLine

PER_SAMPLE, DATA = 1 << 20, samples(96)
"""Bytes that a pass takes for each sample: so many that the tiny model's own do not count."""

SETTINGS = config(max_steps=5, global_batch=24, optimizer=Named("SGD", {"momentum": 0.5}), on_oom="stop")


class FakeRemat:
    """Blocks that hold equal parts of a pass but for one that cannot be recomputed and one that only costs."""

    collective = False
    names = ("embed", "a", "b", "broken", "c", "head")

    def __init__(self, forward_s: float = 1e-3) -> None:
        self.chosen: tuple[str, ...] = ()
        self.forward_s, self.seen = forward_s, []

    def refusal(self, name: str) -> str:
        return "it draws from a generator that nobody can put back" if name == "broken" else ""

    def choose(self, names: Any) -> None:
        assert not any(self.refusal(name) for name in names)
        self.chosen = tuple(names)

    def costs(self, batch: Any) -> list[BlockCost]:
        n = len(batch[0])
        self.seen.append(n)
        saves = {"embed": -1, "a": 3, "b": 3, "c": 3, "head": 1}
        return [BlockCost(name, n * PER_SAMPLE * part // 10, n * self.forward_s) for name, part in saves.items()]

    def install(self, model: Any, blocks: Any) -> None:
        pass

    def remove(self, model: Any) -> None:
        pass

    def describe(self) -> dict[str, str]:
        return {}

    def caveats(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def fitting(monkeypatch, tmp_path):
    """``run(settings, rooms_in_samples, ...)``: what each of that many ranks did, whose room is so many samples'."""
    def measure(scene: Any, model: Any, way: Any, with_blocks: bool = False) -> MeasuredMemory:
        n = min(4, scene.feed.global_batch)
        scene.parts.stage.trial(scene.sample(n))
        blocks = tuple(scene.parts.remat.costs(scene.sample(n))) if with_blocks else ()
        return MeasuredMemory(MemoryLine(np.zeros(1), np.full(1, PER_SAMPLE), ()), True, blocks=blocks, block_samples=n)

    monkeypatch.setattr(survey, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fit(settings: Any, rooms: list[float], data: Any = DATA, remats: Any = None, work: Any = None,
            holds: int = 99) -> list[Any]:
        monkeypatch.setattr(survey, "free_bytes", lambda scene:  # fragmentation takes 6 % of a pass
                            int(1.06 * PER_SAMPLE * (rooms[scene.control.rank] + 0.5)))

        def rank(run: Any) -> Any:
            if remats is not None:
                run.parts.remat = remats[run.control.rank]
            sizes: list[int] = []
            own = run.parts.stage.run

            def counted(micro: Any, *rest: Any) -> Any:
                if run.control.rank == 0 and len(micro[0]) > holds:
                    raise MemoryError
                sizes.append(len(micro[0]))
                return own(micro, *rest)

            run.parts.stage.run = counted
            loop.fit(run)
            return (work(run) if work else weights(run)), sizes, run

        return lockstep(len(rooms), settings, lambda r: make_model("numpy"), data, rank)
    return fit


def test_each_rank_takes_the_largest_micro_batch_that_it_has_room_for(fitting, tmp_path):
    auto = replace(SETTINGS, micro_batch="auto", out=str(tmp_path / "auto"))
    found = fitting(auto, [100, 5, 1])
    assert [sizes[:2] for _, sizes, _ in found] == [[8, 8], [4, 4], [1, 1]]
    want = fitting(replace(SETTINGS, out=str(tmp_path / "whole")), [100] * 3)[0][0]
    assert all(apart(got, want) < 1e-12 for got, _, _ in found)
    fit = found[0][2].memory["fit"]
    assert [row["micro_batches"] for row in fit] == [1, 2, 8] and [row["fits"] for row in fit] == [True] * 3
    assert any("rank 1: 2 micro-batches of 4" in note for note in found[0][2].notes)


def test_a_rank_with_room_recomputes_nothing_and_results_are_the_same_bits(fitting, tmp_path):
    remats = [FakeRemat(), FakeRemat(2e-3), FakeRemat()]
    auto = replace(SETTINGS, remat="auto", out=str(tmp_path / "auto"))
    found = fitting(auto, [100, 6, 2], remats=remats)
    assert remats[0].chosen == () and len(remats[1].chosen) == 1 and len(remats[2].chosen) == 3
    assert not {"broken", "embed"} & {name for remat in remats for name in remat.chosen}
    assert [set(sizes) for _, sizes, _ in found] == [{8}] * 3, "the micro-batch that is configured stays"
    want = fitting(replace(SETTINGS, out=str(tmp_path / "off")), [100] * 3)
    assert {bits(run) for _, _, run in found} == {bits(run) for _, _, run in want}
    notes = found[0][2].notes
    assert any("rank 0: no activation checkpointing" in note for note in notes)
    assert any("rank 2: recomputes 3 of 5 blocks (a, b, c)" in note for note in notes)


def test_where_no_blocks_suffice_it_is_said_and_the_nearest_are_taken(fitting, tmp_path):
    remat = FakeRemat()
    (_, _, run), = fitting(replace(SETTINGS, remat="auto", out=str(tmp_path)), [0], remats=[remat])
    assert set(remat.chosen) >= {"a", "b"} and not run.memory["fit"][0]["fits"]
    assert any("does not fit" in note for note in run.notes)


def test_both_together_take_small_micro_batches_before_they_recompute(fitting, tmp_path, monkeypatch):
    monkeypatch.setattr(settle.Settling, "_line", lambda self: settle.LinearTime(0.0, 1e-3))
    remats = [FakeRemat(), FakeRemat()]
    both = replace(SETTINGS, remat="auto", micro_batch="auto", out=str(tmp_path))
    found = fitting(both, [6, 0], remats=remats)
    assert remats[0].chosen == () and found[0][1][0] == 6
    assert len(remats[1].chosen) > 0 and found[1][1][0] == 1, "half a sample's room"


def test_synchronised_statistics_have_as_many_micro_batches_on_all_ranks(fitting, tmp_path):
    def even(run: Any) -> list[int]:
        return [len(micro[0]) for micro in next(run.feed.epoch(run.state.cursor)).micros]

    settings = replace(SETTINGS, micro_batch="auto", sync_batchnorm=True, shares=[2, 1, 0], out=str(tmp_path))
    found = fitting(settings, [6, 100, 100], work=even)
    assert [sizes for sizes, _, _ in found] == [[6, 6, 4], [3, 3, 2], [0, 0, 0]] or \
        [len(sizes) for sizes, _, _ in found] == [3, 3, 3]


def test_samples_of_a_stream_that_were_tried_are_trained_on_too(fitting, tmp_path):
    opened = []

    class Once:
        def chunks(self, epoch: int) -> Any:
            opened.append(epoch)
            return iter([DATA])

    settings = replace(SETTINGS, micro_batch="auto", max_steps=4, out=str(tmp_path / "stream"))
    (got, sizes, _), = fitting(settings, [5], data=Once())
    (want, _, _), = fitting(replace(settings, micro_batch=0, data=replace(SETTINGS.data, shuffle=False),
                                    out=str(tmp_path / "arrays")), [100])
    assert sizes[0] <= 5 and opened == [0] and apart(got, want) < 1e-12


def test_a_resumed_run_goes_on_with_its_micro_batches_while_they_fit(fitting, tmp_path):
    auto = replace(SETTINGS, micro_batch="auto", out=str(tmp_path), checkpoint=CheckpointConfig(at_end=True))
    assert [sizes[0] for _, sizes, _ in fitting(auto, [4, 100])] == [4, 12]
    more = replace(auto, resume="auto", max_steps=7)
    assert [set(sizes) for _, sizes, _ in fitting(more, [100, 100])] == [{4}, {12}]
    again = replace(auto, resume="auto", max_steps=9)
    assert [sizes[0] for _, sizes, _ in fitting(again, [2, 100])] == [2, 12]


def test_a_model_without_blocks_is_told(fitting, tmp_path):
    (_, _, run), = fitting(replace(SETTINGS, remat="auto", out=str(tmp_path)), [1])
    assert any("no named blocks" in note for note in run.notes)


def test_a_size_that_ran_out_is_not_tried_by_the_next_run(fitting, tmp_path):
    """The plan was wrong: the first rank holds 3 samples, whatever was estimated."""
    auto = replace(SETTINGS, micro_batch="auto", on_oom="shrink", out=str(tmp_path / "first"))
    found = fitting(auto, [100, 100], holds=3)
    assert found[0][1][0] == 3 and found[1][1][0] == 12, "12 and 6 ran out"
    assert found[0][2].recovery.ceilings == {0: 3}
    again = fitting(replace(auto, out=str(tmp_path / "again")), [100, 100], holds=3)
    assert [set(sizes) for _, sizes, _ in again] == [{3}, {12}] and not again[0][2].recovery.ceilings
    assert apart(again[0][0], found[0][0]) < 1e-12
    other = replace(auto, optimizer=Named("SGD"), out=str(tmp_path / "other"))
    assert fitting(other, [100, 100])[0][1][0] == 12, "it holds other state"


def test_balance_plans_with_the_ceiling_of_a_rank_that_ran_out(fitting, tmp_path, monkeypatch):
    line = Seconds(0.001, 0.001)
    monkeypatch.setattr(balance, "probe", lambda run, backend: [Speed(line, 0, (8,), (1.0,))] * 2)
    settings = replace(SETTINGS, balance="static", on_oom="shrink", out=str(tmp_path / "run"))
    found = fitting(settings, [100, 100], holds=3, work=lambda run: run.feed.cut_at(run.state.cursor.step))
    assert found[0][0].micro_batch_P == (3, 12) and found[0][0].shares_P == (12, 12), "its share stays"
    assert any("rank 0 holds 3 samples in a micro-batch" in note for note in found[1][2].notes)
