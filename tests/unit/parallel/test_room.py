"""Shards of the state by free memory, devices and hosts, alike and different."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import bits, config, fitted, lockstep, make_model, samples

from hvdtrain.config import DataParallelConfig, Named
from hvdtrain.engine import summary
from hvdtrain.parallel.data_parallel import attach as room
from hvdtrain.planning import shards

GIB = 1 << 30
SETTINGS = config(global_batch=24, max_steps=3, optimizer=Named("SGD", {"momentum": 0.9}))


def test_ranks_of_a_host_share_what_it_has_and_devices_keep_their_own():
    hosts = [[0, 1, 2], [3]]
    found = [(False, 30 * GIB), (False, 29 * GIB), (True, 70 * GIB), (False, 5 * GIB)]
    assert room.divided(found, hosts) == [15 * GIB, 15 * GIB, 70 * GIB, 5 * GIB]


def test_a_control_group_of_a_rank_s_own_holds():
    assert room.divided([(False, 30), (False, 4)], [[0, 1]]) == [15, 4]


def test_what_is_not_known_is_no_room():
    assert room.divided([(False, None), (True, 0), (False, 8)], [[0, 1], [2]]) == [0, 0, 8]


def trained(settings, out, size=3):
    return lockstep(size, replace(settings, out=str(out)), lambda rank: make_model("numpy"), samples(96), fitted)


@pytest.mark.parametrize("rooms", [[3 * GIB, GIB, 4 * GIB], [10 * GIB, GIB, GIB], [GIB] * 3])
def test_a_run_divides_its_state_by_made_up_rooms_and_says_so(monkeypatch, tmp_path, rooms):
    want = bits(trained(SETTINGS, tmp_path / "whole")[0])
    monkeypatch.setattr(room, "divided", lambda found, hosts: rooms)
    runs = trained(replace(SETTINGS, data_parallel=DataParallelConfig("zero", 2)), tmp_path / "zero")
    assert {bits(run) for run in runs} == {want}
    held = [sum(array.size for _, _, array in run.parts.optimizer.slots()) for run in runs]
    for own, part in zip(held, shards.by_room(rooms)):
        assert own == pytest.approx(part * sum(held), abs=16 * len(runs[0].dp.buckets))
    alike = "equally " if len(set(rooms)) == 1 else ""
    told = f"{alike}by free memory: {', '.join(f'{r / GIB:.3g}' for r in rooms)} GiB"
    assert sum("ranks own" in note and told in note for note in runs[0].notes) == 1


def test_parts_are_alike_where_the_free_memory_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setattr(room.memory, "host_room_bytes", lambda local_size: None)
    runs = trained(replace(SETTINGS, data_parallel=DataParallelConfig("zero", 1)), tmp_path / "zero", 2)
    assert any("equally: free memory is not known" in note for note in runs[0].notes)


def test_the_summary_tells_the_stage_and_how_long_parameters_took(tmp_path):
    given = replace(SETTINGS, data_parallel=DataParallelConfig("zero", 1, [1, 2]))
    run = trained(given, tmp_path / "zero", 2)[0]
    assert summary.record(run)["zero"]["stage"] == 1 and summary.record(run)["zero"]["gather_ms"] > 0
    assert any(name == "zero" and "parameters gathered in" in text for name, text in summary.rows(run))
    assert any("as data_parallel.shards says" in note for note in run.notes)
    assert summary.record(trained(SETTINGS, tmp_path / "whole", 2)[0])["zero"] is None
