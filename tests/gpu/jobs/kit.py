"""Tools of all rows: the start of a rank, small models and data, a training, and the same one in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain import Config, Trainer
from hvdtrain.cluster import boot
from hvdtrain.config import CheckpointConfig, DataConfig, Named
from hvdtrain.core.launcher import launch_facts
from hvdtrain.core.protocols import Control
from torch_models import gpt

TOLERANCE = 1e-4
"""Largest difference of a weight, as a part of its tensor's largest: other cuts of a batch round otherwise."""

ON_GPU = os.environ.get("GPU_CHECK_ON") == "1"
"""As the check has found it: to ask CUDA before a rank has its device would have it see all of them."""

RATE, MOMENTUM = 0.1, 0.9


class Skipped(Exception):
    """The row cannot be run here, for the reason in words; raised by all ranks alike."""


def begin() -> Control:
    """Start the control plane, which gives this rank its device, and have float32 computed as such."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return boot.start_control(launch_facts(os.environ), 60.0)


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# --- models and data ---------------------------------------------------------------------------------------------


def decoder(**sizes: Any) -> gpt.GPT:
    """Return a small GPT, the same on every rank."""
    torch.manual_seed(1)
    return gpt.build(**{"vocab": 64, "context": 32, "width": 64, "depth": 2, "heads": 4, **sizes})


def perceptron(width: int = 96) -> nn.Sequential:
    """Return a perceptron of 32 inputs and 10 classes, the same on every rank."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


def tokens(samples: int, context: int = 32, vocab: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences x (n, T) that can be learnt, and the tokens that follow y (n, T), some of which do not count."""
    draw = np.random.default_rng(3)
    x = (draw.integers(0, vocab, (samples, 1)) + np.arange(context + 1) * draw.integers(1, 4, (samples, 1))) % vocab
    y = x[:, 1:].copy()
    y[draw.random(y.shape) < 0.1] = gpt.IGNORED
    return x[:, :-1].copy(), y


def vectors(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x float32 (n, 32) and y (n,), the largest of ten fixed combinations of x."""
    draw = np.random.default_rng(4)
    x = draw.standard_normal((samples, 32)).astype(np.float32)
    return x, (x @ draw.standard_normal((32, 10))).argmax(1)


# --- training ----------------------------------------------------------------------------------------------------


def config(control: Control, global_batch: int = 16, **keys: Any) -> Config:
    """Return a quiet configuration of SGD over unshuffled data; on GPUs gradients go over host memory.

    Ranks of this check share one GPU, which NCCL refuses.
    """
    own: dict[str, Any] = {"collectives": "shared"} if control.size > 1 else {}
    plain = Config(epochs=1, global_batch=global_batch, lr=RATE, optimizer=Named("SGD", {"momentum": MOMENTUM}),
                   data=DataConfig(shuffle=False), metrics=[], progress="off", exchange_device="cpu",
                   control_timeout_s=60.0,
                   checkpoint=CheckpointConfig(every="off", at_end=False), out=_out(), **own)
    return replace(plain, **keys)


_runs = count()


def _out() -> str:
    """Return a folder for each training of a row, of one name on all ranks."""
    return str(Path.cwd() / f"run-{next(_runs)}")


def fitted(settings: Config, model: nn.Module, data: Any, **more: Any) -> Trainer:
    """Train ``model`` in place; return the trainer, whose run tells what became of it."""
    trainer = Trainer(settings)
    trainer.fit(model, data, **more)
    return trainer


def plainly(model: nn.Module, data: tuple[np.ndarray, np.ndarray], global_batch: int, loss: Callable[..., Any],
            dtype: torch.dtype | None = None, clip: float = 0.0) -> nn.Module:
    """Train a copy of ``model`` in plain PyTorch on whole batches, on this rank's device.

    ``loss``: (model, tensors) -> (sum, weight). ``dtype``: of autocast.
    """
    own = copy.deepcopy(model).to(device())
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE, momentum=MOMENTUM)
    for first in range(0, len(data[0]), global_batch):
        batch = [torch.from_numpy(array[first:first + global_batch]).to(device()) for array in data]
        cast = torch.autocast(device().type, dtype) if dtype else contextlib.nullcontext()
        with cast:
            total, weight = loss(own, batch)
        optimizer.zero_grad()
        (total / weight).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(own.parameters(), clip)
        optimizer.step()
    return own


def classes(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Return (sum of the cross entropy, samples) of a classifier."""
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y, reduction="sum"), float(len(y))


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two models' weights and buffers, as a part of the tensor's largest value."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double().cpu() - b.double().cpu()).abs().max() / b.double().cpu().abs().max().clamp(min=1e-12))
               for a, b in pairs if a.numel())


def same(control: Control, got: nn.Module, want: nn.Module, start: nn.Module, tolerance: float = TOLERANCE) -> float:
    """Return the largest difference on any rank; AssertionError where it is too large, or nothing was learnt."""
    far = max(control.gather(apart(got, want)))
    way = min(control.gather(apart(want, start)))
    assert way > 20 * tolerance, f"training moved weights by {way:.1e} only, which tells nothing"
    assert far <= tolerance, f"weights differ by {far:.1e} of the largest, at most {tolerance:.0e}"
    return far


# --- memory ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fraction(part: float) -> Iterator[None]:
    """Within it PyTorch takes at most this part of the device's memory."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(part, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return what ``work`` gives, and the most bytes that PyTorch held of the device meanwhile, with what it cached."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    return result, int(torch.cuda.max_memory_reserved())
