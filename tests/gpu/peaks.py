"""Model FLOPs utilisation: what a GPT's step computes, and what a GPU could. Pure; standard library only.

FLOPs of a token: 6 for each weight of a matrix that it is multiplied with (2 forward, 4 backward; tables that are only
looked up in count as none), and 12 x depth x width x context for attention's two products, not halved for the causal
mask (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). What is recomputed does not count.
"""

from __future__ import annotations

from hvdtrain.engine.machine import peak_tflops


def flops_of_token(matrix_weights: int, depth: int, width: int, context: int) -> float:
    """Return the floating-point operations of a token's forward and backward."""
    return 6.0 * matrix_weights + 12.0 * depth * width * context


def mfu(device: str, tokens: int, flops: float, seconds: float) -> tuple[float | None, str]:
    """Return (utilisation, "") of a step of ``tokens`` x ``flops``, or (None, why there is none)."""
    peak = peak_tflops(device)
    if peak is None:
        return None, f"no peak is known of {device!r}"
    return tokens * flops / seconds / (peak * 1e12), ""
