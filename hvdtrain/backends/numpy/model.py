"""The reference model: a small classifier with its gradient written out, in float64 by default."""

from __future__ import annotations

import math

import numpy as np


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
