"""The exponential moving average of a model's weights, over flat buckets of the parameters that this rank holds.

When an average is updated is left to `hvdtrain.engine.callbacks.ema`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from hvdtrain.checkpoint import weights
from hvdtrain.checkpoint.adapters import key
from hvdtrain.checkpoint.transfer import copied_shards
from hvdtrain.core.buckets import plan_buckets, plan_some
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Array, Ops, ParamSpec
from hvdtrain.core.protocols.run import Given, Head, Place, Read, Shard, Stateful, Want
from hvdtrain.core.protocols.types import itemsize
from hvdtrain.parallel.parts import ModelParts

GROUP = weights.AVERAGES
"""The group of a checkpoint that holds the averages, under the names of the parameters."""

_BUCKET_MB = 16.0
_NARROW = ("float16", "bfloat16")


class Final(Protocol):
    """Weights that have replaced those that training continues from; `release` and `hold` exchange them."""

    def hold(self) -> None:
        """Put the final weights into the model."""

    def release(self) -> None:
        """Undo `hold`."""


class Average:
    """``decay`` * average + (1 - ``decay``) * weights, for each trainable tensor of ``parts``; 16-bit ones in float32.

    Starts as a copy of the weights. ``rank``: of the job, to know which of several holders speaks for a tensor.
    """

    def __init__(self, parts: ModelParts, ops: Ops, decay: float, rank: int) -> None:
        self.decay, self._params = decay, parts.params
        self._buckets = plan_buckets(parts.params.specs, _BUCKET_MB)
        self._ops_of = lambda bucket: parts.ops_of_place[bucket.place] if parts.ops_of_place else ops
        self._ops_B = [self._ops_of(bucket) for bucket in self._buckets]
        self._flats: list[Array] = []
        self._weights: list[Array] = []
        lowest = {i: min(each.group.ranks) for each in parts.replicas for i in each.params(parts.params.specs)}
        self._root = rank == 0
        self._gives = [lowest.get(i, 0) == rank for i in range(len(parts.params.specs))]

    @property
    def started(self) -> bool:
        """Return whether there is an average."""
        return bool(self._flats)

    @property
    def given_bytes(self) -> int:
        """Return what this rank gives to a checkpoint."""
        return average_bytes([spec for spec, gives in zip(self._params.specs, self._gives) if gives])

    def extend(self, first: int) -> None:
        """Average the parameters from index ``first`` on too, from their values of now."""
        known, specs = len(self._buckets), self._params.specs
        new = plan_some(specs, range(first, len(specs)), _BUCKET_MB)
        self._buckets += [replace(b, index=known + b.index) for b in new]
        self._ops_B += [self._ops_of(bucket) for bucket in new]
        self._gives += [self._root] * (len(specs) - first)
        if self._flats:
            self._flats += [self._wide(i) for i in range(known, len(self._buckets))]

    def start(self) -> None:
        """Begin with the weights of now, where there is no average yet."""
        if not self._flats:
            self._flats = [self._wide(i) for i in range(len(self._buckets))]

    def update(self) -> None:
        """Move on by one update of the weights; what was the average stays as it is, a checkpoint may be reading it."""
        for i, before_N in enumerate(self._flats):
            moved_N = self._wide(i)  # a copy, written in place: a quarter of the time that new vectors take
            moved_N -= before_N
            moved_N *= 1.0 - self.decay
            moved_N += before_N
            self._flats[i] = moved_N

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the averages where the weights are, which return at the end, bit by bit; nothing before `start`."""
        if not self._flats or self._weights:
            yield
            return
        try:
            self.hold()
            yield
        finally:
            self.release()

    def hold(self) -> None:
        if self._flats and not self._weights:
            self._weights = [self._params.flat(bucket) for bucket in self._buckets]
            for bucket, flat_N, ops in zip(self._buckets, self._flats, self._ops_B):
                self._params.write(bucket, ops.cast(flat_N, bucket.dtype))

    def release(self) -> None:
        for bucket, flat_N in zip(self._buckets, self._weights):
            self._params.write(bucket, flat_N)
        self._weights = []

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, average) of the tensors that this rank speaks for, in host memory."""
        for bucket, flat_N, ops in zip(self._buckets, self._flats, self._ops_B):
            host_N = np.asarray(ops.to_host(flat_N)) if any(self._gives[i] for i in bucket.params) else np.empty(0)
            for i, offset, shape in zip(bucket.params, bucket.offsets, bucket.shapes):
                if self._gives[i]:
                    spec = self._params.specs[i]
                    yield spec.name, host_N[offset:offset + spec.n].reshape(shape)

    def holds(self, name: str) -> bool:
        """Return whether this rank has the tensor that a checkpoint calls ``name``."""
        return key(name) in {key(spec.name) for spec in self._params.specs}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Undo `arrays`, of all that this rank holds; without any there is no average. `UserError` for other shapes.

        The average of a tensor that was frozen when ``arrays`` were taken starts from its value of now.
        """
        self._flats = []
        if not arrays:
            return
        arrays = {key(name): array for name, array in arrays.items()}
        for spec in self._params.specs:
            got = arrays[key(spec.name)].shape if key(spec.name) in arrays else spec.shape
            if got != spec.shape:
                raise UserError(f"the checkpoint's moving average has {got} for {spec.name}", f"{spec.shape}",
                                "resume with the model of that run")
        self._flats = [self._with(i, arrays) for i in range(len(self._buckets))]

    def _with(self, i: int, arrays: Mapping[str, np.ndarray]) -> Array:
        """Return the weights of bucket ``i`` with ``arrays`` in the place of those that it has, by `key`."""
        bucket, ops, specs = self._buckets[i], self._ops_B[i], self._params.specs
        names = [key(specs[p].name) for p in bucket.params]
        own_N = None if all(name in arrays for name in names) else np.asarray(ops.to_host(self._wide(i)))
        return ops.from_host(np.concatenate([
            arrays[name].reshape(-1) if name in arrays or own_N is None else own_N[offset:offset + specs[p].n]
            for name, p, offset in zip(names, bucket.params, bucket.offsets)]))

    def exchange(self, flats: list[Array]) -> list[Array]:
        """Take ``flats`` as the averages, and return those before; by bucket. Not between `hold` and `release`."""
        before, self._flats = self._flats, flats
        return before

    def _wide(self, i: int) -> Array:
        """Return the weights of bucket ``i``."""
        bucket = self._buckets[i]
        flat_N = self._params.flat(bucket)
        return self._ops_B[i].cast(flat_N, "float32") if bucket.dtype in _NARROW else flat_N


def average_bytes(specs: Sequence[ParamSpec]) -> int:
    """Return the bytes of an average of these tensors."""
    return sum(spec.n * (4 if spec.dtype in _NARROW else itemsize(spec.dtype)) for spec in specs)


def averaged(average: Average | None) -> contextlib.AbstractContextManager[None]:
    """`Average.in_place`, or nothing where a run keeps no average."""
    return contextlib.nullcontext() if average is None else average.in_place()


@contextlib.contextmanager
def training_weights(final: list[Final]) -> Iterator[None]:
    """Have the weights that training continues from in the model, which has the final ones after a fit."""
    for one in reversed(final):
        one.release()
    try:
        yield
    finally:
        for one in final:
            one.hold()


def leave_final(final: list[Final]) -> None:
    """Put the weights that training continues from into the model, for good."""
    with training_weights(final):
        final.clear()


class WithAverage:
    """The state ``inner`` of a checkpoint, and beside it an average's."""

    def __init__(self, inner: Given | Stateful, average: Average) -> None:
        self._inner: Any = inner
        self._average = average

    def shards(self, place: Place | None = None) -> Iterator[Shard]:
        """Yield what ``inner`` gives, then the averages that this rank speaks for."""
        yield from self._inner.shards(place)
        yield from copied_shards(GROUP, self._average.arrays(), place)

    def rest(self) -> dict[str, Any]:
        return self._inner.rest()

    def wants(self, heads: Sequence[Head]) -> list[Want]:
        own = [one for one in heads if one.group != GROUP]
        return [*self._inner.wants(own), *(Want(GROUP, one.name, 0, one.n) for one in heads
                                           if one.group == GROUP and self._average.holds(one.name))]

    def load(self, read: Read, rest: Mapping[str, Any]) -> str:
        unfit: str = self._inner.load(read, rest)
        arrays = read(GROUP)
        self._average.load(arrays)
        without = "" if arrays else "the checkpoint holds no moving average: the average starts from its weights"
        return "; ".join(filter(None, (unfit, without)))
