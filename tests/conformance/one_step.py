"""The one way in which tests of a backend take a training step, and the small data that they take it on.

Owns no expectation. `OneStep` is what the tests know of a step: when the step is built otherwise, this file changes and
the cases stay. A framework is imported when a step of it is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain import backends
from hvdtrain.backends.model_spec import Spec
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.compressors.none import NoCompression
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.config import Config, Named
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.parallel.data_parallel.alone import Alone
from hvdtrain.parallel.data_parallel.replicate import Replicate
from hvdtrain.parallel.precision import FP32, Precision

if TYPE_CHECKING:
    from hvdtrain.core.protocols import Batch, Collectives, Compressor
    from hvdtrain.parallel.parts import ModelParts

SGD = Config(optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 12)).astype(np.float32)
Y = RNG.integers(0, 5, 64)


class TwoRanksInOne(NullCollectives):
    """A world of two whose other rank has no sample: the buckets and hooks of several ranks, the sums of one."""

    def __init__(self) -> None:
        super().__init__(0, 2)


class OneStep:
    """A backend's parts over ``model``, driven as the loop drives them, with several small buckets.

    ``backend``: "numpy", "torch" or "tensorflow"; ``more``: what a model file offers beside its model. Every rank has
    rank 0's weights. Without a ``wire`` and a ``compressor`` gradients stay where they are made, as in one process.
    """

    def __init__(self, backend: str, model: Any, config: Config = SGD, wire: Collectives | None = None, rank: int = 0,
                 compressor: Compressor | None = None, bucket_mb: float = 0.0005, precision: Precision = FP32,
                 control: Any = None, sample: Any = None, **more: Any) -> None:
        made, self.model, wire = backends.load(backend), model, wire or NullCollectives()
        control = control or SimpleNamespace(rank=rank)
        self.parts: ModelParts = made.make_parts(spec(model, **more), config, control, wire, 10, precision, sample)
        self.dp: Any = Alone(self.parts.optimizer, made.Ops())
        if wire.size > 1 or compressor:
            buckets = plan_buckets(self.parts.params.specs, bucket_mb)
            reducer = Reducer(buckets, compressor or NoCompression(), wire, made.Ops(), self.parts.ops_of_place)
            reducer.state.undoable = not wire.in_graph or config.nan_guard == "skip" or self.parts.scale.on
            self.dp = Replicate(reducer, self.parts.optimizer)
        self.join()
        self.parts.buffers.share()
        self.grads: list[Any] = []
        self._transport = Transport(wire, made.Ops())
        self._handed_over, self._waited_s = False, 0.0
        self._at = 0

    def join(self) -> None:
        """Take the model."""
        self.parts.install()
        self.parts.stage.connect(self.dp)

    def leave(self) -> None:
        """Give it back."""
        self.parts.stage.disconnect()
        self.parts.remove()

    def run(self, micros: Sequence[Batch], scale: float, clip: float = 0.0, check: bool = False) -> Any:
        """Run a whole step over this rank's micro-batches: ``((finite, norm), [(loss_sum, weight), ...])``.

        As the loop has it, an optimizer may update in the graph of the last micro-batch; without ``clip`` or ``check``
        the norm is NaN.
        """
        self.zero(fuses=True, clip=clip, check=check)
        pairs = [self.forward_backward(m, scale, i + 1 == len(micros)) for i, m in enumerate(micros)]
        assert self.exchange() >= 0
        finite, norm = self.apply(clip, check)
        asked = clip > 0 or check or self.parts.scale.on
        return (finite, norm if asked else math.nan), [(float(a), float(b)) for a, b in pairs]

    # --- the middle of a step --------------------------------------------------------------------------------------

    def zero(self, fuses: bool = False, clip: float = 0.0, check: bool = False) -> None:
        """Open a step."""
        self.dp.fuses, self.dp.clip_norm, self.dp.look_first = fuses, clip, check
        self.dp.begin(self._at)
        self.parts.stage.begin()
        self._handed_over, self._waited_s = False, 0.0
        self._at += 1

    def forward_backward(self, batch: Batch, scale: float, last: bool) -> Any:
        """Run one micro-batch."""
        self._handed_over = last
        pair = self.parts.stage.run(batch, scale, last, self.dp)
        self._waited_s += self.parts.stage.waited_s
        return pair

    def exchange(self) -> float:
        """Complete the sums, of zeros where there was no micro-batch; seconds waited in the step."""
        if not self._handed_over:
            self.parts.stage.nothing(self.dp)
            self._waited_s += self.parts.stage.waited_s
        begin = time.perf_counter()
        self.grads = self.dp.collect()
        return self._waited_s + time.perf_counter() - begin

    def squares(self) -> float:
        """Of this rank's part of the sums."""
        return float(self.dp.squares(self.grads))

    def apply(self, clip: float = 0.0, check: bool = False) -> tuple[bool, float]:
        """Update."""
        self.dp.clip_norm, self.dp.look_first = clip, check
        finite, norm = self.dp.update(self._at, self.grads, self._unused())
        return finite, norm

    def _unused(self) -> frozenset[int]:
        """Return the parameters that no rank used; none for a step without samples, which has zeros."""
        own, n = self.parts.stage.unused, len(self.params())
        used = np.array([self._handed_over and i not in own for i in range(n)], np.float32)
        if self._transport.size > 1:
            ops = self._transport.ops
            used = np.array(ops.to_host(self._transport.allreduce(ops.from_host(used), "used")))
        return frozenset(np.flatnonzero(used == 0).tolist()) if used.any() else frozenset()

    def discard(self) -> None:
        """Undo the step."""
        self.parts.buffers.discard()
        self.dp.discard()

    # --- what it holds -----------------------------------------------------------------------------------------------

    def weights(self) -> list[np.ndarray]:
        """Return replicas's parameters and kept buffers, in its own order."""
        return [np.array(array) for array in self.state()[0]["model"].values()]

    def rank_state(self) -> dict[str, np.ndarray]:
        """Random generators and compressor state."""
        return {**self.parts.state.rank_state(), **self.dp.saved()}

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`."""
        self.parts.state.load_rank(own)
        return str(self.dp.restore(own))

    def params(self) -> list[Any]:
        """Return the parameters' specs."""
        return self.parts.params.specs

    def __getattr__(self, name: str) -> Any:
        """Return what one part alone does."""
        part, _, own = _OF_A_PART[name].partition(".")
        found = getattr(self.__dict__["parts"], part)
        return getattr(found, own) if own else found


_OF_A_PART = {
    "state": "state.state", "load": "state.load", "export": "state.export", "culprit": "stage.culprit",
    "trial": "stage.trial", "spare": "stage.spare", "asynchronous": "stage.asynchronous", "caveats": "caveats",
    "describe": "describe", "evaluate": "evaluator.add", "eval_totals": "evaluator.totals",
    "eval_results": "evaluator.results", "sync_buffers": "buffers.sync", "share_initial": "buffers.share",
    "learning_rate": "optimizer.learning_rate", "end_epoch": "optimizer.end_epoch", "scale": "scale",
    "plain_sgd": "optimizer.plain_sgd", "bytes_to_come": "optimizer.bytes_to_come", "skipped": "optimizer.skipped",
    "made_of": "params.made_of", "device_s": "stage.device_s", "optimizer": "optimizer", "stage": "stage",
}


def run(step: OneStep, micros: Sequence[Batch], scale: float, clip: float = 0.0, check: bool = False) -> Any:
    """`OneStep.run`."""
    return step.run(micros, scale, clip, check)


def spec(model: Any, **parts: Any) -> Spec:
    """Return a model as a model file gives it, with nothing beside it but ``parts``."""
    return Spec("m", model, "any", **parts)


def batch(t: int, n: int = 32) -> Batch:
    """Global batch t: x float32 (n, 12), y int64 (n,)."""
    index = np.random.default_rng(t).permutation(64)[:n]
    return X[index], Y[index]


def cut(whole: Batch, *sizes: int) -> list[Batch]:
    """Return the first ``sizes`` of a batch as parts; empty ones are left out."""
    ends = np.cumsum((0, *sizes))
    return [tuple(a[i:j] for a in whole) for i, j in zip(ends, ends[1:]) if j > i]
