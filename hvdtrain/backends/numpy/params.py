"""The reference model's parameters, and SGD with momentum over them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hvdtrain.backends.numpy.model import Model
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.planning.shards import in_bucket


class Sgd:
    """`hvdtrain.core.protocols.Optimizer` over ``tensors``: v = m v + g, p = p - lr v."""

    elementwise = True
    looks = False
    needs_all = ""
    traced = None
    overruled: frozenset[str] = frozenset()

    def __init__(self, tensors: Sequence[np.ndarray], lr: float, momentum: float = 0.0) -> None:
        self.tensors, self.lr, self.momentum = list(tensors), lr, momentum
        self.changes: list[str] = []
        self.velocity = [np.zeros_like(p) for p in self.tensors]

    def step(self, grads: Sequence[np.ndarray], buckets: Sequence[Bucket], clip_norm: float, look: bool,
             norm: float | None = None, unused: Collection[int] = ()) -> tuple[bool, float]:
        """Update; the norm is always told."""
        if norm is None:
            norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
            if (clip_norm > 0 or look) and not math.isfinite(norm):
                return False, norm
        factor = clip_norm / norm if 0 < clip_norm < norm else 1.0
        for i, (p, v, g) in enumerate(zip(self.tensors, self.velocity, cut(grads, buckets))):
            if i in unused:
                continue
            v *= self.momentum
            v += g.reshape(p.shape) * factor
            p -= self.lr * v
        return True, norm

    def skipped(self) -> bool:
        """False: the host decides."""
        return False

    def slots(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """The velocities."""
        for i, v in enumerate(self.velocity):
            yield "velocity", i, v

    def plain_sgd(self) -> bool:
        """Whether there is no momentum."""
        return self.momentum == 0

    def bytes_to_come(self) -> int:
        """Nothing: the state is there."""
        return 0

    def learning_rate(self) -> float:
        """Constant."""
        return self.lr

    def end_epoch(self) -> None:
        """No schedule."""

    def own_schedule(self) -> None:
        """Return None: the rate is a number."""

    def resumed(self, epochs: int, rescheduled: bool) -> None:
        """Nothing: a checkpoint holds no setting."""

    def describe(self) -> dict[str, str]:
        """In words."""
        return {"optimizer": f"SGD, lr {self.lr:g}"}


class Params:
    """`hvdtrain.core.protocols.Params` of a `Model`, in the order they were made."""

    def __init__(self, model: Model, lr: float, momentum: float) -> None:
        self.specs = [ParamSpec(n, p.shape, p.dtype.name, block=int(n[1:])) for n, p in model.params.items()]
        self.tensors = list(model.params.values())
        self._rule = lr, momentum

    def made_of(self) -> list[str]:
        """One line for each parameter."""
        return [f"parameter {s.name} {s.dtype}{list(s.shape)}" for s in self.specs]

    def frozen(self) -> frozenset[int]:
        """Return nothing."""
        return frozenset()

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> np.ndarray:
        """The tensors of ``bucket`` as (n,), or its elements [begin, end)."""
        pieces = [self.tensors[i].reshape(-1)[a:b]
                  for i, (a, b) in in_bucket(bucket, begin, bucket.n if end is None else end)]
        return np.concatenate(pieces) if pieces else np.empty(0, bucket.dtype)

    def write(self, bucket: Bucket, flat_N: np.ndarray, known: tuple[int, int] = (0, 0)) -> None:
        """Undo `flat`, but for the elements ``known``."""
        for first, last in ((0, known[0]), (known[1], bucket.n)):
            for i, (a, b) in in_bucket(bucket, first, last):
                self.tensors[i].reshape(-1)[a:b] = flat_N[first:first + b - a]
                first += b - a

    def optimizer(self, vectors: Sequence[np.ndarray]) -> Sgd:
        """SGD over ``vectors``."""
        return Sgd(vectors, *self._rule)

    def sliced(self, spans: Sequence[tuple[int, int]]) -> Sgd:
        """SGD over views of the tensors."""
        return Sgd([p.reshape(-1)[begin:end] for p, (begin, end) in zip(self.tensors, spans)], *self._rule)


def cut(grads: Sequence[np.ndarray], buckets: Sequence[Bucket]) -> list[np.ndarray]:
    """The gradient of each parameter from those of the buckets, or as they are where there are no buckets."""
    if not buckets:
        return list(grads)
    found = {i: flat_N[offset:offset + math.prod(shape)] for bucket, flat_N in zip(buckets, grads)
             for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes)}
    return [found[i] for i in sorted(found)]
