"""Find losses that are no weighted mean over samples before the first step, and refuse them where the batch is divided.

Owns the samples, the decision and what follows from it. How a loss is evaluated is each backend's ``loss_evaluator``,
or the pipeline's; `hvdtrain.keras.data` does the same for `hvdtrain.keras.shard`.

With (S, W) the loss's numerator and weight, a weighted mean over samples has S(A and B) = S(A) + S(B), and W alike,
for any samples A and B, the same ones included. Dice, contrastive losses, a mean over the masked elements of a batch
times its samples, and a sum that counts once for each sample have not: their gradient depends on the batch's division.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.backends.misfit import out_of_memory
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Control
from hvdtrain.data.feed import Feed
from hvdtrain.parallel.parts import ModelParts
from hvdtrain.parallel.recovery import Recovery

FIRST, SECOND, THIRD = (0, 1), (2, 3), (4, 5, 6)
"""The shares of the samples: uneven, and none of a single sample."""
SMALL = ((FIRST, SECOND, THIRD), (FIRST, SECOND), (THIRD, FIRST, FIRST))
"""Shares that are evaluated together: several, since a coupling may cancel in one of them. An odd share comes first in
one, for losses of neighbours."""
LEAST, LARGE, SLOW_S = 22, 64, 0.5
"""Fewest and most samples of the larger shares, and seconds of an evaluation of 7 samples from which they are left out.
"""
CANDIDATES, CANDIDATE_BYTES = 256, 1 << 24
"""Most samples from which `choose_rows` takes those to evaluate, and their bytes."""
REPEATS, SPREADS = 3, 20
"""Further evaluations of the same samples before a loss is refused, and how many times their spread a difference must
be: some losses draw random numbers."""
TOLERANCE, ROUNDINGS = 2e-5, 8
"""Relative difference that float32 may make, and the same in roundings of the type that the model computes in."""
COUPLED_OUTPUTS = 1e-3
"""Relative difference of a sample's outputs from which they depend on the other samples."""


class LossValue(NamedTuple):
    """The loss of some samples. ``added``: the part of ``total`` that Keras layers add. ``eps``: of the computing type.

    ``rows``: of each of the model's outputs with a row per sample, its shape and two numbers for each row.
    """

    total: float
    weight: float
    added: float = 0.0
    eps: float = 2.0**-23
    rows: tuple[tuple[tuple[int, ...], np.ndarray], ...] = ()


class Finding(NamedTuple):
    """A loss that is no weighted mean over samples: what was found, and the remedy. ``outputs``: the model's outputs
    depend on the other samples of the batch already. ``unjudged``: nothing was found out; ``got`` says why.
    """

    got: str
    do: str = ""
    outputs: bool = False
    unjudged: bool = False


class Difference(NamedTuple):
    """Repeated evaluations of samples together and of each share, and which of `NUMBERS` differ between the two."""

    whole: list[LossValue]
    parts: list[list[LossValue]]
    names: tuple[str, ...]


NUMBERS = ("total", "weight", "added")
Evaluate = Callable[[Sequence[int], bool], LossValue]
"""Returns the loss of the samples of these numbers, in training or evaluation mode; changes nothing for later calls."""

_TASK = "or give the model file a task(model, batch) -> (loss_sum, weight), each of the two a sum over samples"
PER_SAMPLE = f"compute the loss of each sample separately (Keras' Dice and Tversky: axis=(1, 2, 3)), {_TASK}"
MEAN_OF_BATCH = "add a mean over the batch (keras.ops.mean) in place of a sum; for a product of means over the batch " \
                "give the model file a task(model, batch) -> (loss_sum, weight), each of the two a sum over samples"
DRAWS = "the loss draws random numbers"
FAILS = "the loss cannot be evaluated on a few samples"
SHORT = "out of memory with the loss of a few samples"
NOT_FINITE = "the loss of a few samples is not finite"
ZERO = "the loss of a few samples is 0"
OUTPUTS = "the model's outputs for a sample depend on the other samples of its batch"


def per_row(outputs: Sequence[np.ndarray], n: int) -> tuple[tuple[tuple[int, ...], np.ndarray], ...]:
    """Return `LossValue.rows` of ``outputs``: of those (n, ...), shapes, and mean and mean size of each row."""
    return tuple((x.shape[1:], np.stack([x.reshape(n, -1).mean(1), np.abs(x).reshape(n, -1).mean(1)], 1))
                 for x in outputs if x.ndim and x.shape[0] == n and x.size)


def judge(evaluate: Evaluate, rows: int = 7, slowest: Callable[[float], float] = float) -> Finding | None:
    """Return what is wrong with the loss of the ``rows`` samples that `choose_rows` has taken; None: nothing.

    The loss is judged in training mode; where training draws random numbers or the model itself couples samples, in
    evaluation mode. ``slowest`` returns the most seconds of all ranks where they evaluate together.
    """
    reason = ""
    for training in (True, False):
        found = _difference(lambda numbers: evaluate(numbers, training), rows, slowest)
        if found is None:
            return None
        if isinstance(found, str):
            reason = found
            continue
        coupled = _coupled(found)
        if coupled is False or coupled is None and not training:
            return _finding_of(found)
        if coupled and not training:
            return Finding(OUTPUTS, outputs=True)
    return Finding(f"{reason}: hvdtrain did not check that the loss is a weighted mean over samples", unjudged=True)


def _difference(evaluate: Callable[[Sequence[int]], LossValue], rows: int,
                slowest: Callable[[float], float]) -> Difference | str | None:
    """Return how the loss differs between samples together and apart; None: it does not; text: why it is not judged.

    Larger shares are tried too: for couplings that few samples do not show, and losses that are not finite for few.
    """
    seconds = []

    def timed(numbers: Sequence[int]) -> LossValue:
        begin = time.perf_counter()
        value = evaluate(numbers)
        seconds.extend([time.perf_counter() - begin] if len(numbers) == 7 else [])
        return value

    small = _compare(timed, SMALL)
    apart = isinstance(small, Difference) and not _finite(small)
    if rows < 7 + 4 or isinstance(small, Difference) and not apart:
        return small
    if small in (None, DRAWS) and slowest(min(seconds)) > SLOW_S:
        return small
    # uneven shares, but of even lengths: losses of pairs need them
    bounds = 7 + (rows - 7) * 3 // 14 * 2, 7 + (rows - 7) // 6 * 2
    large = _compare(evaluate, [(range(7, bound), range(bound, rows)) for bound in bounds], (rows - 7) / 7)
    if isinstance(large, Difference):
        return None if small is None and not _finite(large) else large
    if large is None or small is None:
        return None
    return large if apart and large in (DRAWS, ZERO) else small


def _compare(evaluate: Callable[[Sequence[int]], LossValue], combined: Sequence[Sequence[Sequence[int]]],
             scale: float = 1.0) -> Difference | str | None:
    """Return `_difference` for the shares ``combined``; ``scale``: of rounding, for more samples."""
    values: dict[tuple[int, ...], list[LossValue]] = {}

    def evaluated(numbers: Sequence[int], times: int = 1) -> list[LossValue]:
        known = values.setdefault(tuple(numbers), [])
        known.extend(evaluate(numbers) for _ in range(times - len(known)))
        return known

    pairs = [([i for share in shares for i in share], shares) for shares in combined]
    try:
        for together, shares in pairs:
            for numbers in (*shares, together):
                evaluated(numbers)
        firsts = {numbers: known[0] for numbers, known in values.items()}
        finite = all(map(_is_finite, firsts.values()))
        if finite and not any(_gaps([firsts[tuple(one)]], [[firsts[tuple(share)]] for share in shares], scale)
                              for one, shares in pairs):
            return None if any(value.total for value in firsts.values()) else ZERO
        repeated = [(evaluated(one, 1 + REPEATS), [evaluated(share, 1 + REPEATS) for share in shares])
                    for one, shares in pairs]
        if not finite:
            return _not_finite(*repeated[0])
        noise = _noise(evaluate, pairs[0][0], firsts)
    except Exception as error:  # as a model for one number of samples: the first step reports failures
        return SHORT if out_of_memory(error) or getattr(error, "kind", "") == "oom" else FAILS
    for whole, parts in repeated:
        if names := _gaps(whole, parts, scale, noise, SPREADS):
            return Difference(whole, parts, names)
    drawn = any(_gaps([value], [known[:1]], scale) for known in values.values() for value in known[1:])
    return DRAWS if drawn else None


def _is_finite(value: LossValue) -> bool:
    return all(math.isfinite(getattr(value, name)) for name in NUMBERS)


def _finite(found: Difference) -> bool:
    return all(map(_is_finite, [value for values in found.parts for value in values]))


def _not_finite(whole: list[LossValue], parts: list[list[LossValue]]) -> Difference | str:
    """Return a difference where the loss is finite together and, in every evaluation, not finite in some share."""
    if all(map(_is_finite, whole)) and any(not any(map(_is_finite, part)) for part in parts):
        return Difference(whole, parts, ("total",))
    return NOT_FINITE


def _noise(evaluate: Callable[[Sequence[int]], LossValue], numbers: list[int],
           firsts: dict[tuple[int, ...], LossValue]) -> float:
    """Return the rounding of the total: from the last bits of its values, and from other orders of the samples."""
    whole = firsts[tuple(numbers)]
    turned = [abs(evaluate(numbers[k:] + numbers[:k]).total - whole.total) for k in (1, 2)]
    noise = ROUNDINGS * min((_grain(value.total) for value in firsts.values() if value.total), default=0.0)
    if max(turned) < 1e-3 * abs(whole.total):  # else it is no rounding: the loss depends on the order
        noise += ROUNDINGS * max(turned)
    return noise


def _gaps(whole: Sequence[LossValue], parts: Sequence[Sequence[LossValue]], scale: float, noise: float = 0.0,
          spreads: float = 0.0) -> tuple[str, ...]:
    """Return which of `NUMBERS` differ from their sums over ``parts`` by more than rounding and ``spreads`` times the
    spread of repeated evaluations.
    """
    eps, names = whole[0].eps, []
    relative = scale * max(TOLERANCE, ROUNDINGS * eps)
    noises = {"total": noise + ROUNDINGS * eps * abs(whole[0].weight), "weight": 0.0, "added": 0.0}
    for name, absolute in noises.items():
        values = [np.array([getattr(value, name) for value in one]) for one in (whole, *parts)]
        together, *apart = (float(value.mean()) for value in values)
        limit = scale * absolute + relative * (abs(together) + sum(map(abs, apart)))
        if abs(together - sum(apart)) > limit + spreads * sum(float(np.ptp(value)) for value in values):
            names.append(name)
    return tuple(names)


def _grain(number: float) -> float:
    """Return the value of the last bit of ``number`` that is set: more than its rounding after a cancellation."""
    mantissa, exponent = math.frexp(abs(number))
    bits = int(mantissa * 2**53)
    return math.ldexp(bits & -bits, exponent - 53)


def _coupled(difference: Difference) -> bool | None:
    """Return whether a sample's outputs depend on other samples; None: no rows, or they draw random numbers."""
    found = None
    for i, (shape, rows_N2) in enumerate(difference.whole[0].rows):
        parts = [[value.rows[i] for value in values if len(value.rows) == len(difference.whole[0].rows)]
                 for values in difference.parts]
        if any(not part or part[0][0] != shape for part in parts):
            continue
        whole_RN2 = np.stack([value.rows[i][1] for value in difference.whole])
        apart_RN2 = np.concatenate([np.stack([rows for _, rows in part]) for part in parts], 1)
        if (np.isfinite(whole_RN2) != np.isfinite(apart_RN2)).any():
            return True
        spread = max(float(np.nan_to_num(np.ptp(rows_RN2, 0)).max()) for rows_RN2 in (whole_RN2, apart_RN2))
        gap = float(np.nan_to_num(np.abs(whole_RN2.mean(0) - apart_RN2.mean(0))).max())
        largest = COUPLED_OUTPUTS * float(np.abs(np.nan_to_num(rows_N2)).max())
        if gap > largest + SPREADS * spread:
            return True
        if spread <= largest:
            found = False
    return found


def _finding_of(difference: Difference) -> Finding:
    """Return the finding: the loss, or what layers add to it where that is all of the difference."""
    means = [{name: float(np.mean([getattr(value, name) for value in values])) for name in NUMBERS}
             for values in (difference.whole, *difference.parts)]
    whole, parts = means[0], means[1:]
    gap, added = (whole[name] - sum(part[name] for part in parts) for name in ("total", "added"))
    if "added" in difference.names and ("total" not in difference.names or abs(gap - added) <= (
            0.01 * abs(added) + TOLERANCE * abs(whole["total"]))):
        return Finding("the losses of layers (add_loss) are not means over the batch: " + _numbers(
            whole["added"], whole["weight"], [(part["added"], part["weight"]) for part in parts]), MEAN_OF_BATCH)
    return Finding("the loss is not a weighted mean over samples: " + _numbers(
        whole["total"], whole["weight"], [(part["total"], part["weight"]) for part in parts]), PER_SAMPLE)


def _numbers(total: float, weight: float, parts: Sequence[tuple[float, float]]) -> str:
    totals, weights = (sum(column) for column in zip(*parts))
    return (f"the same samples give {total:.5g} of weight {weight:.5g} together, {totals:.5g} of weight {weights:.5g} "
            "in shares")


def choose_rows(arrays: Sequence[np.ndarray], micro_batch: int = 0) -> list[int]:
    """Return the rows to evaluate, which may hold one several times: 7, then those of larger shares.

    The first share has rows of the largest means, the third those of the smallest, of up to three arrays from the last
    one: masks, lengths, weights and classes then differ between shares, whichever rows come first. Other rows have a
    class that is among the rows already. The larger shares have some of each, of about two times ``micro_batch``.
    """
    varied = _varied(arrays)
    high = list(dict.fromkeys(int(mean_N.argmax()) for mean_N in varied))
    low = [i for i in dict.fromkeys(int(mean_N.argmin()) for mean_N in varied) if i not in high]
    classes = _classes(arrays)
    mates = [next((i for i in rows if i not in (*high, *low)), rows[0]) for rows in classes
             if {*rows} & {*high, *low}]
    others = [i for i in np.linspace(0, len(arrays[0]) - 1, 13, dtype=int).tolist() if i not in (*high, *low)]
    others = list(dict.fromkeys([*mates[:2], *others])) or [*low, *high]
    spread = iter(np.resize(others, 7).tolist())
    high += [next(spread) for _ in range(4 - len(high))]
    small = high + low + [next(spread) for _ in range(3 - len(low))]

    n = min(LARGE, max(LEAST, 2 * micro_batch))
    ends = [int(i) for mean_N in varied for order_N in [np.argsort(mean_N)] for i in (*order_N[-2:], *order_N[:2])]
    alike = [i for rows in classes[:n // 8] for i in rows[:4]]
    every = np.linspace(0, len(arrays[0]) - 1, n, dtype=int).tolist()
    large = np.resize(list(dict.fromkeys([*ends, *alike, *every])), n).tolist()
    return small + large[0::2] + large[1::2]  # two shares, each with some of the ends and of each class


def _classes(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    """Return the rows of each class that several rows of different inputs have, of the array with the most classes."""
    best: list[list[int]] = []
    for array in arrays[1:]:
        if array.dtype.kind not in "biuf" or array.size != len(array):
            continue
        class_N = np.unique(array.reshape(-1), return_inverse=True)[1]
        n_classes = int(class_N.max()) + 1
        if len(best) < n_classes < len(array) and n_classes > 1:
            by_input = [{arrays[0][i].tobytes(): i for i in np.flatnonzero(class_N == c).tolist()}
                        for c in range(n_classes)]
            found = [list(rows.values()) for rows in by_input if len(rows) > 1]
            best = max(best, found, key=len)
    return best


def _varied(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the means of the rows of up to three arrays, from the last one, whose rows differ."""
    n = len(arrays[0])
    means = [np.abs(a).reshape(n, -1).mean(1, dtype=np.float64) if a.dtype.kind == "c" else
             a.reshape(n, -1).mean(1, dtype=np.float64) for a in reversed(arrays) if a.dtype.kind in "biufc" and a.size]
    return [mean_N for mean_N in means if np.isfinite(mean_N).all() and np.ptp(mean_N) > 0][:len(THIRD)]


def refusal(finding: Finding, divided_by: str) -> UserError:
    """Return the error of a loss that is not a weighted mean over samples, where ``divided_by`` divide the batch."""
    return UserError(finding.got, f"numerator and weight that are sums over samples, since {divided_by} divide the "
                     "batch", finding.do)


def note_of(finding: Finding) -> str:
    """Return the line that names such a loss where nothing divides the batch."""
    return f"{finding.got}; this run does not divide the batch; several ranks or micro-batches " \
           "would change the gradient, and are an error"


def apply_finding(finding: Finding | None, feed: Feed, parts: ModelParts, recovery: Recovery, notes: list[str]) -> None:
    """Refuse a run's loss where its batch is divided, else keep it undivided; alike on every rank. `UserError`."""
    if finding is None:
        return
    divided = feed.divides() or getattr(parts.stage, "divides", False)
    if finding.unjudged:
        notes += [finding.got] if divided else []
        return
    if finding.outputs:
        if divided and not parts.caveats():
            notes.append(f"not independent of the number of ranks: {OUTPUTS}")
        return
    error = refusal(finding, "ranks or micro-batches")
    if divided:
        raise error
    notes.append(note_of(finding))
    feed.undivided = error
    if recovery.shrinks:
        recovery.shrinks = False
        recovery.because = "smaller micro-batches would change a loss that is not a weighted mean over samples"
        if recovery.guard is not None:
            recovery.guard.off = True


def agree_on(control: Control, finding: Finding | None) -> Finding | None:
    """Return what any rank has found, the loss before the outputs; collective."""
    return first_of(control.gather(finding))


def first_of(findings: Sequence[Finding | None]) -> Finding | None:
    """Return the finding that matters most: a loss, then outputs, then what was not judged."""
    found = [Finding(*one) for one in findings if one is not None]
    return min(found, key=lambda one: (one.unjudged, one.outputs), default=None)
