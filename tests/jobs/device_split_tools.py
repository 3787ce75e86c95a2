"""Models of Keras on one device and on two, trained step by step, for device_split_cases.py."""

import dataclasses
import sys
from pathlib import Path

import numpy as np

from hvdtrain.backends.model_spec import Spec, build_spec
from hvdtrain.cluster.control import SoloControl
from hvdtrain.config import Config, Named
from hvdtrain.core.errors import UserError
from hvdtrain.parallel.precision import Precision

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from one_step import OneStep  # noqa: E402

CONFIG = Config(optimizer=Named("adamw", {"clipnorm": 1.0, "use_ema": True}), lr=1e-2, global_batch=20)


def split(config=CONFIG, **more):
    return dataclasses.replace(config, **{"model_parallel": 2, "split_micro_batches": 4, **more})


def spec_of(model, **parts):
    return Spec("m", model, "tensorflow", **parts)


def built(name, **args):
    import keras

    return build_spec(f"tf_models.{name}:build", args, lambda: keras.utils.set_random_seed(3))


def step_of(spec, config, own="fp32", sample=None):
    parts = {name: getattr(spec, name) for name in ("task", "weight", "blocks", "example", "metrics")}
    return OneStep("tensorflow", spec.model, config, precision=Precision((own,), 0), control=SoloControl(),
                   sample=sample, **parts)


def train(step, batches, micros=1, clip=0.5, weight=len):
    """Losses by step; ``micros``: micro-batches of each."""
    losses = []
    for batch in batches:
        step.zero()
        total = weight(batch[0])
        parts = [tuple(np.array_split(a, micros)[k] for a in batch) for k in range(micros)]
        pairs = [step.forward_backward(part, 1 / total, k == micros - 1) for k, part in enumerate(parts)]
        step.exchange()
        finite, norm = step.apply(clip, True)
        assert finite and norm > 0
        losses.append(sum(float(a) for a, _ in pairs) / total)
    return losses


def arrays(step):
    return {**step.state()[0]["model"], **step.state()[0]["optimizer"]}


def close(got, want, tolerance=1e-5):
    assert len(got) == len(want)
    for (name, a), b in zip(got.items(), want.values()):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1e-3, np.abs(b).max()), err_msg=name)


def short(device):
    return device.rpartition("/")[2].removeprefix("device:")


def where(variables):
    return [short(v.value.device) for v in variables]


def refused(words, work):
    try:
        work()
    except UserError as error:
        assert words in str(error), str(error)
        return str(error)
    raise AssertionError(f"nothing refused: {words}")


def sequential(*extra, seed=4, units=16):
    """Regularised layers; ``extra``: makers of layers between them."""
    import keras

    keras.utils.set_random_seed(seed)
    l2 = keras.regularizers.L2(0.01)
    return keras.Sequential([
        keras.Input((12,)), keras.layers.Dense(units, activation="tanh", kernel_regularizer=l2),
        *(make() for make in extra),
        keras.layers.Dense(units, activity_regularizer=l2), keras.layers.Dense(5, kernel_regularizer=l2)])


def data_of(n=20, steps=3, weighted=False):
    rng = np.random.default_rng(2)
    return [(rng.standard_normal((n, 12)).astype(np.float32), rng.integers(0, 5, n),
             *([rng.random(n).astype(np.float32)] if weighted else [])) for _ in range(steps)]


def sample(n):
    return data_of(n, 1)[0]
