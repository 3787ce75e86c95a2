"""Rows of speed: a GPT in bf16 against plain PyTorch, and what `compile: auto` chooses."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import peaks
import torch

from hvdtrain.cluster.devices import cpu_facts
from hvdtrain.config import Named
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.engine.callbacks.base import Callback
from jobs import kit
from torch_models import gpt

WARM, TIMED, TURNS = 4, 8, 3
"""Steps before the clock starts, steps on it, and turns of each contender."""

ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1}


class Clock(Callback):
    """Mean seconds of the steps after the first ``WARM``, with all that the device has to do for them."""

    where = "all"

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin = 0.0

    def step_end(self, run: Any) -> None:
        """Start and stop behind all that was queued."""
        if run.state.cursor.step in (WARM, WARM + TIMED):
            settle()
            now = time.perf_counter()
            self.seconds, self._begin = (now - self._begin) / TIMED, now


def settle() -> None:
    """Wait for the device."""
    if kit.ON_GPU:
        torch.cuda.synchronize()


def sizes() -> tuple[dict[str, int], int]:
    """Return a GPT's sizes and the sequences of a step: 100M parameters on a GPU, few on a CPU."""
    if not kit.ON_GPU:
        return {"vocab": 64, "context": 32, "width": 64, "depth": 2, "heads": 4}, 8
    memory = torch.cuda.get_device_properties(0).total_memory >> 30
    batch = 32 if memory >= 36 else 16 if memory >= 20 else 8 if memory >= 12 else 4
    return {"vocab": 8192, "context": 1024, "width": 768, "depth": 12, "heads": 12}, batch


def ours(control: Control, size: dict[str, int], batch: int, data: Any, **keys: Any) -> tuple[float, Any]:
    """Return the seconds of a step of hvdtrain's, and its run."""
    clock = Clock()
    args = {"weight_decay": ADAMW["weight_decay"], **({"fused": True} if kit.ON_GPU else {})}
    settings = kit.config(control, batch, precision="bf16", optimizer=Named("AdamW", args), lr=ADAMW["lr"], **keys)
    run = kit.fitted(settings, kit.decoder(**size), data, callbacks=[clock]).run
    return clock.seconds, run


def plain(size: dict[str, int], batch: int, data: Any) -> float:
    """Return the seconds of a step in plain PyTorch: autocast, the same task and optimizer, data from host memory."""
    model = kit.decoder(**size).to(kit.device())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=kit.ON_GPU)
    begin = 0.0
    for step in range(WARM + TIMED):
        if step == WARM:
            settle()
            begin = time.perf_counter()
        tensors = [torch.from_numpy(a[step * batch:(step + 1) * batch]).to(kit.device()) for a in data]
        optimizer.zero_grad()
        with torch.autocast(kit.device().type, torch.bfloat16):
            loss_sum, weight = gpt.task(model, tensors)
        (loss_sum / weight).backward()
        optimizer.step()
    settle()
    return (time.perf_counter() - begin) / TIMED


def matrix_weights(model: torch.nn.Module) -> int:
    """Return the weights of linear layers."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def name_of_device() -> str:
    """Return the driver's name of the GPU, or the processor's."""
    return torch.cuda.get_device_name(0) if kit.ON_GPU else cpu_facts().name


def compile_auto(control: Control) -> dict[str, Any]:
    """Train with `compile: auto` and without."""
    size, batch = sizes()
    data = kit.tokens(batch * (WARM + TIMED), size["context"], size["vocab"])
    try:
        auto_s, run = ours(control, size, batch, data, compile="auto")
    except UserError as error:
        raise kit.Skipped(f"compile auto is refused here: {error}") from error
    if not hasattr(run.parts, "compile"):
        raise kit.Skipped("this tree compiles no models yet")
    off_s, other = ours(control, size, batch, data)
    far = kit.apart(run.spec.model, other.spec.model)
    assert far < 0.05, f"weights differ by {far:.1e} from the uncompiled run's"
    choice = run.parts.describe().get("compile", "left as it is")
    return {"detail": f"{choice}; {1e3 * auto_s:.1f} ms a step, uncompiled {1e3 * off_s:.1f}; weights within {far:.0e} "
                      "of the uncompiled run's",
            "numbers": {"auto_s": auto_s, "off_s": off_s, "apart": far}}


def gpt_100m(control: Control) -> dict[str, Any]:
    """Time the two in turns; tell medians, and what part of the device's peak they are."""
    size, batch = sizes()
    data = kit.tokens(batch * (WARM + TIMED), size["context"], size["vocab"])
    turns = []
    for _ in range(TURNS):
        turns.append((ours(control, size, batch, data)[0], plain(size, batch, data)))
        if kit.ON_GPU:
            torch.cuda.empty_cache()
    ours_s, plain_s = (float(np.median(column)) for column in zip(*turns))
    model = kit.decoder(**size)
    weights = sum(p.numel() for p in model.parameters())
    flops = peaks.flops_of_token(matrix_weights(model), size["depth"], size["width"], size["context"])
    name, tokens = name_of_device(), batch * size["context"]
    part, why = peaks.mfu(name, tokens, flops, ours_s)
    other = peaks.mfu(name, tokens, flops, plain_s)[0]
    told = why or f"MFU {part:.1%} against {other:.1%} of {peaks.peak_tflops(name):g} TFLOPS"
    detail = (f"{weights / 1e6:.1f}M parameters, {batch} x {size['context']} tokens: {1e3 * ours_s:.1f} ms a step, "
              f"plain PyTorch {1e3 * plain_s:.1f} ({ours_s / plain_s:.2f}x); {told}")
    if not kit.ON_GPU:
        detail = f"a small one, of {weights / 1e6:.1f}M parameters, ran in both; on a CPU its times tell nothing"
    return {"detail": detail,
            "numbers": {"ours_s": ours_s, "plain_s": plain_s, "turns": turns, "mfu": part, "mfu_plain": other,
                        "parameters": weights, "tokens": tokens, "flops_of_token": flops, "device": name}}
