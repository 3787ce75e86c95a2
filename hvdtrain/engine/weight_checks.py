"""Checks of weights and gradients: digests by which ranks compare them, and whether they are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hvdtrain.core.buckets import plan_buckets, plan_some
from hvdtrain.core.comparison import Origin, finite, has_nan, plain_name
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Array, Control, Ops, ParamSpec
from hvdtrain.core.protocols.types import Bucket, StepBatch
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.recovery import Recovery

COLUMNS = 1021
"""A prime, so that what repeats in a tensor's rows does not fall into one column."""


def digest(x: np.ndarray) -> int:
    """Return 64 bits of the bytes of ``x``: equal for equal bytes, other ones for others but for one chance in 2^64.

    Words of 32 bits are added up exactly in 1021 columns, 9 GB a second; each column counts by a factor of its own. Not
    against an attacker.
    """
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    whole = raw.size // 4 * 4
    words = raw[:whole].view(np.uint32) if raw.ctypes.data % 4 == 0 else raw[:whole].copy().view(np.uint32)
    rows = words.size // COLUMNS
    sums_C = np.add.reduce(words[:rows * COLUMNS].reshape(rows, COLUMNS), axis=0, dtype=np.uint64)
    rest = words[rows * COLUMNS:]
    sums_C[:rest.size] += rest
    factor_C, further = _factors()
    tail = int.from_bytes(raw[whole:].tobytes(), "little")
    with np.errstate(over="ignore"):
        total = int((sums_C * factor_C).sum(dtype=np.uint64))
    return (total + (raw.size * further[0] + tail * further[1])) % 2**64


def signed_sum(x: np.ndarray) -> float:
    """Return the sum of ``x`` under pseudo-random weights: the difference of two is about the distance of two arrays.

    In the mean square it is that distance (Johnson and Lindenstrauss).
    """
    flat = np.asarray(x).reshape(-1)
    rows = -(-flat.size // COLUMNS)
    padded = np.zeros(rows * COLUMNS)
    with np.errstate(invalid="ignore", over="ignore"):
        padded[:flat.size] = flat
        by_row = padded.reshape(rows, COLUMNS) @ _weights(COLUMNS, 1)
        return float(by_row @ _weights(rows, 2))


def norm(x: np.ndarray) -> float:
    """Return the Euclidean norm of ``x``, in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        flat = np.asarray(x, np.float64).reshape(-1)
        return float(np.sqrt(flat @ flat))


@lru_cache(maxsize=1)
def _factors() -> tuple[np.ndarray, tuple[int, int]]:
    drawn = np.random.Generator(np.random.Philox(12)).integers(0, 2**63, COLUMNS + 2, dtype=np.uint64) * 2 + 1
    drawn = drawn.astype(np.uint64)
    return drawn[:COLUMNS], (int(drawn[-2]), int(drawn[-1]))


@lru_cache(maxsize=256)
def _weights(n: int, salt: int) -> np.ndarray:
    """n numbers from 0.48 to 1.44 with signs, of mean square 1, the same wherever they are drawn.

    No bare signs, under which a constant added to all elements may vanish. Kept, as drawing takes longer.
    """
    draw = np.random.Generator(np.random.Philox(salt))
    return (1.0 - 2.0 * draw.integers(0, 2, n)) * draw.uniform(0.5, 1.5, n) / np.sqrt(13 / 12)


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

    ``by_block``: the model lies on several devices. ``some``: indices to look at, all by default.
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
        return self._ops.to_host(self._ops.bitcast(flat_N, "int16") if bucket.dtype == "bfloat16" else flat_N)

    def parts(self, bucket: Bucket, host_N: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (index of a tensor, its elements) of a bucket's vector."""
        for i, offset in zip(bucket.params, bucket.offsets):
            yield i, host_N[offset:offset + self._specs[i].n]


def check_trainable(parts: ModelParts) -> None:
    """Raise `UserError` naming the first parameter or buffer that is not finite: such a model is not trained on.

    What is not trained may be infinite, as attention masks are, but no NaN. Statistics of BatchNorm hold one after a
    fit that a NaN has stopped: only the update of such a step is not made.
    """
    name = not_finite(parts)
    if name:
        raise UserError(f"{name} of the model is not finite before the first step", "finite weights and statistics",
                        "check the code that builds or loads the model, or resume from a checkpoint")


def not_finite(parts: ModelParts) -> str:
    """Return the first trainable parameter that is not finite or other weight that is NaN, by name; "" if none is."""
    names = trainable_names(parts)
    model: Mapping[str, Any] = parts.state.state()[0]["model"]
    return next((plain_name(n) for n, a in model.items()
                 if has_nan(n, np.asarray(a)) or plain_name(n) in names and not finite(n, np.asarray(a))), "")


def trainable_names(parts: ModelParts) -> set[str]:
    """Return the names of the trainable parameters."""
    return {plain_name(spec.name) for spec in parts.params.specs}


def blame(parts: ModelParts, batch: StepBatch, suspects: list[int], control: Control, recovery: Recovery,
          origin: Callable[[], Origin | None] | None = None) -> dict[int, str]:
    """Return the ranks that brought a gradient which is not finite -> where it is first, as text; collective.

    Each of ``suspects`` (ranks; the same list on every rank) computes its part of the step again, alone. Where the
    weights are not finite any more, the result says so. {} where nobody finds anything: finite gradients, whose sum
    or exchange overflowed. Where memory lacks for that computation, a rank finds nothing.
    ``origin``: of a partitioned model, computes the step again together with the copy's other ranks and
    tells what began on this one; of each copy the rank is named where it began first.
    """
    if parts.layout is not None and origin is not None:
        return _first_of_copies(parts.layout.mesh.copies, control.gather(_began(parts, origin())))
    found = recovery.attempt(lambda: _look(parts, batch))[0] if control.rank in suspects else ""
    return {rank: where for rank, where in enumerate(control.gather(found)) if where}


def _began(parts: ModelParts, found: Origin | None) -> tuple[int, str] | None:
    """Return when and where on this rank of a pipeline a number was first not finite out of finite ones."""
    parts.buffers.discard()
    weight = not_finite(parts)
    if weight in trainable_names(parts):
        return -1, f"parameter {weight} itself, since an update before"
    return None if found is None else (found.when, found.what)


def _first_of_copies(copies: Sequence[Sequence[int]], rows: Sequence[tuple[int, str] | None]) -> dict[int, str]:
    """Return the rank of each copy that was the first to find something -> what. Pure.

    >>> _first_of_copies([(0, 1), (2, 3)], [None, None, (5, "x"), (1, "y")])
    {3: 'y'}
    """
    found = {}
    for ranks in copies:
        told = [(row, rank) for rank in ranks if (row := rows[rank]) is not None]
        if told:
            (_, what), rank = min(told)
            found[rank] = what
    return dict(sorted(found.items()))


def _look(parts: ModelParts, batch: StepBatch) -> str:
    """Return where this rank's own part of the step is not finite, or ""."""
    names = trainable_names(parts)
    weight = not_finite(parts)
    if weight in names:
        return f"parameter {weight} itself, since an update before"
    name = next(filter(None, (parts.stage.culprit(micro) for micro in batch.micros)), "")
    return f"the gradient of {plain_name(name)}" if name else ""


ROUNDINGS = 16.0
"""Roundings of one update that are forgiven: differences between devices grow with sqrt(steps)."""


class Diverged(UserError):
    """The ranks train different models. ``variable`` is the first that differs, ``ranks`` those that stand apart."""

    def __init__(self, got: str, expected: str = "", do: str = "", variable: str = "", ranks: tuple[int, ...] = ()):
        self.variable, self.ranks = variable, ranks
        super().__init__(got, expected, do)

    def __reduce__(self) -> tuple:
        return type(self), (self.got, self.expected, self.do, self.variable, self.ranks)


@dataclass(frozen=True)
class FingerprintRows:
    """Rows of all ranks, each (P, V): fingerprints at the last good check or the start, now, and norms."""

    before_PV: np.ndarray
    now_PV: np.ndarray
    norm_PV: np.ndarray

    @classmethod
    def unpack(cls, rows_PK: np.ndarray) -> FingerprintRows:
        """From rows of K = 3V numbers: ``before``, ``now`` and ``norm`` side by side."""
        return cls(*np.split(np.asarray(rows_PK, np.float64), 3, axis=1))


@dataclass(frozen=True)
class Bits:
    """Digests (P, V) of the variables' bytes; ranks of one of the ``kinds`` (P texts) have to have the same."""

    digest_PV: np.ndarray
    kinds: Sequence[str]

    def unequal(self, v: int) -> np.ndarray:
        """Return (P, P): pairs of ranks of one kind whose variable ``v`` has other bits."""
        digest_P, kinds_P = self.digest_PV[:, v], np.asarray(self.kinds)
        return (kinds_P[:, None] == kinds_P[None]) & (digest_P[:, None] != digest_P[None])


Cause = Callable[["FingerprintRows", int, bool, bool], str]
"""(rows, the first variable apart, whether it was apart before, whether some are apart only since) -> what to do."""


def tolerance(steps: int, eps: float) -> float:
    """Distance, relative to a variable's norm, that rounding may make in ``steps`` updates in a type with ``eps``."""
    return ROUNDINGS * eps * float(np.sqrt(max(1, steps)))


def apart(print_P: np.ndarray, norm_P: np.ndarray, within: float,
          unequal_PP: np.ndarray | None = None) -> tuple[int, ...]:
    """Ranks whose fingerprint is not that of the largest group (of the lowest rank, among equals); () if all agree.

    Two NaN agree, and so do two equal infinities; a NaN and a number do not. ``unequal_PP``: pairs that never agree.
    """
    scale = np.where(np.isfinite(norm_P), norm_P, 0.0).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        close_PP = np.abs(print_P[:, None] - print_P[None, :]) <= within * scale
    same_PP = close_PP | (print_P[:, None] == print_P[None, :]) | (np.isnan(print_P)[:, None] & np.isnan(print_P)[None])
    reference = int(np.argmax(same_PP.sum(axis=1)))
    out_P = ~same_PP[reference]
    if unequal_PP is not None and unequal_PP.any() and not out_P.any():
        others_P = unequal_PP.sum(axis=1)  # of the ranks that are apart the one that agrees with most of its kind
        out_P = unequal_PP[int(np.argmin(np.where(others_P > 0, others_P, others_P.size)))]
    return tuple(int(r) for r in np.flatnonzero(out_P))


def judge(rows: FingerprintRows, names: Sequence[str], step: int, eps: float = 2.0**-23, distributed: bool = True,
          ranks: Sequence[int] | None = None, bits: Bits | None = None, updates: int | None = None,
          cause: Cause | None = None) -> Diverged | None:
    """Return the error that stops the run, or None where the ranks agree.

    ``names``: V variables. ``step``: updates so far. ``eps``: of the variables' type. ``distributed``: whether the
    optimizer is known to exchange gradients. ``ranks``: global numbers of the P rows, 0 to P-1 unless given. ``bits``:
    what like devices have to have alike. ``updates``: since the ranks were equal, ``step`` unless given. ``cause``:
    tells what to do, in place of the words for `hvdtrain.keras`.
    """
    assert rows.now_PV.shape[1] == len(names), (rows.now_PV.shape, len(names))
    within = tolerance(step if updates is None else updates, eps)
    found = {v: out for v in range(len(names))
             if (out := apart(rows.now_PV[:, v], rows.norm_PV[:, v], within, bits.unequal(v) if bits else None))}
    if not found:
        return None
    first, out = next(iter(found.items()))
    numbers = list(ranks) if ranks is not None else list(range(len(rows.now_PV)))
    who = tuple(numbers[r] for r in out)
    others = f", the first of {len(found)} of {len(names)} variables that do" if len(found) > 1 else ""
    got = (f"after update {step} the ranks no longer hold the same weights: {names[first]!r} differs on "
           f"{_named(who, numbers)}{_by(rows, first, out)}{others}")
    before = {v for v in found if apart(rows.before_PV[:, v], rows.norm_PV[:, v], within)}
    plain_name = cause or partial(_cause, distributed)
    do = _not_finite(rows, first) or plain_name(rows, first, first in before, len(before) < len(found))
    return Diverged(got, "equal weights on every rank, apart from rounding", do, names[first], who)


def _named(who: tuple[int, ...], ranks: Sequence[int]) -> str:
    size = len(ranks)
    if len(who) == size - 1 and size > 2:
        return f"every rank (against each other, {size} ranks)"
    of = str(size) if list(ranks) == list(range(size)) else f"ranks {', '.join(map(str, ranks))}"
    return ("rank " if len(who) == 1 else "ranks ") + ", ".join(map(str, who)) + f" of {of}"


def _by(rows: FingerprintRows, v: int, out: tuple[int, ...]) -> str:
    inside = next(r for r in range(len(rows.now_PV)) if r not in out)
    far = np.abs(rows.now_PV[list(out), v] - rows.now_PV[inside, v]).max()
    norm = rows.norm_PV[inside, v]
    return f" by {far / norm:.1g} of its norm" if np.isfinite(far) and np.isfinite(norm) and norm * far > 0 else ""


def _not_finite(rows: FingerprintRows, v: int) -> str:
    """Return what to think where some ranks hold numbers and others do not, or ""."""
    finite_P = np.isfinite(rows.now_PV[:, v])
    if not finite_P.any() or finite_P.all():
        return ""
    return (f"rank {int(np.argmin(finite_P))} holds a value that is not finite and others do not: something other "
            "than the exchanged gradients wrote it")


def _cause(distributed: bool, rows: FingerprintRows, v: int, began: bool, some_since: bool) -> str:
    if not distributed and some_since:
        return ("likely the optimizer of model.compile is not hvd.DistributedOptimizer(...), or the gradients of a "
                "train_step of your own do not pass through hvd.DistributedGradientTape")
    if began:
        return ("the weights differed before the first update: add hvd.callbacks.BroadcastGlobalVariablesCallback(0) "
                "to the callbacks of fit (or hvd.broadcast_variables(model.variables, root_rank=0) to a loop of your "
                "own), and load weights before it or on every rank")
    return ("the weights were equal before, so something other than this optimizer's exchanged gradients changes them: "
            "a callback or train_step that assigns weights on some ranks, an optimizer that is not distributed, "
            "different learning rates or optimizer states, or layers meant to be local, which belong into "
            "hvd.PartialDistributedOptimizer(local_layers=...)")
