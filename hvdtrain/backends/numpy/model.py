"""The reference model, a small classifier with its gradient written out: parameters, SGD, metrics, checkpoint state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.pairs import Totals, means
from hvdtrain.checkpoint import weights
from hvdtrain.checkpoint.tensors import FileLayout, Spec, layout
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.core import rng
from hvdtrain.core.protocols import Batch, ParamSpec, Writable
from hvdtrain.core.protocols.run import ArrayWindow, Head, Place, Shard
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.data.layout import OUTPUT
from hvdtrain.planning.shards import in_bucket


class Model:
    """Dense layers of the given ``sizes`` with ReLU between them; parameters "w0", "b0", "w1", ... in ``dtype``."""

    def __init__(self, sizes: tuple[int, ...] = (64, 32, 10), seed: int = 0, dtype: str = "float64") -> None:
        draw = np.random.Generator(np.random.Philox(seed))
        self.params: dict[str, np.ndarray] = {}
        for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:])):
            self.params[f"w{i}"] = (draw.standard_normal((n_in, n_out)) * math.sqrt(2.0 / n_in)).astype(dtype)
            self.params[f"b{i}"] = np.zeros(n_out, dtype)
        self.layers, self.dtype = len(sizes) - 1, dtype

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the inputs of every layer, then the logits: (B, ...) -> [(B, n_0), ..., (B, classes)]."""
        acts = [x.reshape(len(x), -1).astype(self.params["w0"].dtype)]
        for i in range(self.layers):
            z = acts[-1] @ self.params[f"w{i}"] + self.params[f"b{i}"]
            acts.append(np.maximum(z, 0) if i + 1 < self.layers else z)
        return acts

    def loss(self, logits: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """Return (sum of cross entropy over samples, its gradient (B, classes))."""
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(y))
        grad = np.exp(log_p)
        grad[rows, y] -= 1
        return float(-log_p[rows, y].sum()), grad

    def gradient(self, x: np.ndarray, y: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """Return (loss sum, gradient of it by parameter name)."""
        acts = self.forward(x)
        loss_sum, delta = self.loss(acts[-1], y)
        grads = {}
        for i in reversed(range(self.layers)):
            grads[f"w{i}"] = acts[i].T @ delta
            grads[f"b{i}"] = delta.sum(axis=0)
            if i:
                delta = (delta @ self.params[f"w{i}"].T) * (acts[i] > 0)
        return loss_sum, grads


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
        return False

    def slots(self) -> Iterator[tuple[str, int, np.ndarray]]:
        for i, v in enumerate(self.velocity):
            yield "velocity", i, v

    def plain_sgd(self) -> bool:
        return self.momentum == 0

    def bytes_to_come(self) -> int:
        return 0

    def learning_rate(self) -> float:
        return self.lr

    def end_epoch(self) -> None:
        """Do nothing: there is no schedule."""

    def evaluated(self, value: float) -> None:
        """Do nothing: there is no schedule."""

    def own_schedule(self) -> None:
        """Return None: the rate is a number."""

    def resumed(self, epochs: int, rescheduled: bool) -> None:
        """Do nothing: a checkpoint holds no setting."""

    def describe(self) -> dict[str, str]:
        return {"optimizer": f"SGD, lr {self.lr:g}"}


class Params:
    """Implements `hvdtrain.core.protocols.Params` of a `Model`, in the order they were made."""

    def __init__(self, model: Model, lr: float, momentum: float) -> None:
        self.specs = [ParamSpec(n, p.shape, p.dtype.name, block=int(n[1:])) for n, p in model.params.items()]
        self.tensors = list(model.params.values())
        self._rule = lr, momentum

    def made_of(self) -> list[str]:
        return [f"parameter {s.name} {s.dtype}{list(s.shape)}" for s in self.specs]

    def frozen(self) -> frozenset[int]:
        return frozenset()

    def flat(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> np.ndarray:
        pieces = [self.tensors[i].reshape(-1)[a:b]
                  for i, (a, b) in in_bucket(bucket, begin, bucket.n if end is None else end)]
        return np.concatenate(pieces) if pieces else np.empty(0, bucket.dtype)

    def write(self, bucket: Bucket, flat_N: np.ndarray, known: tuple[int, int] = (0, 0)) -> None:
        for first, last in ((0, known[0]), (known[1], bucket.n)):
            for i, (a, b) in in_bucket(bucket, first, last):
                self.tensors[i].reshape(-1)[a:b] = flat_N[first:first + b - a]
                first += b - a

    def optimizer(self, vectors: Sequence[np.ndarray]) -> Sgd:
        return Sgd(vectors, *self._rule)

    def sliced(self, spans: Sequence[tuple[int, int]]) -> Sgd:
        return Sgd([p.reshape(-1)[begin:end] for p, (begin, end) in zip(self.tensors, spans)], *self._rule)


def cut(grads: Sequence[np.ndarray], buckets: Sequence[Bucket]) -> list[np.ndarray]:
    """Return each parameter's gradient from those of the buckets, or as they are where there are no buckets."""
    if not buckets:
        return list(grads)
    found = {i: flat_N[offset:offset + math.prod(shape)] for bucket, flat_N in zip(buckets, grads)
             for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes)}
    return [found[i] for i in sorted(found)]


class Buffers:
    """Implements `hvdtrain.core.protocols.Buffers`: there are none, only initial values."""

    def __init__(self, model: Model, transports: Sequence[Transport], blocks: Sequence[Sequence[int]] = ()) -> None:
        self._model, self._transports, self._blocks = model, transports, blocks

    def share(self) -> None:
        for i, transport in enumerate(self._transports):
            for name, p in self._model.params.items():
                if not self._blocks or int(name[1:]) in self._blocks[i]:
                    p[...] = transport.broadcast(p.reshape(-1).copy(), f"initial.{name}").reshape(p.shape)

    def sync(self) -> list[str]:
        return []

    def keep(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def writable(self) -> dict[str, Writable]:
        return {}

    def statistics(self) -> list[str]:
        return []

    def aliases(self) -> dict[str, str]:
        return {}

    def noticed(self) -> list[str]:
        return []

    def track(self, names: Iterable[str]) -> None:
        pass

    def combine(self, reductions: Mapping[str, str], samples: int | None = None, force: bool = False) -> None:
        pass


class Evaluator:
    """`hvdtrain.core.protocols.Evaluator`: loss and accuracy."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._totals = Totals()

    def add(self, batch: Batch) -> None:
        self.add_outputs(self._model.forward(batch[0])[-1], batch)

    def add_outputs(self, logits: np.ndarray, batch: Batch) -> None:
        """Add those of a batch whose logits are known."""
        right = (logits.argmax(axis=1) == batch[1]).sum()
        self._totals.add({"loss": (self._model.loss(logits, batch[1])[0], len(logits)),
                          "accuracy": (right, len(logits))})

    def totals(self) -> dict[str, np.ndarray]:
        return self._totals.take()

    def results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        return means(totals)

    def outputs(self, batch: Batch) -> dict[str, np.ndarray]:
        return {OUTPUT: self._model.forward(batch[0])[-1]}


def _copied(group: str, name: str, array: np.ndarray, place: Place | None) -> np.ndarray:
    memory = np.empty(array.shape, array.dtype) if place is None else place(group, name, array.shape, array.dtype)
    if isinstance(memory, ArrayWindow):
        begin, memory = memory
        array = array.reshape(-1)[begin:begin + memory.size]
    if memory is None:
        return array
    memory[...] = array
    return memory


class State:
    """`hvdtrain.core.protocols.ModelState`: parameters and velocities."""

    def __init__(self, model: Model, optimizer: Sgd) -> None:
        self._model, self._optimizer = model, optimizer
        self._spans: Sequence[tuple[int, int]] | None = None

    def state(self, place: Place | None = None) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        params = self._model.params
        groups = {"model": params}
        if self._spans is None:
            groups["optimizer"] = dict(zip(params, self._optimizer.velocity))
        return {group: {n: _copied(group, n, a, place) for n, a in arrays.items()}
                for group, arrays in groups.items()}, {}

    def state_bytes(self) -> int:
        return sum(p.nbytes for p in (*self._model.params.values(), *self._optimizer.velocity))

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        self.load_weights(groups["model"])
        for name, v in zip(self._model.params, self._optimizer.velocity if self._spans is None else ()):
            v[...] = groups["optimizer"][name]

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        for name, p in self._model.params.items():
            p[...] = arrays[name]

    def take(self, optimizer: Any, spans: Sequence[tuple[int, int]]) -> None:
        self._optimizer, self._spans = optimizer, spans

    def slices(self, place: Place | None = None) -> Iterator[Shard]:
        assert self._spans is not None
        for (name, p), v, (begin, end) in zip(self._model.params.items(), self._optimizer.velocity, self._spans):
            if begin < end:
                yield Shard("optimizer", name, p.shape, begin, _copied("optimizer", name, v, place))

    def wanted(self, heads: Sequence[Head]) -> list[tuple[str, int, int]]:
        assert self._spans is not None
        return [(name, *span) for name, span in zip(self._model.params, self._spans) if span[0] < span[1]]

    def load_slices(self, values: Mapping[str, np.ndarray]) -> None:
        for name, v in zip(self._model.params, self._optimizer.velocity):
            if name in values:
                v[...] = values[name]

    def rank_state(self) -> dict[str, np.ndarray]:
        return rng.capture()

    def load_rank(self, own: dict[str, np.ndarray]) -> None:
        rng.restore(own)

    def final(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def export(self, directory: Path) -> list[str]:
        plan = self._plan()
        weights.put(plan, (self._model.params[name].reshape(-1).view(np.uint8).data for name in plan.names),
                    Path(directory) / weights.FILE)
        return [weights.FILE]

    def try_export(self) -> str:
        self._plan()
        return ""

    def _plan(self) -> FileLayout:
        return layout({name: Spec(p.dtype, p.shape) for name, p in self._model.params.items()}, "model")
