"""Find losses that are no weighted mean over samples before the first step, and refuse them where the batch is divided.

Owns the samples, the decision and what follows from it. How a loss is evaluated is each backend's ``loss_evaluator``,
or the pipeline's; `hvdtrain.keras.coupling` does the same for `hvdtrain.keras.shard`.

With (S, W) the loss's numerator and weight, a weighted mean over samples has S(A and B) = S(A) + S(B), and W alike,
for any samples A and B, the same ones included. Dice, contrastive losses, a mean over the masked elements of a batch
times its samples, and a sum that counts once for each sample have not: their gradient depends on the batch's division.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.errors import UserError

FIRST, SECOND, THIRD = (0, 1), (2, 3), (4, 5, 6)
"""The shares of the samples: uneven, and none of a single sample."""
COMBINED = ((FIRST, SECOND, THIRD), (FIRST, SECOND), (FIRST, FIRST, THIRD))
"""Shares that are evaluated together: several, since a coupling may cancel in one of them."""
CANDIDATES, CANDIDATE_BYTES = 256, 1 << 24
"""Most samples from which `choose_rows` takes those to evaluate, and their bytes."""
REPEATS = 3
"""Evaluations of the same samples that must agree before a loss is refused: some losses draw random numbers."""
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
    depend on the other samples of the batch already, so that the loss is not to blame.
    """

    got: str
    do: str = ""
    outputs: bool = False


Evaluate = Callable[[Sequence[int], bool], LossValue]
"""Returns the loss of the samples of these numbers, in training or evaluation mode; changes nothing for later calls."""

_TASK = "or give the model file a task(model, batch) -> (loss_sum, weight), each of the two a sum over samples"
PER_SAMPLE = f"take the loss of each sample by itself (Keras' Dice and Tversky: axis=(1, 2, 3)), {_TASK}"
MEAN_OF_BATCH = f"add a mean over the batch (keras.ops.mean) in place of a sum, {_TASK}"
OUTPUTS = "the model's outputs for a sample depend on the other samples of its batch"


def per_row(outputs: Sequence[np.ndarray], n: int) -> tuple[tuple[tuple[int, ...], np.ndarray], ...]:
    """Return `LossValue.rows` of ``outputs``: of those (n, ...), their shapes and the mean and mean size of each row.
    """
    return tuple((x.shape[1:], np.stack([x.reshape(n, -1).mean(1), np.abs(x).reshape(n, -1).mean(1)], 1))
                 for x in outputs if x.ndim and x.shape[0] == n and x.size)


# --- the decision ----------------------------------------------------------------------------------------------------

def judge(evaluate: Evaluate) -> Finding | None:
    """Return what is wrong with the loss of the samples that `choose_rows` has taken; None: nothing.

    The loss is judged in training mode; where training draws random numbers or the model itself couples samples, in
    evaluation mode. A loss that cannot be evaluated, or whose value differs from call to call, is not judged.
    """
    for training in (True, False):
        try:
            found = _compare(lambda numbers: evaluate(numbers, training))  # noqa: B023
        except Exception:  # noqa: BLE001  (such as a model for one number of samples: the first step reports failures)
            continue
        if found is None:
            return None
        coupled = _coupled(*found)
        if coupled is False or coupled is None and not training:
            return _finding_of(*found)
        if coupled and not training:
            return Finding(OUTPUTS, outputs=True)
    return None


def _compare(evaluate: Callable[[Sequence[int]], LossValue]) -> tuple[LossValue, list[LossValue]] | None:
    """Return a loss together and apart, where the two differ by more than rounding; None where they do not.

    Errors: `ValueError` for a loss that is not finite or differs from call to call.
    """
    apart = {share: evaluate(share) for share in (FIRST, SECOND, THIRD)}
    pairs = [(evaluate([i for share in shares for i in share]), [apart[share] for share in shares])
             for shares in COMBINED]
    values = [*apart.values(), *(together for together, _ in pairs)]
    if not all(math.isfinite(number) for value in values for number in (value.total, value.weight, value.added)):
        raise ValueError("a loss that is not finite")
    if not any(_differ(*pair) for pair in pairs):
        return None
    everything, whole = [*FIRST, *SECOND, *THIRD], pairs[0][0]
    for numbers, value in [*apart.items(), (everything, whole)] * REPEATS:
        if _differ(evaluate(numbers), [value]):
            raise ValueError("a loss that differs from call to call")
    turned = [abs(evaluate(everything[k:] + everything[:k]).total - whole.total) for k in (1, 2)]
    noise = ROUNDINGS * min((_grain(value.total) for value in values if value.total), default=0.0)
    if max(turned) < 1e-3 * abs(whole.total):  # else it is no rounding: the loss depends on the order
        noise += ROUNDINGS * max(turned)
    return next((pair for pair in pairs if _differ(*pair, noise)), None)


def _differ(whole: LossValue, parts: Sequence[LossValue], noise: float = 0.0) -> bool:
    """Return whether numerator, weight or added losses differ from their sums over ``parts`` by more than rounding."""
    relative = max(TOLERANCE, ROUNDINGS * whole.eps)
    noises = {"total": noise + ROUNDINGS * whole.eps * abs(whole.weight), "weight": 0.0, "added": 0.0}
    for name, absolute in noises.items():
        together, apart = getattr(whole, name), [getattr(part, name) for part in parts]
        if abs(together - sum(apart)) > absolute + relative * (abs(together) + sum(map(abs, apart))):
            return True
    return False


def _grain(number: float) -> float:
    """Return the value of the last bit of ``number`` that is set: more than its rounding after a cancellation."""
    mantissa, exponent = math.frexp(abs(number))
    bits = int(mantissa * 2**53)
    return math.ldexp(bits & -bits, exponent - 53)


def _coupled(whole: LossValue, parts: Sequence[LossValue]) -> bool | None:
    """Return whether outputs for a sample depend on the other samples; None: no output has a row per sample."""
    found = None
    for i, (shape, rows_N2) in enumerate(whole.rows):
        others = [part.rows[i] for part in parts if len(part.rows) == len(whole.rows)]
        if len(others) < len(parts) or any(other != shape for other, _ in others):
            continue
        apart_N2 = np.concatenate([rows for _, rows in others])
        if np.abs(rows_N2 - apart_N2).max() > COUPLED_OUTPUTS * np.abs(rows_N2).max():
            return True
        found = False
    return found


def _finding_of(whole: LossValue, parts: Sequence[LossValue]) -> Finding:
    """Return the finding: the loss, or what layers add to it where that is all of the difference."""
    gap = whole.total - sum(part.total for part in parts)
    added = whole.added - sum(part.added for part in parts)
    if added and abs(gap - added) <= 0.01 * abs(added) + TOLERANCE * abs(whole.total):
        return Finding("what layers add to the loss (add_loss) is not a mean over the batch: "
                       + _numbers(whole.added, whole.weight, [(part.added, part.weight) for part in parts]),
                       MEAN_OF_BATCH)
    return Finding("the loss is not a weighted mean over samples: "
                   + _numbers(whole.total, whole.weight, [(part.total, part.weight) for part in parts]), PER_SAMPLE)


def _numbers(total: float, weight: float, parts: Sequence[tuple[float, float]]) -> str:
    totals, weights = (sum(column) for column in zip(*parts))
    return (f"the same samples give {total:.5g} of weight {weight:.5g} together, {totals:.5g} of weight {weights:.5g} "
            "in shares")


# --- samples ---------------------------------------------------------------------------------------------------------

def choose_rows(arrays: Sequence[np.ndarray]) -> list[int]:
    """Return the rows to evaluate, which may hold one several times.

    The first share has rows of the largest means, the third those of the smallest, of up to three arrays from the last
    one: masks, lengths, weights and classes then differ between shares, whichever rows come first.
    """
    n = len(arrays[0])
    means = [np.abs(a).reshape(n, -1).mean(1, dtype=np.float64) if a.dtype.kind == "c" else
             a.reshape(n, -1).mean(1, dtype=np.float64) for a in reversed(arrays) if a.dtype.kind in "biufc" and a.size]
    varied = [mean_N for mean_N in means if np.isfinite(mean_N).all() and np.ptp(mean_N) > 0][:len(THIRD)]
    high = list(dict.fromkeys(int(mean_N.argmax()) for mean_N in varied))
    low = [i for i in dict.fromkeys(int(mean_N.argmin()) for mean_N in varied) if i not in high]
    others = [i for i in np.linspace(0, n - 1, 13, dtype=int).tolist() if i not in (*high, *low)]
    others = list(dict.fromkeys(others)) or [*low, *high]
    spread = iter(np.resize(others, 7).tolist())
    high += [next(spread) for _ in range(4 - len(high))]
    return high + low + [next(spread) for _ in range(3 - len(low))]


# --- what follows ----------------------------------------------------------------------------------------------------

def refusal(finding: Finding, divided_by: str) -> UserError:
    """Return the error of a loss that is not a weighted mean over samples, where ``divided_by`` divide the batch."""
    return UserError(finding.got, f"numerator and weight that are sums over samples, since {divided_by} divide the "
                     "batch", finding.do)


def note_of(finding: Finding) -> str:
    """Return the line that names such a loss where nothing divides the batch."""
    return f"{finding.got}; nothing divides the batch here, so it trains as it is; several ranks or micro-batches " \
           "would change its gradient, and are refused"


def apply_finding(run: Any, finding: Finding | None) -> None:
    """Refuse the loss of ``run`` where its batch is divided, else keep the batch undivided; alike on every rank.

    Errors: `UserError`.
    """
    if finding is None:
        return
    feed, divided = run.feed, run.feed.divides() or getattr(run.parts.stage, "divides", False)
    if finding.outputs:
        if divided and not run.parts.caveats():
            run.notes.append(f"not independent of the number of ranks: {OUTPUTS}")
        return
    error = refusal(finding, "ranks or micro-batches")
    if divided:
        raise error
    run.notes.append(note_of(finding))
    feed.undivided = error
    if run.recovery.shrinks:
        run.recovery.shrinks = False
        run.recovery.because = "smaller micro-batches would change a loss that is not a weighted mean over samples"
        if run.recovery.guard is not None:
            run.recovery.guard.off = True


def agree_on(control: Any, finding: Finding | None) -> Finding | None:
    """Return what any rank has found, the loss before the outputs; collective."""
    found = [one for one in control.gather(finding) if one is not None]
    return min(found, key=lambda one: Finding(*one).outputs, default=None)
