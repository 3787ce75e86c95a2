"""Base class of a backend's half of `step_cases`, and the references that the cases compare with.

A backend's test file gives its `Kit`. What a training loop gives is worked out here, in float64, by numpy alone.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
from one_step import SGD, OneStep, batch

from hvdtrain.backends.numpy.model import Model
from hvdtrain.comm.compressors.base import Uncompressed
from hvdtrain.config import Config, ScheduleConfig
from hvdtrain.core.protocols import AllReduce

EPSILON = 1e-4
"""Adam's: so large that a gradient's rounding error stays one."""
COUNTER = re.compile(r"_\d+(?=[/_]|$)")


class Kit:
    """A backend's half of the cases: ``framework``, a model, and ``lacks``: reasons by unsupported feature.

    Names in ``lacks``: "Adam", "buffers" (and dropout), "float16", "sample weights", "schedules", "refusals" (of a
    checkpoint that does not fit), "an optional norm" (NaN where nobody asks for it), "pipelines" (over ranks).
    """

    framework = ""
    lacks: dict[str, str] = {}
    dtype = "float32"
    epsilon = "epsilon"
    adam = "adam"
    """Which of `by_hand`'s."""
    halving = ScheduleConfig()
    """Half the rate after each step."""

    def model(self, start: int = 3, hidden: int = 16, noisy: bool = False) -> Any:
        """12 -> ``hidden`` ReLU -> 5 with the weights `given` (start); ``noisy``: BatchNorm and dropout between."""
        raise NotImplementedError

    def chain(self) -> Any:
        """Return a model of four dense blocks, 12 -> 16 -> 14 -> 12 -> 5, the same whenever it is made."""
        raise NotImplementedError

    def plain(self, model: Any) -> list[np.ndarray]:
        """Return the model's weights as `given` has them."""
        raise NotImplementedError

    def statistics(self, model: Any) -> list[np.ndarray]:
        """Return the averages that its BatchNorm keeps."""
        raise NotImplementedError

    def step(self, model: Any = None, config: Config = SGD, *args: Any, **more: Any) -> OneStep:
        """Return a step over ``model`` or one of its own; see `OneStep`."""
        return OneStep(self.framework, self.model() if model is None else model, config, *args, **more)

    def noisy(self, start: int = 3) -> Any:
        """Return the most that a model of this backend has to be put back."""
        return self.model(start, noisy="buffers" not in self.lacks)


def needs(what):
    """Leave a case out for a kit that lacks ``what``."""
    def around(case):
        @functools.wraps(case)
        def checked(kit, *args, **kwargs):
            if what in kit.lacks:
                pytest.skip(f"{kit.framework} lacks {what}: {kit.lacks[what]}")
            case(kit, *args, **kwargs)
        return checked
    return around


def given(start=3, hidden=16):
    """w0 (12, hidden), b0 (hidden,), w1 (hidden, 5), b1 (5,), float32, the same for the same ``start``."""
    draw = np.random.default_rng(start)
    shapes = (12, hidden), (hidden,), (hidden, 5), (5,)
    return [(draw.standard_normal(s) / 3).astype(np.float32) for s in shapes]


def gradient(arrays, x, y):
    """(loss sum, its gradient by array) of `given` weights, in float64."""
    model = Model((12, len(arrays[1]), 5))
    model.params = dict(zip(("w0", "b0", "w1", "b1"), (a.astype(np.float64) for a in arrays)))
    loss_sum, grads = model.gradient(x, y)
    return loss_sum, [grads[name] for name in model.params]


def by_hand(name, steps, start=3, lr=0.1, clip=0.0, decay=0.0):
    """Return the weights after a plain loop over whole batches; ``name``: "sgd", "adam" or, of the paper's section 2,
    where epsilon is not corrected for the bias, "adam, epsilon hat"."""
    arrays = [a.astype(np.float64) for a in given(start)]
    first, second = ([np.zeros_like(a) for a in arrays] for _ in range(2))
    for t in range(steps):
        grads = [g / 32 for g in gradient(arrays, *batch(t))[1]]
        norm = length(grads)
        grads = [g * min(1.0, clip / norm) if clip else g for g in grads]
        for i, g in enumerate(grads):
            arrays[i] *= 1 - lr * decay
            if name == "sgd":
                first[i] = 0.9 * first[i] + g
                arrays[i] -= lr * first[i]
                continue
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            right = 1 - 0.9 ** (t + 1), math.sqrt(1 - 0.999 ** (t + 1))
            root = np.sqrt(second[i]) / right[1] + (EPSILON if name == "adam" else EPSILON / right[1])
            arrays[i] -= lr * first[i] / right[0] / root
    return arrays


def length(arrays):
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in arrays))


def near(got, want, rtol):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def same(got, want):
    """Equal to the bit: arrays in a row, or by name in any order, whatever number Keras gave to a thing."""
    if isinstance(want, dict):
        (got, names), (want, expected) = by_name(got), by_name(want)
        assert names == expected
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def by_name(arrays):
    plain = sorted((COUNTER.sub("", name), name) for name in arrays)
    return [arrays[name] for _, name in plain], [name for name, _ in plain]


def same_state(got, want):
    """Of two results of `state`."""
    assert set(got[0]) == set(want[0]) == {"model", "optimizer"} and got[1] == want[1]
    for group in want[0]:
        same(got[0][group], want[0][group])


def spoilt(t, value=np.nan):
    """Batch t with one sample that is not finite."""
    x, y = batch(t)
    x[3] = value
    return x, y


class Halves(Uncompressed):
    """A compressor with state: sends half of what is there and keeps the rest for later."""

    name = "halves"

    def init(self, ops, bucket):
        return {"owed": ops.zeros(bucket.n, bucket.dtype)}

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        whole_N = flat_N + state["owed"]
        total_N = yield AllReduce(whole_N * 0.5)
        return total_N, {"owed": whole_N - whole_N * 0.5}
