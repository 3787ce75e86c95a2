"""Fusion: which parameters share one flat vector, so that one collective moves them together.

Owns the plan (pure data). Does not allocate or send; a backend allocates, the reducer sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hvdtrain.core.protocols.types import Bucket, ParamSpec, itemsize
from hvdtrain.core.units import MIB

ALIGNMENT = 64
"""Bytes at a multiple of which a tensor must begin for TensorFlow to read it where it lies."""


def plan_buckets(params: Sequence[ParamSpec], bucket_mb: float, group: str = "world",
                 by_block: bool = False, aligned: bool = False, first_mb: float = math.inf) -> list[Bucket]:
    """Group parameters into buckets of at most ``bucket_mb`` MiB, last parameter first.

    Backward produces gradients roughly from the last layer to the first, so in this order bucket 0 fills first
    and its sum overlaps the rest of backward. One bucket has one dtype and lies on one device; a parameter
    larger than ``bucket_mb`` gets a bucket of its own. ``group``: who sums them. ``by_block``: no bucket crosses a
    block of the model, whose blocks may lie on other devices or ranks. ``aligned``: within a bucket those come last
    whose bytes are no multiple of `ALIGNMENT`, so that all others begin at one. ``first_mb``: bucket 0 is closed once
    it holds so much, so that a transport which overlaps with backward begins early.
    Source: gradient bucketing in PyTorch DDP (Li et al., VLDB 2020, arXiv 2006.15704).
    """
    limit = bucket_mb * MIB
    groups: list[list[int]] = []
    open_group: dict[tuple[str, int, int], int] = {}
    filled: list[float] = []
    for i in reversed(range(len(params))):
        size = params[i].n * itemsize(params[i].dtype)
        kind = params[i].dtype, params[i].place, params[i].block if by_block else 0
        g = open_group.get(kind)
        if g is None or filled[g] + size > limit:
            g = open_group[kind] = len(groups)
            groups.append([])
            filled.append(0)
        groups[g].append(i)
        filled[g] += size
        if g == 0 and filled[0] >= first_mb * MIB:
            del open_group[kind]
    if aligned:
        groups = [sorted(members, key=lambda i: params[i].n * itemsize(params[i].dtype) % ALIGNMENT != 0)
                  for members in groups]
    return [_bucket(index, members, params, group) for index, members in enumerate(groups)]


def plan_some(params: Sequence[ParamSpec], own: Sequence[int], bucket_mb: float, group: str = "world",
              aligned: bool = False, first: int = 0, first_mb: float = math.inf) -> list[Bucket]:
    """Group the parameters at the indices ``own`` alone, as `plan_buckets` does; the buckets count from ``first``."""
    return [replace(bucket, index=first + bucket.index, first=first, params=tuple(own[i] for i in bucket.params))
            for bucket in plan_buckets([params[i] for i in own], bucket_mb, group, aligned=aligned,
                                       first_mb=first_mb)]


def more_buckets(buckets: Sequence[Bucket], params: Sequence[ParamSpec], first: int) -> list[Bucket]:
    """Return buckets for the parameters from index ``first`` on, to follow ``buckets``, none larger than theirs."""
    largest = max(bucket.nbytes for bucket in buckets)
    new = plan_some(params, range(first, len(params)), largest / MIB, buckets[0].group)
    return [replace(bucket, index=len(buckets) + bucket.index, first=buckets[0].first) for bucket in new]


def _bucket(index: int, members: Sequence[int], params: Sequence[ParamSpec], group: str) -> Bucket:
    sizes = [params[i].n for i in members]
    ends = np.cumsum(sizes)
    return Bucket(index=index, params=tuple(members), shapes=tuple(params[i].shape for i in members),
                  offsets=tuple(int(e - s) for e, s in zip(ends, sizes)), n=int(ends[-1]),
                  dtype=params[members[0]].dtype, place=params[members[0]].place, group=group)
