"""Shards of tensors, cut in any way over any ranks, put together to whole arrays. Pure.

Owns the check that every element came exactly once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.checkpoint.manifest import CheckpointError
from hvdtrain.protocols.state import Head, Shard


def head(shard: Shard) -> Head:
    """The head of a shard."""
    return Head(shard.group, shard.name, shard.shape, shard.values.dtype.str, shard.begin, shard.values.size)


@dataclass
class _Tensor:
    """A tensor that is being put together: ``flat`` (n,), and which spans [begin, end) of it have come."""

    shape: tuple[int, ...]
    flat: np.ndarray
    spans: list[tuple[int, int]] = field(default_factory=list)


class Assembly:
    """Takes shards in any order, by `add` or `place`; `finish` returns the whole arrays."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], _Tensor] = {}
        self._faults: list[str] = []

    def add(self, shard: Shard) -> None:
        """Take a shard: the first that is a whole tensor is kept as it is, the values of others are copied."""
        key, n = (shard.group, shard.name), shard.values.size
        if key not in self._tensors and shard.begin == 0 and n == math.prod(shard.shape):
            self._tensors[key] = _Tensor(shard.shape, shard.values, [(0, n)])
        else:
            self.place(head(shard))[...] = shard.values

    def place(self, head: Head) -> np.ndarray:
        """Return the memory (n,) that a shard's values belong into.

        Where the shard does not fit that memory is of no use, and `finish` raises.
        """
        key, end = (head.group, head.name), head.begin + head.n
        if key not in self._tensors:
            self._tensors[key] = _Tensor(head.shape, np.empty(math.prod(head.shape), head.dtype))
        whole = self._tensors[key]
        fault = _fault(whole, head)
        if fault:
            self._faults.append(f"{head.name!r} of group {head.group!r}: {fault}")
            return np.empty(head.n, head.dtype)
        whole.spans.append((head.begin, end))
        return whole.flat[head.begin:end]

    def finish(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the arrays by group and name; `CheckpointError` unless each element of each came exactly once."""
        tensors: dict[str, dict[str, np.ndarray]] = {}
        for (group, name), whole in self._tensors.items():
            lacking = whole.flat.size - sum(end - begin for begin, end in whole.spans)  # they do not overlap
            if lacking:
                self._faults.append(f"{name!r} of group {group!r}: {lacking} of {whole.flat.size} elements are missing")
            tensors.setdefault(group, {})[name] = whole.flat.reshape(whole.shape)
        if self._faults:
            raise CheckpointError(got=f"the ranks' shards do not make whole tensors; {'; '.join(self._faults[:3])}",
                                  expected="every element from exactly one rank", do="correct what gave these shards")
        return tensors


def _fault(whole: _Tensor, head: Head) -> str:
    """What keeps a shard from being a further part of ``whole``, in words, or ""."""
    end, dtype = head.begin + head.n, np.dtype(head.dtype)
    if (head.shape, dtype) != (whole.shape, whole.flat.dtype):
        return f"it came as {whole.flat.dtype}{list(whole.shape)} and as {dtype}{list(head.shape)}"
    if not 0 <= head.begin <= end <= whole.flat.size:
        return f"elements {head.begin} to {end} of {whole.flat.size}"
    if any(begin < end and head.begin < stop for begin, stop in whole.spans):
        return f"some of the elements {head.begin} to {end} came twice"
    return ""
