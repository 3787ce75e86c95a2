"""How many operations a sample costs a PyTorch model, by PyTorch's own counter around one small pass."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.core.protocols import Batch
from hvdtrain.parallel.parts import ModelParts

_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)
_PRODUCTS = re.compile(r"rnn|lstm|gru|attention|conv(?!ert)|matmul|(^|_)(add|badd)?b?mm(_|$)|(^|mkldnn_)linear")
"""Names of operations that hold products, some of which PyTorch's counter takes for none."""


class _Seen(TorchDispatchMode):
    """Notes operations whose products are not counted: recurrent layers in one kernel, and operations of others."""

    def __init__(self, counted: Container[Any]) -> None:
        super().__init__()
        self._counted = counted
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        space, _, name = func.name().partition("::")
        if func._overloadpacket not in self._counted and (
                space not in ("aten", "prim", "profiler") or _PRODUCTS.search(name.partition(".")[0])):
            self.uncounted.add(func.name())
        return func(*args, **(kwargs or {}))


def product_type(parts: ModelParts) -> str:
    """Return what most products are made in: "bf16", "fp16", "tf32" or "fp32"; "" for another type."""
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
    """Return (operations of one sample's forward and backward, "") or (None, why); all is as before then.

    Nothing is recomputed and nothing compiled meanwhile: that adds to a model's operations, and hides them. Attention
    is computed by plain products, since its fused backward makes some of forward's again.
    """
    recomputed, compiled = _off(parts)
    counter = FlopCounterMode(display=False)
    seen = _Seen(counter.flop_registry)
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
    """Compute plainly; return (blocks that were recomputed, ways of compiling that were used)."""
    recomputed = parts.remat.chosen if parts.remat is not None else ()
    compiled = tuple(getattr(parts.compile, "chosen", ())) if parts.compile is not None else ()
    if recomputed and parts.remat is not None:
        parts.remat.choose(())
    if compiled and parts.compile is not None:
        parts.compile.use(())
    return recomputed, compiled


def flops_of_graphs(parts: ModelParts, dp: object) -> tuple[float | None, str]:
    """Return nothing: a pass tells."""
    return None, ""
