"""What backends compute with, as the seams call it: `numpy.ndarray`, `torch.Tensor` or `tf.Tensor`."""

from __future__ import annotations

from typing import Any


Array = Any
Batch = tuple[Any, ...]
Pair = tuple[Any, Any]
