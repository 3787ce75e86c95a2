"""Tools of the tests of the TensorFlow step: a small model, batches, and a step over a reducer with several buckets.

Imports TensorFlow: a test asks for it first (pytest.importorskip).
"""

from __future__ import annotations

import keras
import numpy as np
from one_step import SGD, OneStep, X, Y, batch, cut, run, spec  # noqa: F401


def mlp(seed=3, extra=(), **last):
    """Return a small perceptron on (B, 12) with 5 outputs, the same for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="tanh"), *extra,
                             keras.layers.Dense(5, **last)])


def attached(model, *given, **more):
    """Return a step over ``model``; see `OneStep`."""
    return OneStep("tensorflow", model, *given, **more)


def weights(step_or_model):
    model = getattr(step_or_model, "model", step_or_model)
    return [v.value.numpy() for v in model.weights]


def close(got, want, rtol):
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())
