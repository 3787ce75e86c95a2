"""Model FLOPs utilisation: what a GPT's step computes, and what a GPU could. Pure; standard library only.

FLOPs of a token: 6 for each weight of a matrix that it is multiplied with (2 forward, 4 backward; tables that are only
looked up in count as none), and 12 x depth x width x context for attention's two products, not halved for the causal
mask (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). What is recomputed does not count.
"""

from __future__ import annotations

BF16_TFLOPS = (
    ("GB200", 2500.0), ("B200", 2250.0), ("H200 NVL", 835.0), ("H200", 989.0), ("GH200", 989.0), ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0), ("H100", 989.0), ("H800", 989.0), ("H20", 148.0), ("A100", 312.0), ("A800", 312.0),
    ("A40", 149.7), ("A30", 165.0), ("A10G", 70.0), ("A10", 125.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
)
"""Dense bf16 products with fp32 sums, by a part of the driver's name; NVIDIA's data sheets of these products, whose
figures "with sparsity" are twice as high. The first that fits counts."""


def peak_tflops(device: str) -> float | None:
    """Return the peak of a device by its name, None where the table has none."""
    words = f" {device.replace('-', ' ')} "
    return next((peak for name, peak in BF16_TFLOPS if f" {name} " in words), None)


def flops_of_token(matrix_weights: int, depth: int, width: int, context: int) -> float:
    """Return the floating-point operations of a token's forward and backward."""
    return 6.0 * matrix_weights + 12.0 * depth * width * context


def mfu(device: str, tokens: int, flops: float, seconds: float) -> tuple[float | None, str]:
    """Return (utilisation, "") of a step of ``tokens`` x ``flops``, or (None, why there is none)."""
    peak = peak_tflops(device)
    if peak is None:
        return None, f"no peak is known of {device!r}"
    return tokens * flops / seconds / (peak * 1e12), ""
