"""Keras 3 on PyTorch: three children train the same models, one process, two ranks, and one process on TensorFlow.

Keras' backend is fixed when it is imported, and this process may have it on TensorFlow.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from runner import mpirun, run

CASES = str(Path(__file__).with_name("keras_cases.py"))
CURVES = ("momentum", "adamw", "uncompiled", "outputs", "callbacks")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def child(where, ranks, backend, *cases):
    """Return the facts of the cases, by name."""
    argv, env = [CASES, str(where), *cases], {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = mpirun(ranks, argv, 100, env) if ranks > 1 else run([sys.executable, *argv], 100, env)
    assert job.returncode == 0, job.text
    return {case: json.loads((where / f"{case}.json").read_text()) for case in cases}


def need(*packages):
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    need("torch", "keras")
    return child(tmp_path_factory.mktemp("alone"), 1, "torch", *CURVES, "frozen", "lora", "rates", "gpt", "resumed",
                 "seeded", "callbacks_resumed", "lazy", "mistakes", "modules", "exported")


@pytest.fixture(scope="module")
def on_tensorflow(tmp_path_factory):
    need("tensorflow")
    return child(tmp_path_factory.mktemp("tensorflow"), 1, "tensorflow", *CURVES, "modules", "lora")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    need("torch", "keras")
    return child(tmp_path_factory.mktemp("pair"), 2, "torch", "momentum", "adamw", "uneven", "statistics", "modules",
                 "written", "lora")


def close(one, other):
    """Curves, metrics and weights equal to 1e-5."""
    assert len(one["curve"]) == one["steps"] == 20 and np.mean(one["curve"][-5:]) < one["curve"][0]
    np.testing.assert_allclose(other["curve"], one["curve"], rtol=1e-5)
    assert one["metrics"].keys() == other["metrics"].keys()
    for name, value in one["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=1e-5), name
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["momentum", "adamw"])
def test_two_ranks_follow_the_curve_of_one(case, alone, pair):
    """Law 2, with the compiled optimizer, its schedule, sample weights, accumulation and clipping."""
    assert pair[case]["alike"]
    close(alone[case], pair[case])


def test_the_curve_is_tensorflows(alone, on_tensorflow):
    """The same weights and data on Keras' other backend: 1e-5 over 20 steps."""
    found = on_tensorflow
    assert found["modules"]["imported"] == ["keras", "tensorflow"]
    for case in CURVES:
        close(alone[case], found[case])
    mine, theirs = alone["callbacks"]["seen"], found["callbacks"]["seen"]
    assert len(mine) == len(theirs) == 4
    for one, other in zip(mine, theirs):
        assert dict(map(tuple, other)) == pytest.approx(dict(map(tuple, one)), rel=1e-5)


def test_lora_of_keras_trains_adapters_alone_on_either_backend(alone, pair, on_tensorflow):
    for facts in (alone["lora"], pair["lora"], on_tensorflow["lora"]):
        assert facts["kept"] and facts["alike"]
        assert sorted(facts["trained"]) == ["bias", "bias", "kernel", "lora_kernel_a", "lora_kernel_b"]
    for mine, theirs in zip(alone["lora"]["weights"], pair["lora"]["weights"], strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-5)


def test_unequal_shares_and_compressed_gradients(alone, pair):
    """Near the curve of one rank, and not on it: the roundings to 8 bits add up over the steps."""
    facts, exact = pair["uneven"], alone["momentum"]
    assert facts["alike"] and facts["weights"] != pair["momentum"]["weights"]
    np.testing.assert_allclose(facts["curve"][:10], exact["curve"][:10], rtol=0.03)


def test_what_each_rank_counts_and_draws_on_its_own(pair):
    """BatchNorm's statistics are averaged before they are used; dropout's masks differ, and both are told."""
    facts = pair["statistics"]
    assert facts["alike"]
    assert facts["seeds"] == [[4, 20], [4 + 1_000_003, 20]]
    assert len(facts["caveats"]) == 2
    assert "BatchNorm" in facts["caveats"][0] and "dropout" in facts["caveats"][1]


def test_tensorflow_stays_out(alone, pair):
    """Law 3, though Keras asks for TensorFlow wherever it describes a model or copies a loss."""
    assert alone["modules"]["imported"] == pair["modules"]["imported"] == ["keras", "torch"]


def test_a_resumed_run_goes_on_bit_by_bit(alone):
    facts = alone["resumed"]
    whole, rest = facts["whole"], facts["rest"]
    assert rest["curve"] == whole["curve"][10:] and rest["weights"] == whole["weights"]
    assert rest["metrics"] == whole["metrics"]


def test_names_are_the_same_in_every_process(alone):
    """Keras counted the models that this process built before."""
    facts = alone["resumed"]
    assert facts["names"] == [f"sequential/{layer}/{name}" for layer, name in (
        ("dense", "kernel"), ("dense", "bias"), ("batch_normalization", "gamma"), ("batch_normalization", "beta"),
        ("dense_1", "kernel"), ("dense_1", "bias"))]
    assert facts["buffers"] == [f"sequential/batch_normalization/moving_{what}" for what in ("mean", "variance")]
    assert facts["state"] == sorted([*(f"{n}/{slot}" for n in facts["names"] for slot in ("momentum", "velocity")),
                                     "sequential/dense/kernel/iteration"])


def test_what_is_written_is_keras_own(alone):
    facts = alone["exported"]
    assert facts["files"] == ["model.keras", "model.safetensors", "weights.json"]
    np.testing.assert_array_equal(*facts["outputs"])


def test_callbacks_act_once_over_a_resume_and_restore_what_was_measured(alone):
    facts = alone["callbacks_resumed"]
    assert facts["rest"]["weights"] == facts["whole"]["weights"]
    assert facts["rest"]["metrics"] == facts["whole"]["metrics"] and facts["at"] == 5  # the first epoch's last step
    assert facts["loss"] == pytest.approx(facts["whole"]["metrics"]["loss"], rel=1e-5)


def test_frozen_layers_stay(alone):
    facts = alone["frozen"]
    assert facts["moved"] == [False, False, True, True, True, True, True, True]
    assert not any("sequential/dense/" in name for name in facts["params"]) and len(facts["params"]) == 4


def test_the_owner_of_an_optimizer_sets_its_rate(alone):
    """0.1 x 10/5 for two of four steps of warm-up, then the owner's 0.01 for it; his own number is only read."""
    assert alone["rates"]["rates"] == pytest.approx([0.2 * 3 / 4, 0.02 * 3 / 4], rel=1e-6)
    assert alone["rates"]["own"] == pytest.approx(0.01)


def test_a_model_files_task_and_bfloat16(alone):
    assert alone["gpt"]["gpt"][0] == pytest.approx(np.log(16), rel=0.1)
    fp32, bf16 = alone["uncompiled"]["curve"][0], alone["gpt"]["bf16"][0]
    assert all(np.isfinite(alone["gpt"]["bf16"])) and 0 < bf16 and fp32 != bf16


def test_weights_come_from_the_seed(alone):
    first, again, other = alone["seeded"]
    assert first == again and first != other


def test_a_model_without_an_input_shape_is_built_from_the_data(alone):
    facts = alone["lazy"]
    assert facts["shapes"] == [[8, 9], [9], [9], [9], [9], [9], [9, 4], [4]] and len(facts["with"][0]) == 6
    assert facts["with"] == facts["without"]


@pytest.mark.parametrize("case, words", [
    ("batchnorm", "use GroupNormalization"), ("scaled", "the optimizer scales the loss"),
    ("accumulating", "set accumulate in the configuration"), ("schedules", "has a schedule of its own"),
    ("function", "the compiled optimizer's rate is a function"), ("misfit", "expected x float32[B, 64]"),
    ("width", "targets run from 0 to 3; expected 0..2"),
    ("optimizer", "resume with the model and optimizer of that run"), ("loss", "'no_such' is not in keras.losses"),
    ("device", "Keras keeps its tensors on cpu and this rank computes on meta")])
def test_what_is_refused_is_said(case, words, alone):
    assert words.lower() in alone["mistakes"][case].lower()


def test_variables_that_layers_write_to_are_one_on_all_ranks(pair):
    found = pair["written"]
    assert found["alike"] and found["count"] == 200
    notes = [note for note in found["notes"] if "not independent" in note]
    assert sum("last, and every rank takes rank 0's" in note for note in notes) == 1
    assert sum("count: sum" in note for note in notes) == 1 and not any("moving" in note for note in notes)
