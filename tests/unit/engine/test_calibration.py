"""The file of calibrations: kept whole, read strictly, bounded."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.config import Config
from hvdtrain.engine import calibration, calibration_file, step_history
from hvdtrain.engine.step_history import StepRow
from hvdtrain.planning.compressor_choice import CodecCost
from hvdtrain.planning.hardware.rates import Calibration, ZeroUpdate
from hvdtrain.planning.linear import LinearTime, Link

MADE = Calibration("NVIDIA X 40GB", "bf16", 4, 2, LinearTime(1e-3, 2e-4), (8, 16), 3e-3, 0.06, "shared", False,
                   Link(1e-5, 1e-10), Link(2e-5, 1e-9), {"fp16": CodecCost(1e-3, 0.5, 2e-4, (400, 100))},
                   (0.1, 2.0), 5e-4, 0.25, 1e-4, ZeroUpdate(8, 1e-3, 2e-3, True), "", "2026-01-01T00:00:00+00:00")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hvdtrain" / "calibration"


def test_a_calibration_is_read_back_by_device_and_workload(cache):
    calibration_file.keep(MADE, "model")
    calibration_file.keep(replace(MADE, precision="fp32"), "model")
    calibration_file.keep(newer := replace(MADE, update_s=4e-3), "model")  # in place of the first
    assert calibration_file.known(MADE.device, "model") == [replace(MADE, precision="fp32"), newer]
    assert calibration_file.known(MADE.device, "other") == [] == calibration_file.known("another device", "model")
    assert [path.name for path in cache.iterdir()] == ["nvidia-x-40gb.json"]
    for number in range(calibration_file.MOST_ENTRIES):
        calibration_file.keep(MADE, f"model {number}")
    assert len(json.loads((cache / "nvidia-x-40gb.json").read_text())["calibrations"]) == calibration_file.MOST_ENTRIES


def test_a_device_whose_name_gives_the_same_file_is_another(cache):
    calibration_file.keep(replace(MADE, device="升腾"), "model")
    assert calibration_file.known("寒武纪", "model") == [] != calibration_file.known("升腾", "model")


@pytest.mark.parametrize("change", [
    {"line": [0.0, 0.0]}, {"line": [-1.0, 1.0]}, {"line": ["a", 1.0]}, {"sizes": []}, {"error": 2.0}, {"late": 1.5},
    {"within": [1.0]}, {"codecs": 3}, {"codecs": {"fp16": [1e-3, 0.5]}},
    {"accumulate_s": -1.0}, {"zero": [2, 1e-3]}, {"zero": 3}, {"save_s": None}, {"local": "four"},
    {"sizes": [math.inf]}, {"local": math.inf}, {"codecs": {"fp16": [1e-3, 0.5, 0.0, [-400]]}}])
def test_a_damaged_entry_is_left_out(cache, change):
    calibration_file.keep(MADE, "model")
    path = cache / "nvidia-x-40gb.json"
    record = json.loads(path.read_text())
    record["calibrations"][0].update(change)
    path.write_text(json.dumps(record))
    assert calibration_file.known(MADE.device, "model") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99, "calibrations": []}', '{"version": 2}'])
def test_a_damaged_file_is_no_calibration_and_is_replaced(cache, text):
    cache.mkdir(parents=True)
    (cache / "nvidia-x-40gb.json").write_text(text)
    assert calibration_file.known(MADE.device, "model") == []
    calibration_file.keep(MADE, "model")
    assert calibration_file.known(MADE.device, "model") == [MADE]


def test_what_a_run_took_corrects_the_next_plan(cache):
    calibration_file.keep(replace(MADE, history="mine-steps"), "model")
    assert calibration_file.known(MADE.device, "model")[0].line == MADE.line
    step_history.add("mine-steps", StepRow(16, 1, 2 * MADE.line.seconds(16, 1), 5e-3, 0.0, error=-0.11))
    found, = calibration_file.known(MADE.device, "model")
    assert found.line.seconds(16, 1) == pytest.approx(2 * MADE.line.seconds(16, 1))
    assert (found.update_s, found.error) == (5e-3, 0.11)
    step_history.add("mine-steps", StepRow(16, 1, 50 * MADE.line.seconds(16, 1), 5e-3, 0.0))
    found, = calibration_file.known(MADE.device, "model")
    assert found.line.seconds(16, 1) == pytest.approx(calibration_file.MOST_FACTOR * MADE.line.seconds(16, 1))


def test_buckets_that_leave_late_are_measured():
    """Of a step of 18 ms with 12 ms of backward: two equal buckets of four, and when the first one should leave."""
    buckets = [SimpleNamespace(index=i, nbytes=100) for i in range(4)]
    even = {i: 6e-3 + 3e-3 * (i + 1) for i in range(4)}
    for late, micros in ((0.0, 1), (0.5, 1), (1.0, 1), (0.5, 2)):
        begin = 18e-3 * (1 - 1 / micros)
        put_s = {i: begin + (6e-3 + late * 12e-3 + (1 - late) * (s - 6e-3)) / micros for i, s in even.items()}
        assert calibration._late(buckets, put_s, 18e-3, micros) == pytest.approx(late)
    reverse = {i: 18e-3 - 1e-3 * i for i in range(4)}
    assert calibration._late(buckets, reverse, 18e-3, 1) == pytest.approx(1.0)
    assert calibration._late(buckets, {}, 18e-3, 1) == calibration._late(buckets[:1], {0: 0.0}, 18e-3, 1) == 0.0


def test_a_calibration_is_of_the_work_that_was_measured():
    """Other threads, or activation checkpointing, are other work."""
    def key(**settings):
        run = SimpleNamespace(config=Config(**settings), spec=SimpleNamespace(framework="torch", name="m"),
                              parts=SimpleNamespace(params=SimpleNamespace(specs=[])))
        return calibration.key(run, [np.zeros((1, 3), np.float32)])

    keys = [key(), key(remat="every:1"), key(threads=1), key(clip_norm=1.0), key(ema=0.9), key(model_args={"depth": 2})]
    assert len(set(keys)) == len(keys) and key(global_batch=7) == keys[0]
