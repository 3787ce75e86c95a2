"""Memory and operations of a PyTorch process: shortages, peaks, sizes of model, optimizer and pass, profiler.

Plans are `hvdtrain.planning.memory`'s, recovery is `hvdtrain.engine`'s.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.backends.torch.optimizer import TorchOptimizer
from hvdtrain.core.protocols import Batch
from hvdtrain.core.timeline.spans import KERNEL, Marks, Span
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.planning.memory.forecast import MemoryTrace, Model, Slots

LIBRARIES = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|\bout of memory\b|"
    r"(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED|CUFFT_ALLOC_FAILED|"
    # cuDNN where memory for its workspace lacks: no convolution fits any more
    r"CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine to execute this computation|"
    r"Unable to find a valid cuDNN algorithm", re.IGNORECASE)
"""What a RuntimeError says where memory does not suffice."""

WIRES = re.compile(r"nccl|horovod|gloo|\bMPI_", re.IGNORECASE)
"""What an error of a transport says."""


def hold_bytes(n: int) -> torch.Tensor | None:
    """Take memory of the device for as long as the result lives; None on a CPU."""
    return torch.empty(n, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() and n else None


def out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means too little memory of device or host; frees what was cached.

    Beside PyTorch's own class these are RuntimeErrors of the CPU's allocator and of libraries that allocate themselves
    (`LIBRARIES`). A shortage in a transport does not count: its ranks are no longer at one place.
    """
    found = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and bool(LIBRARIES.search(str(error))) and not WIRES.search(
            f"{type(error).__name__} {error}"))
    if found:
        free_cached()
    return found


def free_cached() -> None:
    """Return memory to the device that PyTorch caches for tensors to come."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(work: Callable[[], None]) -> int:
    """Return the most bytes that the device held at once while ``work`` ran, with all of this process; 0 on a CPU."""
    if not torch.cuda.is_available():
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_reserved())


def peak_so_far() -> int:
    """Return the most bytes that the device has held at once in this process; 0 on a CPU."""
    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else 0


def model_bytes(parts: ModelParts) -> Model:
    """Return the sizes of a model and its optimizer before the first step."""
    params: Any = parts.params
    own = {id(t) for t in params.tensors}
    others = [t for t in (*parts.model.parameters(), *parts.model.buffers()) if id(t) not in own]
    optimizer: Any = parts.optimizer
    return Model(params.specs, sum(t.nbytes for t in others), slots_of(optimizer, params.tensors),
                 elementwise=optimizer.elementwise and optimizer.adopted is None,  # that of Keras is not divided
                 norm_channels=tuple(module.num_features for module in parts.model.modules()
                                     if isinstance(module, _BatchNorm)))


def state_now(parts: ModelParts) -> int:
    """Return the bytes of the optimizer's state that are there already."""
    optimizer: Any = parts.optimizer
    return sum(v.nbytes for entries in optimizer.optimizer.state.values() for v in entries.values()
               if isinstance(v, torch.Tensor))


def slots_of(optimizer: TorchOptimizer, tensors: Sequence[torch.Tensor]) -> list[Slots]:
    """Return the state that ``optimizer``, or one of its kind, keeps of each of ``tensors``.

    Found by one update: of one element of each type where each element is updated alone, else of tensors of the same
    shapes without memory (PyTorch's meta device). A compiled Keras model's optimizer has made its own.
    """
    if optimizer.adopted is not None:
        return [_slots(t, optimizer.optimizer.state.get(t, {})) for t in optimizer.tensors]
    if optimizer.elementwise:
        tensors = [torch.empty(1, dtype=t.dtype) for t in tensors]
    # An update on the meta device imports PyTorch's compiler, which takes over 1 s.
    standing, state = _updated(optimizer, tensors, ("cpu",) if optimizer.elementwise else ("meta", "cpu"))
    slots = {id(t): _slots(t, state.get(t, {})) for t in standing}
    return [slots[id(t)] for t in standing]


def _updated(optimizer: TorchOptimizer, tensors: Sequence[torch.Tensor],
             devices: Sequence[str]) -> tuple[Sequence[torch.Tensor], Any]:
    """Return placeholders for ``tensors`` and their state after one update on the first of ``devices`` that can.

    On the CPU placeholders are small. An optimizer that fails on every device counts as one without state.
    """
    for where in devices:
        try:
            alike = {(tuple(t.shape), t.dtype): torch.nn.Parameter(torch.zeros(
                t.shape if where == "meta" else (2,) * t.dim(), dtype=t.dtype, device=where)) for t in tensors}
            made = optimizer.optimizer_spec.plain().make(optimizer.config, (), list(alike.values()), optimizer.base_lr)
            for param in alike.values():
                param.grad = torch.zeros_like(param)
            made.step()
        except Exception:  # an optimizer of the user's; kernels that the meta device lacks
            continue
        return [alike[tuple(t.shape), t.dtype] for t in tensors], made.state
    return tensors, {}


def _slots(tensor: torch.Tensor, entries: dict[str, Any]) -> Slots:
    held = [v for v in entries.values() if isinstance(v, torch.Tensor)]
    shaped = sum(v.element_size() for v in held if v.shape == tensor.shape and v.dim())
    return Slots(shaped, sum(v.nbytes for v in held if v.shape != tensor.shape or not v.dim()))


def traced(parts: ModelParts, batch: Batch) -> MemoryTrace:
    """Compute the gradient of ``batch`` for its memory alone; return what was alive at each moment."""
    params: Any = parts.params
    live = _Live()
    hooks = [param.register_post_accumulate_grad_hook(live.made(i)) for i, param in enumerate(params.tensors)]
    try:
        with live:
            parts.stage.trial(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return MemoryTrace(len(batch[0]), np.array(live.after, np.int64), tuple(live.gradients))


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that are made within it, as long as they live, beside gradients.

    ``after``: bytes after each allocation. ``gradients``: (allocations before, index) of each gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []
        self.gradients: list[tuple[int, int]] = []
        self._bytes: dict[int, int] = {}
        self._live = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._bytes:
                    self._count(storage)
        return out

    def _count(self, storage: Any) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        self._bytes[key] = n_bytes
        self._live += n_bytes
        self.after.append(self._live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._live -= self._bytes.pop(key, 0)

    def made(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that takes the gradient of parameter ``index`` out of the count."""
        def hook(param: torch.Tensor) -> None:
            key = param.grad.untyped_storage()._cdata if param.grad is not None else 0
            self._live -= self._bytes.get(key, 0)
            self._bytes[key] = 0
            self.gradients.append((len(self.after), index))
        return hook


def held(parts: ModelParts) -> dict[str, int | None]:
    """Return the bytes of parameters (and buffers), gradients and optimizer state of this rank, on all its devices.

    Tensors that share memory, such as gradients in the flat memory of their buckets, count once. Between two steps.
    """
    params: Any = parts.params
    model: Any = parts.model
    return {"parameters": _storages([*model.parameters(), *model.buffers(), *params.tensors]),
            "gradients": _storages(p.grad for p in params.tensors if p.grad is not None), "state": state_now(parts)}


def _storages(tensors: Iterable[torch.Tensor]) -> int:
    found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(found.values())


def allocators() -> list[dict[str, Any]]:
    """Return the statistics of PyTorch's allocator for each GPU of this process; [] without a GPU.

    ``allocated_bytes``: in tensors; ``reserved_bytes``: taken from the device; ``peak_bytes``: most in tensors since
    the start. ``fragmentation``: share of reserved that lies free between tensors in blocks that cannot be returned
    (inactive_split_bytes of `torch.cuda.memory_stats`). ``retries``: times that the allocator returned all it kept.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [_allocator(torch.cuda.memory_stats(i)) for i in range(torch.cuda.device_count())]


def _allocator(stats: dict[str, Any]) -> dict[str, Any]:
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    split = int(stats.get("inactive_split_bytes.all.current", 0))
    return {"allocated_bytes": int(stats.get("allocated_bytes.all.current", 0)), "reserved_bytes": reserved,
            "peak_bytes": int(stats.get("allocated_bytes.all.peak", 0)),
            "fragmentation": round(split / reserved, 4) if reserved else 0.0,
            "retries": int(stats.get("num_alloc_retries", 0))}


_MARK, _WARM = "hvdtrain mark", "hvdtrain start"


class Profiler:
    """Implements `hvdtrain.core.timeline.spans.Profiler` for PyTorch."""

    def __init__(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._marks = Marks(lambda: torch.profiler.record_function(_MARK))
        self.within_s = 0.0

    def start(self) -> None:
        """Begin; takes seconds the first time on a GPU."""
        self._profile.start()
        with torch.profiler.record_function(_WARM):  # the first takes milliseconds
            pass
        self._marks.put()

    def stop(self) -> list[Span]:
        self._marks.put()
        self._profile.stop()
        found = [(e.name, _lane(e), e.time_range.start, e.time_range.end, _cause(e)) for e in self._profile.events()]
        shift_s, self.within_s = self._marks.shift([begin / 1e6 for name, _, begin, _, cause in found
                                                    if name == _MARK and cause != KERNEL])
        return [Span(name, lane, begin / 1e6 + shift_s, end / 1e6 + shift_s, cause)
                for name, lane, begin, end, cause in found if name not in (_MARK, _WARM)]


def ranges() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Return functions that begin and end an NVTX range, which Nsight Systems shows beside the kernels of a GPU."""
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop


def _lane(event: Any) -> str:
    if event.device_type == torch.autograd.DeviceType.CPU:
        return f"torch thread {event.thread}"
    return f"gpu {event.device_index} stream {event.device_resource_id}"


def _cause(event: Any) -> str:
    return "torch" if event.device_type == torch.autograd.DeviceType.CPU else KERNEL


_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)
_PRODUCTS = re.compile(r"rnn|lstm|gru|attention|conv(?!ert)|matmul|(^|_)(add|badd)?b?mm(_|$)|(^|mkldnn_)linear")
"""Names of operations that hold products, some of which PyTorch's counter takes for none."""


class _UncountedProducts(TorchDispatchMode):
    """Notes operations whose products are not counted: recurrent layers in one kernel, and operations of others."""

    def __init__(self, counted: Container[Any]) -> None:
        super().__init__()
        self._counted = counted
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if func._overloadpacket not in self._counted and (
                space not in ("aten", "prim", "profiler") or _PRODUCTS.search(name.partition(".")[0])):
            self.uncounted.add(func.name())
        return func(*args, **(kwargs or {}))


def product_type(parts: ModelParts) -> str:
    """Return the type of most products: "bf16", "fp16", "tf32" or "fp32"; "" for another type."""
    if parts.precision.own != "fp32":
        return parts.precision.own
    params: Any = parts.params
    sizes: dict[torch.dtype, int] = {}
    for tensor in params.tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    if not sizes:  # a rank's part of a model, without parameters
        return "fp32"
    most = max(sizes, key=lambda dtype: sizes[dtype])
    if most != torch.float32:
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(most, "")
    convolves = any(isinstance(m, _CONVOLUTIONS) for m in parts.model.modules())
    rounds = torch.backends.cuda.matmul.allow_tf32 or convolves and torch.backends.cudnn.allow_tf32
    return "tf32" if rounds else "fp32"


def flops_of_pass(parts: ModelParts, batch: Batch) -> tuple[float | None, str]:
    """Return (operations of one sample's forward and backward, "") or (None, why); restores everything.

    Blocks are neither recomputed nor compiled meanwhile: that adds to a model's operations, and hides them. Attention
    is computed by plain products, since its fused backward repeats some of forward's.
    """
    recomputed, compiled = _off(parts)
    counter = FlopCounterMode(display=False)
    seen = _UncountedProducts(counter.flop_registry)
    try:
        with sdpa_kernel(SDPBackend.MATH), counter, seen:
            parts.stage.trial(batch)
    finally:
        if parts.remat is not None and recomputed:
            parts.remat.choose(recomputed)
        if parts.compile is not None and compiled:
            parts.compile.use(compiled)
    if seen.uncounted:
        return None, f"PyTorch does not count {sorted(seen.uncounted)[0]}"
    total = counter.get_total_flops()
    return (total / len(batch[0]), "") if total else (None, "PyTorch counts no operation")


def _off(parts: ModelParts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Switch recomputing and compiling off; return (blocks that were recomputed, options of compile in use)."""
    recomputed = parts.remat.chosen if parts.remat is not None else ()
    compiled = tuple(getattr(parts.compile, "chosen", ())) if parts.compile is not None else ()
    if recomputed and parts.remat is not None:
        parts.remat.choose(())
    if compiled and parts.compile is not None:
        parts.compile.use(())
    return recomputed, compiled


def flops_of_graphs(parts: ModelParts, dp: object) -> tuple[float | None, str]:
    """Return (None, ""): a pass is counted instead."""
    return None, ""
