"""Fingerprints of a rank's trainable tensors: a number for each flat vector, and more for each tensor where asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.core.buckets import plan_buckets, plan_some
from hvdtrain.core.protocols import Array, Ops, ParamSpec
from hvdtrain.core.protocols.types import Bucket
from hvdtrain.engine.guards.digest import digest, norm, signed_sum

VECTOR_MB = 16.0
"""Tensors are looked at in vectors of so many MiB, which is what this takes of memory."""

BITS16 = ("bfloat16", "float16")


def vectors_of(specs: list[ParamSpec], by_block: bool) -> list[Bucket]:
    """Return what tensors are looked at in, the same on every rank. ``by_block``: the model is on several devices."""
    return plan_buckets(specs, VECTOR_MB, "weights", by_block)


@dataclass(frozen=True)
class Prints:
    """Of V tensors: ``bits`` of their bytes, sums under pseudo-random weights, norms."""

    bits: list[int]
    sums: list[float]
    norms: list[float]


class Fingerprints:
    """Of the tensors ``specs``; ``flat(bucket)`` returns those of a bucket as one vector (n,) of ``ops``.

    ``by_block``: the model lies on several devices. ``some``: the indices of those to look at; all by default.
    ``buckets``: the vectors.
    """

    def __init__(self, specs: list[ParamSpec], flat: Callable[[Bucket], Array], ops: Ops, by_block: bool,
                 some: Sequence[int] | None = None) -> None:
        self._specs, self._flat, self._ops = specs, flat, ops
        self._some = range(len(specs)) if some is None else some
        self.buckets = vectors_of(specs, by_block) if some is None else plan_some(specs, some, VECTOR_MB, "weights")

    def digests(self) -> list[int]:
        """Return a digest of each vector: all are equal where all tensors have the same bits."""
        return [digest(self._host(bucket, self._flat(bucket))) for bucket in self.buckets]

    def prints(self) -> Prints:
        """Return the fingerprints of each tensor that is looked at, in the order of ``specs``."""
        bits: dict[int, int] = {}
        sums: dict[int, float] = {}
        norms: dict[int, float] = {}
        for bucket in self.buckets:
            flat_N = self._flat(bucket)
            for i, part in self.parts(bucket, self._host(bucket, flat_N)):
                bits[i] = digest(part)
            for i, part in self.parts(bucket, self.values(bucket, flat_N)):
                sums[i], norms[i] = signed_sum(part), norm(part)
        return Prints([bits[i] for i in self._some], [sums[i] for i in self._some], [norms[i] for i in self._some])

    def values(self, bucket: Bucket, flat_N: Array | None = None) -> np.ndarray:
        """Return a bucket's elements (n,) on the host, 16-bit types as float32."""
        flat_N = self._flat(bucket) if flat_N is None else flat_N
        return self._ops.to_host(self._ops.cast(flat_N, "float32") if bucket.dtype in BITS16 else flat_N)

    def _host(self, bucket: Bucket, flat_N: Array) -> np.ndarray:
        """The vector on the host, bfloat16 as its bits."""
        return self._ops.to_host(self._ops.bitcast(flat_N, "int16") if bucket.dtype == "bfloat16" else flat_N)

    def parts(self, bucket: Bucket, host_N: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (index of a tensor, its elements) of a bucket's vector."""
        for i, offset in zip(bucket.params, bucket.offsets):
            yield i, host_N[offset:offset + self._specs[i].n]
