"""`remat: auto` and `micro_batch: auto` on real models, whose room is put below what they were measured to need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_runs import FRAMEWORKS, apart, bits, config, fitted, solo, weights

from hvdtrain import backends
from hvdtrain.config import Named
from hvdtrain.engine import memory_plan as plan
from hvdtrain.engine import memory_plan as settle
from hvdtrain.engine import memory_survey as survey
from hvdtrain.planning.memory.fit import MemoryRoom

BATCH, WIDTH = 1024, 256


def model(framework: str) -> Any:
    """Six blocks that keep some MiB each of such a batch."""
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1),
                                      torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(6)]
        return torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 5))
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    blocks = [keras.Sequential([layers.Dense(WIDTH, "gelu"), layers.Dropout(0.1), layers.Dense(WIDTH, "gelu")])
              for _ in range(6)]
    return keras.Sequential([keras.Input((WIDTH,)), *blocks, layers.Dense(5)])


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.standard_normal((BATCH, WIDTH)).astype(np.float32), draw.integers(0, 5, BATCH)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_does_not_fit_is_recomputed_or_cut_smaller(framework, tmp_path, monkeypatch):
    settings = config(max_steps=2, global_batch=BATCH, optimizer=Named("SGD"), metrics=[], out=str(tmp_path / "off"))
    run = solo(settings, model(framework), data())
    scene = survey.scene_of(run, backends.load(framework))
    facts = plan.facts_now(scene, survey.way_of(scene, run.dp), True)
    saved = sum(cost.saved_bytes for cost in facts.measured.blocks) * BATCH // facts.measured.block_samples
    assert saved > 12 << 20, "else what the process holds beside hides it"
    want = fitted(run)
    # Relative to what this process needs then: it still holds the runs before.
    monkeypatch.setattr(settle, "MemoryRoom",
                        lambda need, free, *rest: MemoryRoom(need, need(BATCH) - saved // 2, *rest))
    less = fitted(solo(replace(settings, remat="auto", out=str(tmp_path / "auto")), model(framework), data()))
    fit, = less.memory["fit"]
    assert fit["recomputed"] and bits(less) == bits(want), fit
    assert fit["need"] - fit["need_then"] >= 0.3 * saved
    if framework == "tensorflow":
        return  # this process still holds what the runs before have taken, and so shows no rise with the samples
    small = fitted(solo(replace(settings, micro_batch="auto", out=str(tmp_path / "small")), model(framework), data()))
    fit, = small.memory["fit"]
    assert fit["fits"] and 1 < fit["micro_batches"] < 16 and not fit["recomputed"]
    assert apart(weights(small), weights(want)) < 0.05, "other masks of dropout"
