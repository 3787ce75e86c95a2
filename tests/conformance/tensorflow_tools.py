"""What the tests of the TensorFlow step share: a small model, batches, and a step over a reducer with several buckets.

Imports TensorFlow: a test asks for it first (pytest.importorskip).
"""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np

from hvdtrain.backends.tensorflow import Ops, create_step
from hvdtrain.collectives.null import NullCollectives
from hvdtrain.config import Config, Named
from hvdtrain.exchange.buckets import plan_buckets
from hvdtrain.exchange.compressors.none import NoCompression
from hvdtrain.exchange.reducer import Reducer

SGD = Config(optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 12)).astype(np.float32)
Y = RNG.integers(0, 5, 64)


def mlp(seed=3, extra=(), **last):
    """A small perceptron on (B, 12) with 5 outputs, the same for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="tanh"), *extra,
                             keras.layers.Dense(5, **last)])


def spec(model, **parts):
    return SimpleNamespace(**{"name": "m", "model": model, "task": None, "weight": None, "blocks": None,
                              "example": None, "metrics": None, **parts})


def attached(model, config=SGD, wire=None, rank=0, compressor=None, bucket_mb=0.0005, **parts):
    """A step whose reducer has several small buckets."""
    step = create_step(spec(model, **parts), config, SimpleNamespace(rank=rank), 10)
    buckets = plan_buckets(step.params(), bucket_mb)
    step.attach(Reducer(buckets, compressor or NoCompression(), wire or NullCollectives(), Ops()))
    step.share_initial()
    return step


def run(step, micros, scale, clip=0.0, check=False):
    """One step over this rank's micro-batches."""
    step.zero()
    pairs = [step.forward_backward(m, scale, i + 1 == len(micros)) for i, m in enumerate(micros)]
    assert step.exchange() >= 0
    return step.apply(clip, check), [(float(a), float(b)) for a, b in pairs]


def batch(t, n=32):
    """Global batch t."""
    index = np.random.default_rng(t).permutation(64)[:n]
    return X[index], Y[index]


def cut(whole, *sizes):
    """The first ``sizes`` of a batch as parts; empty ones are left out."""
    ends = np.cumsum((0, *sizes))
    return [tuple(a[i:j] for a in whole) for i, j in zip(ends, ends[1:]) if j > i]


def weights(step_or_model):
    model = getattr(step_or_model, "model", step_or_model)
    return [v.value.numpy() for v in model.weights]


def close(got, want, rtol):
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())
