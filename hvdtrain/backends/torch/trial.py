"""A batch computed for its time and memory alone: forward and backward, after which all is as it was.

Owns what has to be put back: buffers (BatchNorm statistics), random generators, gradients. Exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdtrain.backends.torch import state
from hvdtrain.protocols import Batch, Pair


def trial(model: torch.nn.Module, params: Sequence[torch.nn.Parameter], forward: Callable[[Batch], Pair],
          batch: Batch, then: Callable[[], None] | None = None) -> None:
    """Run ``forward`` and its backward once; return when the device is done. A step's hooks must not start a bucket.

    ``then``: called while the gradients are there.
    """
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    random = state.random_arrays()
    try:
        loss_sum, _ = forward(batch)
        (loss_sum / max(1, len(batch[0]))).backward()
        if loss_sum.device.type == "cuda":
            torch.cuda.synchronize(loss_sum.device)
        if then is not None:
            then()
    finally:
        state.load_random(random)
        for param in params:
            param.grad = None
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept and kept[name].shape == buffer.shape and not torch.equal(kept[name], buffer):
                    buffer.copy_(kept[name])


def first_not_finite(params: Sequence[torch.nn.Parameter]) -> int | None:
    """Index of the first of ``params`` whose gradient holds a NaN or an infinity; None where none does."""
    return next((i for i, p in enumerate(params) if p.grad is not None and not bool(p.grad.isfinite().all())), None)


def hold_bytes(n: int) -> torch.Tensor | None:
    """Memory of the device that is taken as long as the result lives; None on a CPU."""
    return torch.empty(n, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() and n else None


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device's memory did not suffice; frees what was cached for another try."""
    found = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error))
    if found and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def peak_bytes(work: Callable[[], None]) -> int:
    """Most bytes that the device held at once while ``work`` ran, all there is of this process; 0 on a CPU."""
    if not torch.cuda.is_available():
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_reserved())
