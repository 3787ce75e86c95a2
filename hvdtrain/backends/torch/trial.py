"""What a batch that is computed for its time and memory alone leaves behind: nothing.

Owns what has to be put back: buffers (BatchNorm statistics), parameters that forward passes write, a module's
attributes (counters), random generators, gradients. Exchanges nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from hvdtrain.backends.torch.buffers import remember
from hvdtrain.backends.torch.entries import assign, written_parameters
from hvdtrain.backends.torch.generators import Generators
from hvdtrain.backends.torch.recompute.memory import Modules, attributes_kept


LIBRARIES = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|\bout of memory\b|"
    r"(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED|CUFFT_ALLOC_FAILED|"
    # cuDNN where memory for its workspace lacks: no convolution fits any more
    r"CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine to execute this computation|"
    r"Unable to find a valid cuDNN algorithm", re.IGNORECASE)
"""What a RuntimeError says where memory does not suffice."""

WIRES = re.compile(r"nccl|horovod|gloo|\bMPI_", re.IGNORECASE)
"""What an error of a wire says."""


@contextlib.contextmanager
def untouched(model: torch.nn.Module, params: Sequence[torch.Tensor], generators: Generators) -> Iterator[None]:
    """Put back buffers, attributes, random generators and parameters that forward passes write; drop gradients."""
    put_back, written = remember(model), [(p, p.detach().clone()) for p in written_parameters(model)]
    try:
        with generators.kept(), attributes_kept(Modules(model)):
            yield
    finally:
        for param in params:
            param.grad = None
        put_back()
        for param, value in written:
            assign(param, value)


def first_not_finite(params: Sequence[torch.Tensor]) -> int | None:
    """Index of the first of ``params`` whose gradient holds a NaN or an infinity; None where none does."""
    return next((i for i, p in enumerate(params) if p.grad is not None and not bool(p.grad.isfinite().all())), None)


def hold_bytes(n: int) -> torch.Tensor | None:
    """Memory of the device that is taken as long as the result lives; None on a CPU."""
    return torch.empty(n, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() and n else None


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory of the device or the host did not suffice; frees what was cached.

    Beside PyTorch's own class these are RuntimeErrors of the CPU's allocator and of libraries that make memory for
    themselves (`LIBRARIES`). What a wire says of its own memory is none: its ranks are no longer at one place.
    """
    found = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and bool(LIBRARIES.search(str(error))) and not WIRES.search(
            f"{type(error).__name__} {error}"))
    if found:
        free_cached()
    return found


def free_cached() -> None:
    """Give memory back to the device that PyTorch keeps for tensors to come."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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


def peak_so_far() -> int:
    """Most bytes that the device has held at once in this process; 0 on a CPU."""
    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else 0
