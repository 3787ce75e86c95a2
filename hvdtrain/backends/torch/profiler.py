"""torch.profiler's events as spans of a trace, and the operations of a sample by PyTorch's own counter.

Peaks of devices are `hvdtrain.engine.machine`'.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.core.protocols import Batch
from hvdtrain.core.timeline.spans import KERNEL, Marks, Span
from hvdtrain.parallel.parts import ModelParts

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
