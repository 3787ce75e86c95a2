"""How `Ops.topk` finds few candidates among many: the plan of its sample. Pure; the backends do the work.

A full sort of millions to keep one per cent is a waste. The entry that stands at ``place`` in a strided sample of the
magnitudes is a threshold which somewhat more than k entries reach: only those are looked at. Where fewer than k do
(the sample was unlucky, or NaN), everything is looked at, so the answer is exact in any case. The idea of a sampled
threshold is that of Deep Gradient Compression (Lin et al., ICLR 2018, section 3).
"""

from __future__ import annotations

import math

SAMPLE = 1 << 15
"""Entries in the sample."""
LEAST = 2.0 ** -126
"""The smallest magnitude that makes a candidate: zeros do not, however many there are."""


def sample(n: int, k: int) -> tuple[int, int]:
    """Return (stride, place): the threshold is the ``place``-th largest of every ``stride``-th magnitude.

    (1, 0) where a sample is not worth it. A true top-k entry is in the sample with probability 1/stride, so their
    number there has mean q = k/stride and deviation below sqrt(q); ``place`` is a quarter and six deviations above
    the mean, because gradients are not in random order. The stride shares no small factor with a row of a weight.
    """
    if n < 4 * SAMPLE:
        return 1, 0
    stride = n // SAMPLE
    while math.gcd(stride, 2 * 3 * 5 * 7) != 1:
        stride += 1
    mean = k / stride
    place = math.ceil(1.25 * mean + 6 * math.sqrt(mean) + 8)
    return (stride, place) if place * stride <= 0.75 * n else (1, 0)
