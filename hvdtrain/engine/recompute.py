"""Micro-batches that one rank computes and another computes again, and how far their results may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.core.protocols import Array, Control, Ops
from hvdtrain.engine.weight_checks import Fingerprints
from hvdtrain.parallel import recovery
from hvdtrain.parallel.parts import ModelParts

ALIGN = 64
"""Bytes at a multiple of which every rank's arrays begin: kernels may round by where they do."""

FLOOR = 1e-2
"""Part of the root mean square over all gradients below which that of one tensor counts as this much.

The gradient of a bias before a BatchNorm is nothing but rounding.
"""

Header = list[tuple[str, tuple[int, ...], str]]


@dataclass
class Case:
    """A micro-batch's ``arrays`` (B, ...) and the state of the random generators to compute it with."""

    arrays: list[np.ndarray]
    random: dict[str, np.ndarray] = field(default_factory=dict)

    def header(self) -> Header:
        """Return name, shape and dtype of everything in it; the names of arrays are empty."""
        return [*(("", x.shape, x.dtype.str) for x in self.arrays),
                *((name, np.shape(x), np.asarray(x).dtype.str) for name, x in self.random.items())]


def case_of(micros: list[Any], random: Callable[[], dict[str, np.ndarray]], limit: int = 0) -> Case | None:
    """Return the first micro-batch that has samples, with this rank's random state; None without any.

    ``limit``: most of its samples, 0 for all. None too for arrays that are no numbers.
    """
    for micro in micros:
        arrays = [np.asarray(x) for x in recovery.parts(micro, limit)[0]]
        if len(arrays[0]) and all(x.dtype.kind in "biufc" for x in arrays):
            return Case([_aligned(x) for x in arrays], random())
    return None


def deliver(control: Control, case: Case | None, header: Header, source: int, target: int) -> Case | None:
    """Return ``source``'s case on ``target``, what this rank had elsewhere; collective."""
    if control.rank not in (source, target):
        control.send([], source, target)
        return case
    if control.rank == target:
        made = [(name, _aligned(np.empty(shape, dtype))) for name, shape, dtype in header]
        control.send([x.reshape(-1) for _, x in made], source, target)
        return Case([x for name, x in made if not name], {name: x for name, x in made if name})
    assert case is not None
    control.send([np.ascontiguousarray(x).reshape(-1) for x in (*case.arrays, *case.random.values())], source, target)
    return case


class Recomputed:
    """The gradients of a case on this rank, by parameter, as ``stage.alone`` computes them with the case's own random
    state; this rank's is put back. ``prints``: their fingerprints."""

    def __init__(self, parts: ModelParts, ops: Ops, case: Case, by_block: bool) -> None:
        own = parts.state.rank_state()
        parts.state.load_rank({**own, **case.random})
        try:
            self._grads: list[Array] = parts.stage.alone(tuple(case.arrays))
        finally:
            parts.state.load_rank(own)
        self._ops = ops
        self.prints = Fingerprints(parts.params.specs, lambda bucket: ops.pack([self._grads[i] for i in bucket.params]),
                                   ops, by_block)

    def digests(self) -> list[int]:
        """Return a digest of each 16 MiB: equal ones for equal bits."""
        return self.prints.digests()

    def far_from(self, other: Recomputed) -> tuple[float, int]:
        """Return the largest `distance` to another result of this rank's and the parameter it is in, by index."""
        return self._farthest(lambda bucket: other.prints.values(bucket))

    def compared(self, control: Control, source: int, target: int) -> tuple[float, int]:
        """Return on ``target`` the largest distance from ``source``'s result, (0, 0) elsewhere; collective."""
        def get(bucket: Any) -> np.ndarray:
            values = np.ascontiguousarray(self.prints.values(bucket))
            given = values if control.rank == source else np.empty_like(values)
            control.send([given], source, target)
            return given

        far = self._farthest(get)
        return far if control.rank == target else (0.0, 0)

    def _farthest(self, get: Callable[[Any], np.ndarray]) -> tuple[float, int]:
        vectors = [(b, self.prints.values(b)) for b in self.prints.buckets]
        with np.errstate(all="ignore"):
            squares = sum(float((x.astype(np.float64) ** 2).sum()) for _, x in vectors)
        floor = FLOOR * float(np.sqrt(squares / max(1, sum(x.size for _, x in vectors))))
        floor = floor if np.isfinite(floor) else 0.0
        worst = (0.0, 0)
        for bucket, own_N in vectors:
            other = dict(self.prints.parts(bucket, get(bucket)))
            for i, part in self.prints.parts(bucket, own_N):
                worst = max(worst, (distance(part, other[i], floor), -i))
        return worst[0], -worst[1]


def bystander(control: Control, vectors: int, source: int, target: int) -> tuple[float, int]:
    """Take part in `Recomputed.compared` of ``source`` and ``target`` as any other rank; collective."""
    for _ in range(vectors):
        control.send([], source, target)
    return 0.0, 0


def distance(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """Return the largest |a - b| of two tensors, each relative to |a| or their root mean square, what is more.

    ``floor``: the least that a difference is relative to. Infinite where one is finite and the other not. Pure.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN
        a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    if not finite.all():
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    if not a.size:
        return 0.0
    scale = np.maximum(np.abs(a), max(floor, float(np.sqrt(np.mean(a * a))), 1e-300))
    return float((np.abs(a - b) / scale).max())


def _aligned(x: np.ndarray) -> np.ndarray:
    """Return a copy of ``x`` that begins at a multiple of `ALIGN`."""
    raw = np.empty(x.nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    out = raw[start:start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


FARTHER = 8.0
"""Two ranks at this ratio of distances from a third are not both right."""


class Miscomputed(RuntimeError):
    """A device computes wrongly.

    ``ranks``: which one, or two where no third could decide; ``parameter``: whose gradient differs first; ``good``: the
    step of the last audit that they passed, -1: none in this run.
    """

    def __init__(self, text: str, ranks: tuple[int, ...], parameter: str, step: int, good: int) -> None:
        super().__init__(text)
        self.ranks, self.parameter, self.step, self.good = ranks, parameter, step, good

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.ranks, self.parameter, self.step, self.good)


def resolution(kind: str, precision: str) -> float:
    """Return the part of a gradient's element that rounding on such a device may make between different devices.

    Elements count as their tensor's root mean square at least. On GPUs float32 is multiplied in TF32 by default.
    """
    return {"bf16": 2.0**-2, "fp16": 2.0**-5}.get(precision, 2.0**-10 if kind == "cpu" else 2.0**-5)


def clearly_farther(first: float, second: float, rounding: float) -> int | None:
    """Return which of two distances from a third rank is beyond what ``rounding`` and the other one explain, or None.

    >>> clearly_farther(0.5, 0.0001, 0.001), clearly_farther(0.0, 0.9, 0.001), clearly_farther(0.5, 0.4, 0.001)
    (0, 1, None)
    """
    for which, (far, near) in enumerate(((first, second), (second, first))):
        if far > rounding and far > FARTHER * near:
            return which
    return None


def tell(accused: Sequence[str], against: Sequence[int], ranks: tuple[int, ...], parameter: str, step: int, far: float,
         good: int, unsteady: bool) -> Miscomputed:
    """Return the error for ``ranks``, spoken of as ``accused``, which differ from the ranks ``against``."""
    by = f" by {far:.1g} of its size" if 0 < far < float("inf") else ""
    how = "from the same weights, samples and random state"
    if unsteady:
        what = f"{accused[0]} does not give the same gradient twice, {how}; it differs first in {parameter}"
    elif len(ranks) == 1:
        others = f"rank{'s' if len(against) > 1 else ''} {', '.join(map(str, against))}"
        what = f"{accused[0]} computes a gradient that differs from {others}, {how}: in {parameter}{by}"
    else:
        decides = "no third rank agrees with one of them" if against else "two ranks do not show which one is right"
        what = (f"{' and '.join(accused)} compute different gradients, {how}; they differ in {parameter}{by}; "
                f"{decides}")
    them = "it" if len(ranks) == 1 else "both"
    back = f"No audit of {them} has agreed in this run: its checkpoints are not reliable"
    if good >= 0:
        back = f"An audit agreed with {them} last at step {good}: resume from a checkpoint of step {good} or before"
    return Miscomputed(f"audit at step {step}: {what}. {back}, and remove or test that device.", ranks,
                       parameter, step, good)
