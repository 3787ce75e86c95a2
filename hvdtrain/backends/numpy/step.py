"""The reference step: a small classifier with its gradient written out, in float64 by default.

Owns `Model` (dense layers, ReLU, softmax cross entropy) and a `Step` over it that trains with SGD and momentum. It is
what tests run under the lockstep world, and the arithmetic to compare the frameworks with; it is not meant for users.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import rng
from hvdtrain.backends.numpy import amp
from hvdtrain.config import Config
from hvdtrain.errors import UserError
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.precision.policy import FP32, Precision
from hvdtrain.precision.scaler import LossScale
from hvdtrain.protocols import Batch, Pair, ParamSpec


class Model:
    """Dense layers of the given ``sizes`` with ReLU between them; parameters "w0", "b0", "w1", ... in ``dtype``."""

    def __init__(self, sizes: tuple[int, ...] = (64, 32, 10), seed: int = 0, dtype: str = "float64") -> None:
        draw = np.random.Generator(np.random.Philox(seed))
        self.params: dict[str, np.ndarray] = {}
        for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:])):
            self.params[f"w{i}"] = (draw.standard_normal((n_in, n_out)) * math.sqrt(2.0 / n_in)).astype(dtype)
            self.params[f"b{i}"] = np.zeros(n_out, dtype)
        self.layers = len(sizes) - 1

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Inputs of every layer, then the logits: (B, ...) -> [(B, n_0), ..., (B, classes)]."""
        acts = [x.reshape(len(x), -1).astype(self.params["w0"].dtype)]
        for i in range(self.layers):
            z = acts[-1] @ self.params[f"w{i}"] + self.params[f"b{i}"]
            acts.append(np.maximum(z, 0) if i + 1 < self.layers else z)
        return acts

    def loss(self, logits: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """(sum of cross entropy over samples, its gradient (B, classes))."""
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(y))
        grad = np.exp(log_p)
        grad[rows, y] -= 1
        return float(-log_p[rows, y].sum()), grad

    def gradient(self, x: np.ndarray, y: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """(loss sum, gradient of it by parameter name)."""
        acts = self.forward(x)
        loss_sum, delta = self.loss(acts[-1], y)
        grads = {}
        for i in reversed(range(self.layers)):
            grads[f"w{i}"] = acts[i].T @ delta
            grads[f"b{i}"] = delta.sum(axis=0)
            if i:
                delta = (delta @ self.params[f"w{i}"].T) * (acts[i] > 0)
        return loss_sum, grads


def create_step(spec: Any, config: Config, control: Any, steps_per_epoch: int,
                precision: Precision = FP32, sample: Any = None, data: Any = None) -> NumpyStep:
    """A step over ``spec.model``; `UserError` for one that is to be split over devices."""
    if config.model_parallel > 1:
        raise UserError(f"model_parallel {config.model_parallel} with the numpy backend", "a PyTorch or Keras model",
                        "set model_parallel: 1")
    amp.check(precision.own)
    return NumpyStep(spec.model, config, precision)


class NumpyStep:
    """Implements `hvdtrain.protocols.Step`."""

    asynchronous = False
    waited_s = 0.0
    table = ""

    def __init__(self, model: Model, config: Config, precision: Precision = FP32) -> None:
        if config.optimizer.name.lower() not in ("auto", "sgd"):
            raise UserError(f"optimizer {config.optimizer.name!r} with the numpy backend", "SGD",
                            "correct optimizer.name")
        self.model = model
        self.precision, self.scale = precision, LossScale()
        self._lr = config.lr
        self._momentum = float(config.optimizer.args.get("momentum", 0.0))
        self._velocity = {n: np.zeros_like(p) for n, p in model.params.items()}
        self._totals: dict[str, np.ndarray] = {}

    def params(self) -> list[ParamSpec]:
        """In the order they were made."""
        return [ParamSpec(n, p.shape, p.dtype.name) for n, p in self.model.params.items()]

    def made_of(self) -> list[str]:
        """One line for each parameter."""
        return [f"parameter {n} {p.dtype.name}{list(p.shape)}" for n, p in self.model.params.items()]

    def attach(self, reducer: Reducer) -> None:
        """Allocate the buckets."""
        self._reducer = reducer
        self._flats = [reducer.buffer(b) for b in reducer.buckets]

    def plain_sgd(self) -> bool:
        """Whether there is no momentum."""
        return self._momentum == 0

    def share_initial(self) -> None:
        """Broadcast rank 0's parameters."""
        for name, p in self.model.params.items():
            got_N = self._reducer.collectives.broadcast(p.reshape(-1).copy(), f"initial.{name}").wait()
            p[...] = got_N.reshape(p.shape)

    def zero(self) -> None:
        """Forget the gradients."""
        self._reducer.begin()
        for flat_N in self._flats:
            flat_N[:] = 0

    def forward_backward(self, batch: Batch, scale: float, last: bool) -> Pair:
        """Add the gradient of ``loss_sum * scale`` into the buckets."""
        if not len(batch[0]):
            return 0.0, 0
        loss_sum, grads = self.model.gradient(batch[0], batch[1])
        names = list(self.model.params)
        for bucket, flat_N in zip(self._reducer.buckets, self._flats):
            for i, offset in zip(bucket.params, bucket.offsets):
                g = grads[names[i]].reshape(-1)
                flat_N[offset:offset + g.size] += g * scale
        return loss_sum, len(batch[0])

    def spare(self, batch: Batch) -> None:
        """Not needed: a micro-batch without samples is left out."""

    def join(self) -> None:
        """Nothing: the model knows nothing of a run."""

    def leave(self) -> None:
        """Nothing to take back."""

    def trial(self, batch: Batch) -> None:
        """Compute a gradient and forget it."""
        self.model.gradient(batch[0], batch[1])

    def bytes_to_come(self) -> int:
        """Nothing: the optimizer's state is there."""
        return 0

    def device_s(self) -> None:
        """The host's clock tells."""

    def exchange(self) -> float:
        """Sum the buckets over ranks."""
        begin = time.perf_counter()
        for i, flat_N in enumerate(self._flats):
            self._reducer.start(i, flat_N)
        self._flats = [np.array(s) for s in self._reducer.finish()]
        return time.perf_counter() - begin

    def squares(self) -> float:
        """Squares of this rank's part of the sums."""
        return self._reducer.squares(self._flats)

    def skipped(self) -> bool:
        """False: the host decides."""
        return False

    def culprit(self, batch: Batch) -> str:
        """The first parameter that this batch gives a gradient which is not finite, or ""."""
        _, grads = self.model.gradient(batch[0], batch[1])
        return next((n for n in self.model.params if not np.isfinite(grads[n]).all()), "")

    def apply(self, clip_norm: float, check: bool) -> tuple[bool, float]:
        """SGD with momentum: v = m v + g, p = p - lr v."""
        norm = math.sqrt(sum(float((f * f).sum()) for f in self._flats))
        if (clip_norm > 0 or check) and not math.isfinite(norm):
            return False, norm
        factor = clip_norm / norm if 0 < clip_norm < norm else 1.0
        names = list(self.model.params)
        for bucket, flat_N in zip(self._reducer.buckets, self._flats):
            for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes):
                p, v = self.model.params[names[i]], self._velocity[names[i]]
                v *= self._momentum
                v += flat_N[offset:offset + p.size].reshape(shape) * factor
                p -= self._lr * v
        return True, norm

    def discard(self) -> None:
        """Undo what the step did to compressor state; there are no buffers."""
        self._reducer.discard()

    def evaluate(self, batch: Batch) -> None:
        """Loss and accuracy."""
        logits = self.model.forward(batch[0])[-1]
        right = (logits.argmax(axis=1) == batch[1]).sum()
        pairs = {"loss": (self.model.loss(logits, batch[1])[0], len(logits)), "accuracy": (right, len(logits))}
        for name, pair in pairs.items():
            self._totals[name] = self._totals.get(name, np.zeros(2)) + np.array(pair, dtype=np.float64)

    def eval_totals(self) -> dict[str, np.ndarray]:
        """(sum, weight) of each metric; they start anew."""
        totals, self._totals = self._totals, {}
        return totals

    def eval_results(self, totals: dict[str, np.ndarray]) -> dict[str, float]:
        """Weighted means."""
        return {name: float(s / w) if w else math.nan for name, (s, w) in totals.items()}

    def learning_rate(self) -> float:
        """Constant."""
        return self._lr

    def end_epoch(self) -> None:
        """No schedule."""

    def sync_buffers(self) -> None:
        """No buffers."""

    def caveats(self) -> list[str]:
        """None: every sample stands for itself."""
        return []

    def describe(self) -> dict[str, str]:
        """In words."""
        return {"optimizer": f"SGD, lr {self._lr:g}", "device": "cpu"}

    def state(self) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Parameters and velocities."""
        return {"model": {n: p.copy() for n, p in self.model.params.items()},
                "optimizer": {n: v.copy() for n, v in self._velocity.items()}}, {}

    def load(self, groups: dict[str, dict[str, np.ndarray]], rest: dict[str, Any]) -> None:
        """Undo `state`."""
        for name, p in self.model.params.items():
            p[...] = groups["model"][name]
            self._velocity[name][...] = groups["optimizer"][name]

    def rank_state(self) -> dict[str, np.ndarray]:
        """Random generators and compressor state."""
        return {**rng.capture(), **self._reducer.saved()}

    def load_rank(self, own: dict[str, np.ndarray]) -> str:
        """Undo `rank_state`; say what of the compressor's state does not fit."""
        rng.restore(own)
        return self._reducer.restore(own)

    def export(self, directory: Any) -> list[str]:
        """Write model.safetensors."""
        from safetensors.numpy import save_file

        save_file(self.model.params, str(Path(directory) / "model.safetensors"))
        return ["model.safetensors"]
