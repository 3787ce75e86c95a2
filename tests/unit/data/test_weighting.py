"""Law 1 in closed form: one division by the global weight makes every cut of a batch the same."""

import math

import numpy as np
import pytest

from hvdtrain.backends.numpy.model import Model
from hvdtrain.core.errors import UserError
from hvdtrain.data.weighting import loss_scale


@pytest.mark.parametrize("weight, scale", [(1, 1.0), (4, 0.25), (0.5, 2.0), (0, 0.0), (0.0, 0.0), (3, 1 / 3)])
def test_scale(weight, scale):
    assert loss_scale(weight) == scale


@pytest.mark.parametrize("weight", [-1, -1e-9, math.nan, math.inf, -math.inf])
def test_impossible_weights_are_refused(weight):
    with pytest.raises(UserError, match="global weight of a batch"):
        loss_scale(weight)


@pytest.mark.parametrize("cut", [[10], [5, 5], [7, 2, 1], [10, 0], [0, 4, 0, 6], [1] * 10], ids=str)
def test_a_sum_over_any_cut_is_the_mean_over_the_batch(cut):
    model = Model((6, 5, 3))
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((10, 6)), draw.integers(0, 3, 10)
    whole_loss, whole = model.gradient(x, y)
    loss, grads, at = 0.0, {name: np.zeros_like(g) for name, g in whole.items()}, 0
    for n in filter(None, cut):  # a rank without samples computes nothing
        part_loss, part = model.gradient(x[at:at + n], y[at:at + n])
        loss += part_loss * loss_scale(10)
        for name in grads:
            grads[name] += part[name] * loss_scale(10)
        at += n
    assert loss == pytest.approx(whole_loss / 10, rel=1e-12)
    for name in grads:
        np.testing.assert_allclose(grads[name], whole[name] / 10, rtol=1e-10, atol=1e-14)


def test_the_reference_gradient_is_the_slope_of_its_loss():
    model = Model((4, 5, 3))
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((7, 4)), draw.integers(0, 3, 7)
    _, grads = model.gradient(x, y)
    for name, param in model.params.items():
        index = tuple(0 for _ in param.shape)
        before, step = param[index], 1e-6
        param[index] = before + step
        up = model.loss(model.forward(x)[-1], y)[0]
        param[index] = before - step
        down = model.loss(model.forward(x)[-1], y)[0]
        param[index] = before
        assert grads[name][index] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8), name
