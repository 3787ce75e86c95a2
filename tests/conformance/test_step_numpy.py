"""The reference step passes the cases that every backend's step must pass."""

import pytest
from step_cases import *  # noqa: F401,F403
from step_kit import Kit, given

from hvdtrain.backends.numpy.model import Model


class NumpyKit(Kit):
    framework = "numpy"
    dtype = "float64"
    lacks = {"Adam": "the reference trains with SGD", "buffers": "the reference has dense layers only",
             "float16": "the reference computes in its own type", "sample weights": "a sample is an input and a class",
             "schedules": "the reference has a constant rate", "refusals": "no user resumes the reference",
             "an optional norm": "the reference has it at hand in each step"}

    def model(self, start=3, hidden=16, noisy=False):
        model = Model((12, hidden, 5))
        model.params = {name: array.astype("float64")
                        for name, array in zip(("w0", "b0", "w1", "b1"), given(start, hidden))}
        return model

    def chain(self):
        return Model((12, 16, 14, 12, 5), 3)

    def plain(self, model):
        return [array.copy() for array in model.params.values()]


@pytest.fixture(name="kit")
def numpy_kit():
    return NumpyKit()
