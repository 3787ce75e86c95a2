"""Audits between processes: random layers and statistics do not disturb them, and a wrong device ends all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from audit_faults import MODELS, Fault
from small_runs import FRAMEWORKS, config, fitted, samples

from hvdtrain.engine.assemble import assemble
from hvdtrain.engine.callbacks.audit import Audit
from hvdtrain.engine.callbacks.divergence import Divergence
from hvdtrain.engine.recompute import Miscomputed

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


def convolutions(framework):
    """Return a small network with BatchNorm and dropout."""
    if framework == "torch":
        import torch
        from torch import nn

        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
                             nn.Linear(8 * 36, 5))
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6, 6, 3)), layers.Conv2D(8, 3, padding="same"), layers.BatchNormalization(),
                             layers.ReLU(), layers.Dropout(0.3), layers.Flatten(), layers.Dense(5)])


def images(framework):
    draw = np.random.default_rng(0)
    shape = (3, 6, 6) if framework == "torch" else (6, 6, 3)
    return draw.standard_normal((96, *shape)).astype(np.float32), draw.integers(0, 5, 96)


@pytest.mark.usefixtures("few_ranks")
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "precision": "bf16"}], ids=["fp32", "bf16"])
def test_dropout_and_batchnorm_are_recomputed_alike(framework, settings, control, tmp_path):
    if settings and control.size > 2:
        pytest.skip("types do not depend on the number of ranks: tried on 2")
    out = control.bcast(str(tmp_path / "run"))
    setting = config(global_batch=8 * control.size, max_steps=12, audit=1, check_every=4, out=out, **settings)
    run = fitted(assemble(setting, convolutions(framework), images(framework), control))
    own = next(c for c in run.callbacks if isinstance(c, Audit))
    assert own.audits == 12 and not own._loose and not own._off and set(own.good) == set(range(control.size))
    assert min(own.good.values()) >= 12 - control.size % 2
    assert next(c for c in run.callbacks if isinstance(c, Divergence))._good == 12


@pytest.mark.tensorflow_size(2, 3)
def test_a_wrong_device_ends_every_rank_with_one_verdict(framework, control, tmp_path):
    fault = Fault("activation", 20, 3, 1)
    setting = config(global_batch=8 * control.size, max_steps=20, audit=2, out=control.bcast(str(tmp_path / "run")))
    model = MODELS[framework](fault if control.rank == fault.rank else None)
    run = assemble(setting, model, samples(64), control)
    with pytest.raises(Miscomputed) as found:
        fitted(run)
    assert fault.rank in found.value.ranks and len(found.value.ranks) == (1 if control.size > 2 else 2)
    assert len(set(control.gather(str(found.value)))) == 1
