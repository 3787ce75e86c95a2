"""Type that each rank computes in, and moves of the loss scale."""

from __future__ import annotations

import json

import pytest

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.core.errors import UserError
from hvdtrain.parallel.precision import FP32, MOST, LossScale, Precision, on, remarks, resolve, words

A100 = DeviceFacts("cuda", "NVIDIA A100", "sm_80")
V100 = DeviceFacts("cuda", "Tesla V100", "sm_70")
T4 = DeviceFacts("cuda", "Tesla T4", "sm_75")
RTX = DeviceFacts("cuda", "NVIDIA GeForce RTX 3090", "sm_86")
P100 = DeviceFacts("cuda", "Tesla P100", "sm_60")
MI100 = DeviceFacts("rocm", "AMD Instinct MI100", "gfx908")
CPU = DeviceFacts("cpu", "Some CPU", "x86_64")


@pytest.mark.parametrize("precision, devices, names", [
    ("auto", [A100, RTX, V100, T4, P100, MI100, CPU], ["bf16", "bf16", "fp16", "fp16", "fp32", "fp16", "fp32"]),
    ("auto", [CPU, CPU], ["fp32", "fp32"]),
    ("fp32", [A100, CPU], ["fp32", "fp32"]),
    ("fp16", [V100, CPU, CPU], ["fp16", "fp16", "fp16"]),
    ("bf16:fp32", [A100, CPU], ["bf16", "fp32"]),
    ("fp16:fp16:fp32", [CPU, CPU, CPU], ["fp16", "fp16", "fp32"]),
])
def test_types_by_rank(precision, devices, names):
    assert resolve(precision, devices) == names


@pytest.mark.parametrize("precision, ranks", [("bf16:fp32", 3), ("bf16:fp32:fp16", 2), ("fp16:fp16", 1)])
def test_a_list_of_another_length_is_refused(precision, ranks):
    with pytest.raises(UserError, match=f"names {precision.count(':') + 1} types for {ranks} ranks; expected one for "
                                        "each rank"):
        resolve(precision, [CPU] * ranks)


def test_words():
    assert words(["bf16", "bf16"]) == "bf16"
    assert words(["bf16", "fp32"]) == "bf16 on rank 0, fp32 on rank 1"
    assert words(["bf16", "fp16", "bf16", "fp16", "fp16", "fp16"]) == "bf16 on ranks 0, 2, fp16 on ranks 1, 3-5"
    assert on([0]) == "rank 0" and on([0, 1]) == "ranks 0, 1" and on([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert FP32.describe() == {} and Precision(("fp32", "fp32"), 1).describe() == {}
    assert not FP32.caveats() and Precision(("bf16",)).caveats() == ["computing in bf16 rounds depending on the "
                                                                     "micro-batches"]
    assert Precision(("fp16", "fp32"), 1).describe() == {"compute": "fp16 on rank 0, fp32 on rank 1"}


def test_what_a_device_does_not_do_well_is_said():
    assert remarks(resolve("auto", [A100, V100, CPU]), [A100, V100, CPU]) == []
    told = remarks(["bf16", "bf16", "bf16", "fp16", "fp32"], [A100, V100, V100, CPU, CPU])
    assert [text.split(",")[0] for text in told] == ["ranks 1", "rank 3: fp16 on x86_64"]
    assert "bf16 on Tesla V100" in told[0]


def test_own_and_scaled():
    precision = Precision(("fp16", "fp32", "fp16"), 1)
    assert precision.own == "fp32" and precision.scaled == {0, 2} and not FP32.scaled


def test_an_overflow_halves_and_clean_steps_double():
    scale = LossScale(1024.0, {1}, growth_interval=3)
    assert (scale.of(0), scale.of(1)) == (1.0, 1024.0)
    assert scale.update([1]) and scale.value == 512 and scale.skipped == 1
    assert not any(scale.update([]) for _ in range(2)) and scale.value == 512
    assert scale.update([0, 1]) and scale.value == 256, "clean steps count anew from here"
    assert not any(scale.update([]) for _ in range(3)) and scale.value == 512
    assert not any(scale.update([]) for _ in range(3)) and scale.value == 1024 and scale.skipped == 2


def test_what_a_smaller_scale_would_not_mend_is_no_overflow():
    scale = LossScale(4.0, {1, 2})
    assert not scale.update([0]) and not scale.update([0, 3]) and scale.value == 4
    assert scale.update([1]) and scale.update([0, 2]) and scale.value == 1
    assert not scale.update([1]) and scale.value == 1 and scale.skipped == 2


def test_growth_ends():
    scale = LossScale(MOST / 2, {0}, growth_interval=1)
    for _ in range(4):
        scale.update([])
    assert scale.value == MOST


def test_without_a_rank_that_scales_nothing_moves():
    scale = LossScale(1024.0, (), growth_interval=1)
    assert not scale.on and not scale.update([]) and not scale.update([0]) and scale.value == 1024 and scale.of(0) == 1
    assert scale.state() == {} and scale.describe() == {}
    scale.load({"loss_scale": [2.0, 1, 1]})
    assert scale.value == 1024


def test_state_goes_through_json():
    scale, other = LossScale(1024.0, {0}, growth_interval=3), LossScale(8.0, {0}, growth_interval=3)
    for bad in ([], [0], [], []):
        scale.update(bad)
    other.load(json.loads(json.dumps({"optimizer": "SGD", **scale.state()})))
    assert other.state() == scale.state() and other.value == 512
    assert other.describe() == {"loss scale": "512, 1 step skipped (overflow)"}
    scale.update([]), other.update([])
    assert other.value == scale.value == 1024, "the count of clean steps came along"
    other.load({"optimizer": "SGD"})  # of a job in which no rank scaled
    assert other.value == 1024
