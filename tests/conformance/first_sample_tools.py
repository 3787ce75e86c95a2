"""Models of both frameworks for tests of the first sample."""

from __future__ import annotations

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, config, samples, solo

X, Y = samples(30)


def need(framework):
    if framework == "torch":
        return pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    return pytest.importorskip("keras", reason="Keras is not installed")


def calling(framework, call, lazily=False):
    """Return a model with a layer ``self.layer`` whose forward is ``call(self, x)``."""
    if framework == "torch":
        torch = need("torch")

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(FEATURES, CLASSES)

            def forward(self, x):
                return call(self, x)
        return Model()
    keras = need("tensorflow")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(CLASSES)

        def call(self, x):
            return call(self, x)

    model = Model()
    if not lazily:
        model.layer.build((None, FEATURES))
        model.built = True
    return model


def alone(model, data, **changes):
    return solo(config(**{"global_batch": 10, "max_steps": 3, **changes}), model, data)


class Chunks:
    """A stream that draws, and counts how often it is opened."""

    def __init__(self):
        self.opened = 0

    def chunks(self, epoch):
        self.opened += 1
        for i in range(0, 30, 6):
            yield X[i:i + 6] + np.float32(np.random.standard_normal()), Y[i:i + 6]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
