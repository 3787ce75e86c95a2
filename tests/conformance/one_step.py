"""The one way in which tests of a backend take a training step, and the small data that they take it on.

Owns no expectation. `OneStep` is what the tests know of a step: when the step is built otherwise, this file changes and
the cases stay. A framework is imported when a step of it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain import backends
from hvdtrain.collectives.null import NullCollectives
from hvdtrain.config import Config, Named
from hvdtrain.exchange.buckets import plan_buckets
from hvdtrain.exchange.compressors.none import NoCompression
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.model import Spec
from hvdtrain.precision.policy import FP32, Precision

if TYPE_CHECKING:
    from hvdtrain.protocols import Batch, Collectives, Compressor

SGD = Config(optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 12)).astype(np.float32)
Y = RNG.integers(0, 5, 64)


class TwoRanksInOne(NullCollectives):
    """A world of two whose other rank has no sample: the buckets and hooks of several ranks, the sums of one."""

    def __init__(self) -> None:
        super().__init__(0, 2)


class OneStep:
    """A backend's step over ``model``, whose reducer has several small buckets, with rank 0's weights on every rank.

    ``backend``: "numpy", "torch" or "tensorflow"; ``parts``: what a model file offers beside its model.
    Every name that is not here is the step's own: ``zero``, ``forward_backward``, ``exchange``, ``squares``, ``apply``,
    ``discard``, ``culprit``, ``trial``, ``params``, ``state``, ``load``, ``rank_state``, ``load_rank``, ``evaluate``,
    ``eval_totals``, ``eval_results``, ``sync_buffers``, ``learning_rate``, ``describe``, ``caveats``, ``scale``.
    """

    def __init__(self, backend: str, model: Any, config: Config = SGD, wire: Collectives | None = None, rank: int = 0,
                 compressor: Compressor | None = None, bucket_mb: float = 0.0005, precision: Precision = FP32,
                 **parts: Any) -> None:
        made, self.model = backends.load(backend), model
        self.step = made.create_step(spec(model, **parts), config, SimpleNamespace(rank=rank), 10, precision)
        buckets = plan_buckets(self.step.params(), bucket_mb)
        self.step.attach(Reducer(buckets, compressor or NoCompression(), wire or NullCollectives(), made.Ops()))
        self.step.share_initial()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["step"], name)

    def run(self, micros: Sequence[Batch], scale: float, clip: float = 0.0, check: bool = False) -> Any:
        """One whole step over this rank's micro-batches: ``((finite, norm), [(loss_sum, weight), ...])``."""
        return run(self.step, micros, scale, clip, check)

    def weights(self) -> list[np.ndarray]:
        """Copies of the model's parameters and kept buffers, in its own order."""
        return [np.array(array) for array in self.step.state()[0]["model"].values()]


def run(step: Any, micros: Sequence[Batch], scale: float, clip: float = 0.0, check: bool = False) -> Any:
    """`OneStep.run` of any step."""
    step.zero()
    pairs = [step.forward_backward(m, scale, i + 1 == len(micros)) for i, m in enumerate(micros)]
    assert step.exchange() >= 0
    return step.apply(clip, check), [(float(a), float(b)) for a, b in pairs]


def spec(model: Any, **parts: Any) -> Spec:
    """A model as a model file gives it, with nothing beside it but ``parts``."""
    return Spec("m", model, "any", **parts)


def batch(t: int, n: int = 32) -> Batch:
    """Global batch t: x float32 (n, 12), y int64 (n,)."""
    index = np.random.default_rng(t).permutation(64)[:n]
    return X[index], Y[index]


def cut(whole: Batch, *sizes: int) -> list[Batch]:
    """The first ``sizes`` of a batch as parts; empty ones are left out."""
    ends = np.cumsum((0, *sizes))
    return [tuple(a[i:j] for a in whole) for i, j in zip(ends, ends[1:]) if j > i]
