"""Rows of batches: their way to the GPU from pinned memory, ahead of the step that takes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.torch.pinned import PinnedLane, Uploads
from hvdtrain.core.protocols import Control
from jobs import kit

ROUNDS, ROWS, WIDTH = 60, 257, 4099


def made(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return batch ``number``: float64 to be cast, and whole numbers."""
    return np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH) % 97 + number, np.arange(ROWS) + number


def uploads(control: Control) -> dict[str, Any]:
    """Announce each batch while the GPU computes, take it, and read it behind that.

    A step that reads before its copy has arrived, device memory given to the next batch too soon, or pinned memory
    written to while it is still copied from, gives another sum. Every seventh batch that is announced is not taken.
    """
    where = kit.device()
    way = Uploads(lambda i: where, torch.float32)
    slow = torch.randn(2048, 2048, device=where)
    base = float((np.arange(ROWS * WIDTH) % 97).sum())
    wrong = torch.zeros((), device=where, dtype=torch.float64)
    coming = made(0)
    for number in range(ROUNDS):
        batch = coming
        x, y = way.take(batch)
        assert x.device.type == "cuda" and x.dtype == torch.float32 and y.dtype == torch.int64
        batch[0][:], batch[1][:] = -1, -1  # it has been copied into pinned memory by now
        for _ in range(4):
            slow = torch.tanh(slow @ slow) * 0.5
        wrong += (x.double().sum() + slow[0, 0] * 0 - (base + number * ROWS * WIDTH)).abs()
        wrong += (y.sum() - int((np.arange(ROWS) + number).sum())).abs()
        del x, y
        coming = made(number + 1)
        way.ahead(made(1000) if number % 7 == 3 else coming)
    assert float(wrong) == 0, f"sums of {ROUNDS} batches are {float(wrong):g} off"
    assert type(way._to(0)) is PinnedLane, "memory could not be pinned; the log has the warning"
    only_s, both_s, alone_s = _overlap(way, where)
    hidden = max(0.0, min(1.0, (only_s + alone_s - both_s) / max(only_s, 1e-9)))
    return {"detail": f"{ROUNDS} batches arrived whole while the GPU computed; of 256 MiB in {1e3 * only_s:.1f} ms, "
                      f"pinning included, {hidden:.0%} are hidden behind {1e3 * alone_s:.1f} ms of products",
            "numbers": {"upload_s": only_s, "compute_s": alone_s, "both_s": both_s, "hidden": hidden}}


def _overlap(way: Uploads, where: torch.device) -> tuple[float, float, float]:
    """Seconds of an upload alone, of both at once, and of computing alone."""
    batch = (np.ones(64 << 20, np.float32),)
    a = torch.randn(4096, 4096, device=where) / 64

    def compute() -> None:
        for _ in range(60):
            a.mm(a)

    def upload() -> None:
        way.ahead(batch)
        way.take(batch)

    def both() -> None:
        compute()
        upload()

    def timed(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds[1:]))

    return timed(upload), timed(both), timed(compute)
