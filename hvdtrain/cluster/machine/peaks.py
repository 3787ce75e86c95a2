"""How many floating-point operations a second a GPU could make, by its name and by what it multiplies in.

Owns the one table. Dense products; figures "with sparsity" are twice as high. As NVIDIA's data sheets have them, for
GeForce its architecture papers (products with fp32 sums); the columns tf32 and fp32 and the rows V100, T4 and RTX were
written down from memory and not checked against those: the key ``peak_tflops`` takes the place of any of them.
Standard library only: the check of GPUs reads it, too.
"""

from __future__ import annotations

TYPES = ("bf16", "fp16", "tf32", "fp32")
"""fp32: without tensor cores."""

TFLOPS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    ("GB200", (2500.0, 2500.0, 1250.0, 80.0)), ("B200", (2250.0, 2250.0, 1125.0, 75.0)),
    ("H200 NVL", (835.0, 835.0, 417.5, 60.0)), ("H200", (989.0, 989.0, 494.5, 67.0)),
    ("GH200", (989.0, 989.0, 494.5, 67.0)), ("H100 NVL", (835.0, 835.0, 417.5, 60.0)),
    ("H100 PCIe", (756.0, 756.0, 378.0, 51.0)), ("H100", (989.0, 989.0, 494.5, 67.0)),
    ("H800", (989.0, 989.0, 494.5, 67.0)), ("H20", (148.0, 148.0, 74.0, 44.0)),
    ("A100", (312.0, 312.0, 156.0, 19.5)), ("A800", (312.0, 312.0, 156.0, 19.5)),
    ("A40", (149.7, 149.7, 74.8, 37.4)), ("A30", (165.0, 165.0, 82.0, 10.3)), ("A10G", (70.0, 70.0, 35.0, None)),
    ("A10", (125.0, 125.0, 62.5, 31.2)), ("L40S", (362.0, 362.0, 183.0, 91.6)), ("L40", (181.0, 181.0, 90.5, 90.5)),
    ("L4", (121.0, 121.0, 60.0, 30.3)), ("V100 PCIE", (None, 112.0, None, 14.0)), ("V100", (None, 125.0, None, 15.7)),
    ("T4", (None, 65.0, None, 8.1)), ("RTX 4090", (165.2, 165.2, 82.6, 82.6)), ("RTX 3090", (71.0, 71.0, 35.6, 35.6)),
)
"""Tera-operations a second in each of `TYPES`, by words of the driver's name; the first that fits counts."""


def peak_tflops(device: str, kind: str = "bf16") -> float | None:
    """Return the peak of ``device`` for products in ``kind``, one of `TYPES`; None where the table has none.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA A100-SXM4-80GB", "fp32"), peak_tflops("Xeon")
    (989.0, 19.5, None)
    """
    words = f" {device.replace('-', ' ')} ".lower()
    row = next((peaks for name, peaks in TFLOPS if f" {name.lower()} " in words), None)
    return row[TYPES.index(kind)] if row is not None and kind in TYPES else None
