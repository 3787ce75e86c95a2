"""Run a few samples through model, loss and metrics before the first step, the same ones on every rank.

Backends run and restore (``try_samples``); `hvdtrain.backends.misfit` has the messages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.backends.loss_coupling import (
    CANDIDATE_BYTES,
    CANDIDATES,
    Evaluate,
    LossValue,
    agree_on,
    apply_finding,
    choose_rows,
    judge,
)
from hvdtrain.backends.misfit import ONE_SAMPLE, fixed_batch, one_sample, told
from hvdtrain.cluster.control import agreed
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Batch
from hvdtrain.data.feed import Feed
from hvdtrain.data.prepare import of_set
from hvdtrain.data.stream import on_disk
from hvdtrain.engine.first_sample_stages import evaluating, try_stages
from hvdtrain.engine.run import Run
from hvdtrain.parallel.recovery import attempt

LEAST = 2
MOST = 6
"""Samples that are tried."""
LOOKED_AT = 2**26
"""Elements of an array that are searched for its largest and smallest number."""
LOOKED_AT_TWICE = 2**22
"""... and for the next ones: the largest or smallest may be a number that the loss ignores."""


def check(run: Run, backend: Any) -> list[str]:
    """Try the run's data on its model, training and evaluation, before anything is exchanged; collective.

    Returns the buffers and parameters that were written to, by name. Everything is restored but samples that a stream
    has handed out, with which the first step begins, and state outside of the model and the objects it holds.
    Errors: `UserError` on every rank for what does not fit; other exceptions of the model pass through.
    """
    if run.parts.layout is not None:
        written = _check_parts(run, backend)
        _gather_measured(run)
        _check_loss(run, backend)
        return written

    def work() -> list[str]:
        _check_fixed(run, backend, run.feed, True)
        written = _try(run, backend, run.feed, True)
        with _one_sample_refusal(run) as single:
            written += _run(run, backend, _samples(run.feed, LEAST), True, single) if single else []
        for name, feed in run.eval_feeds.items():
            with _of_set(name):
                _check_fixed(run, backend, feed, False)
                # A stream of test data is opened when it is evaluated, no earlier.
                written += _try(run, backend, run.feed if feed.samples is None else feed, False)
        return written

    written = agreed(run.control, work, "first sample")
    _gather_measured(run)
    _check_loss(run, backend)
    return written


@contextlib.contextmanager
def _of_set(name: str) -> Iterator[None]:
    """Name the evaluation set in a `UserError` of the body; "": the run's own data."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise of_set(name, error) from error.__cause__


def _gather_measured(run: Run) -> None:
    """Have the names of the metrics on every rank; of a partitioned model the last stage alone measures. Collective."""
    rows = run.control.gather(run.parts.measured)
    run.parts.measured = list(dict.fromkeys(name for row in rows for name in row))


def _check_loss(run: Run, backend: Any) -> None:
    """Judge whether the loss is a weighted mean over samples (`hvdtrain.backends.loss_coupling`); collective."""
    pool, n_micro = agreed(run.control, lambda: (_pool(run.feed), _micro_batch(run.feed)), "first sample")
    rows = choose_rows(pool, max(run.control.gather(n_micro)))
    batch = tuple(array[rows] for array in pool)
    if run.parts.layout is not None:
        with evaluating(run, backend, batch) as evaluate:
            finding = judge(evaluate, len(rows), lambda seconds: float(max(run.control.gather(seconds))))
    else:
        with backend.loss_evaluator(run.parts, batch) as evaluate:
            finding = judge(_within_memory(evaluate, backend), len(rows))
    apply_finding(agree_on(run.control, finding), run.feed, run.parts, run.recovery, run.notes)


def _within_memory(evaluate: Evaluate, backend: Any) -> Evaluate:
    """Return ``evaluate`` with `MemoryError` for any shortage."""
    def evaluated(numbers: Sequence[int], training: bool) -> LossValue:
        value, why = attempt(lambda: evaluate(numbers, training), backend.out_of_memory, backend.free_cached)
        if value is None:
            raise MemoryError(why)
        return value

    return evaluated


def _check_parts(run: Run, backend: Any) -> list[str]:
    """Do the same for a partitioned model, in micro-batches as training has them."""
    def read(feed: Feed) -> list[Batch]:
        n = max(1, _micro_batch(run.feed))
        return list(_parts(_samples(feed, MOST), n))

    train = agreed(run.control, lambda: read(run.feed), "first sample")
    written = try_stages(run, backend, train, True)
    with _one_sample_refusal(run) as single:
        written += try_stages(run, backend, [tuple(array[:1] for array in train[0])] if single else [], True)
    for name, feed in run.eval_feeds.items():
        test = agreed(run.control, partial(_of_stages, train, read, feed), "first sample")
        with _of_set(name):
            written += try_stages(run, backend, test, False)
    return written


def _of_stages(train: list[Batch], read: Callable[[Feed], list[Batch]], feed: Feed) -> list[Batch]:
    return train if feed.samples is None else read(feed)


def _try(run: Run, backend: Any, feed: Feed, training: bool) -> list[str]:
    n_micro = _micro_batch(feed)
    batch = _samples(feed, min(MOST, max(LEAST, n_micro)))
    try:
        return _run(run, backend, batch, training)
    except Exception:
        if n_micro == len(batch[0]):
            raise
        found = [_fits(run, backend, part, training) for part in _parts(batch, n_micro)]
        if None in found:
            raise
        return [name for names in found for name in names or ()]


@contextlib.contextmanager
def _one_sample_refusal(run: Run) -> Iterator[int]:
    """Yield 1 where a micro-batch of this run has one sample, else 0; turn BatchNorm's refusal of it into a message.

    With ``sync_batchnorm`` the ranks' micro-batches of one number count as one.
    """
    feed, config = run.feed, run.config
    batches = _batches(feed, config.max_steps)
    found = [(where, rank) for where, n in batches.items()
             if (rank := _rank_of_one(feed, n, config.sync_batchnorm)) is not None]
    where, rank = found[0] if found else ("", 0)
    try:
        yield int(bool(found))
    except UserError as error:
        if not found or ONE_SAMPLE not in error.got:
            raise
        alone = config.sync_batchnorm or _rank_of_one(feed, batches[where], True) is not None
        way = "" if alone or run.parts.layout is not None else "set sync_batchnorm: true, which takes the statistics " \
            "over all ranks; or "
        raise one_sample(rank, f" in {where}", f"{way}change global_batch, shares, accumulate or micro_batch, or use "
                         "GroupNorm") from error.__cause__


def _step_samples(feed: Feed) -> int:
    return feed.global_batch if feed.samples is None else min(feed.global_batch, feed.samples)


def _batches(feed: Feed, max_steps: int = 0) -> dict[str, int]:
    """Return the samples of global batches, of all steps but the last of an epoch, and of that one where it is due."""
    reached = feed.samples is not None and not 0 < max_steps < (feed.steps_per_epoch or 0)
    last = feed.samples % feed.global_batch if reached and feed.samples else 0
    return {"each step": _step_samples(feed), "the last step of an epoch": last}


def _sizes(feed: Feed, n: int) -> list[list[int]]:
    """Return the samples of each rank's micro-batches of a global batch of ``n``."""
    cut = feed.cut_at(0)
    return [[b - a for a, b in cut.bounds(count, rank)] for rank, count in enumerate(np.diff(cut.offsets(n)).tolist())]


def _check_fixed(run: Run, backend: Any, feed: Feed, training: bool) -> None:
    fixed = fixed_batch(run.spec.model)
    for where, n in _batches(feed, run.config.max_steps if training else 0).items() if fixed else ():
        for rank, size in ((rank, size) for rank, sizes in enumerate(_sizes(feed, n)) for size in {*sizes} - {fixed}):
            try:
                _run(run, backend, next(_parts(_samples(feed, LEAST), size)), training)
            except UserError as error:
                _run(run, backend, next(_parts(_samples(feed, LEAST), fixed)), training)  # tells what fails there, too
                kind, n_all = "training" if training else "evaluation", fixed * feed.size * run.config.accumulate
                raise UserError(f"micro-batches of {size} samples in {kind} (rank {rank}, {where}) for a model that is "
                                f"built for {fixed} at a time (batch_shape)", f"micro-batches of {fixed} samples",
                                f"set global_batch: {n_all} and give a multiple of {n_all} samples, or build the model "
                                "without a fixed batch") from error.__cause__


def _rank_of_one(feed: Feed, n: int, together: bool) -> int | None:
    """Return a rank that has a micro-batch of one sample of ``n``; ``together``: one that all ranks have one of."""
    rows = _sizes(feed, n)
    if not together:
        return next((rank for rank, sizes in enumerate(rows) if 1 in sizes), None)
    sums = [sum(sizes) for sizes in itertools.zip_longest(*rows, fillvalue=0)]
    return next((rank for rank, sizes in enumerate(rows) if len(sizes) > sums.index(1)), None) if 1 in sums else None


def _parts(batch: Batch, n: int) -> Iterator[Batch]:
    """Yield ``batch`` in shares of ``n`` samples each, the last one filled up."""
    for i in range(0, len(batch[0]), n):
        yield tuple(np.resize(array[i:i + n], (n, *array.shape[1:])) for array in batch)


def _run(run: Run, backend: Any, batch: Batch, training: bool, n: int = 0) -> list[str]:
    """Try the first ``n`` samples (0: all) once; return what was written. The first step tells of memory."""
    batch = tuple(array[:n or None] for array in batch)
    with told(run.spec.model, batch, not training):
        written: tuple[list[str] | None, str] = attempt(lambda: backend.try_samples(run.parts, batch, training),
                                                        backend.out_of_memory, backend.free_cached)
    return written[0] or []


def _fits(run: Run, backend: Any, batch: Batch, training: bool) -> list[str] | None:
    """Return what a try wrote to; None where the try failed."""
    try:
        return _run(run, backend, batch, training)
    except Exception:  # the first try's error is the one to tell
        return None


def _micro_batch(feed: Feed) -> int:
    cut = feed.cut_at(0)
    counts = np.diff(cut.offsets(_step_samples(feed))).tolist()
    bounds = next(found for r in (feed.rank, *range(feed.size)) if (found := cut.bounds(counts[r], r)))
    return bounds[0][1] - bounds[0][0]


def _samples(feed: Feed, most: int) -> Batch:
    """Return `LEAST` to ``most`` samples: extremes of arrays, else those read before, or a stream's first."""
    if feed.samples is None:
        return feed.sample(LEAST)
    arrays = getattr(feed.data, "arrays", None)
    if not isinstance(arrays, tuple):
        return tuple(np.resize(array, (LEAST, *array.shape[1:])) for array in feed.read_before())
    # Targets first, should there be more than are wanted; small numbers of the first array are pixels.
    whole = [a for a in arrays[1:] if a.dtype.kind in "iu"] + [
        a for a in arrays[:1] if a.dtype.kind in "iu" and a.itemsize > 1]
    indices = list(dict.fromkeys(i for array in whole for i in extremes(array)))[:most]
    more = (i % feed.samples for i in range(LEAST - len(indices)))
    return tuple(feed.data.fetch(np.array([*indices, *more], np.int64)))


def _pool(feed: Feed) -> Batch:
    if feed.samples is None:
        return feed.sample(min(feed.global_batch, CANDIDATES))
    arrays = getattr(feed.data, "arrays", None)
    if not isinstance(arrays, tuple):
        return tuple(feed.read_before())
    most = CANDIDATE_BYTES // max(1, sum(array[:1].nbytes for array in arrays))
    n = min(feed.samples, CANDIDATES, max(LEAST * MOST, 0 if any(map(on_disk, arrays)) else most))
    return tuple(feed.data.fetch(np.linspace(0, feed.samples - 1, n, dtype=np.int64)))


def extremes(array: np.ndarray) -> Iterator[int]:
    """Yield the rows that hold the largest and the smallest number, and the next ones after these."""
    if array.size == 0 or on_disk(array):
        return
    per_row = array.size // len(array)
    part = array[:max(1, LOOKED_AT // per_row)]
    yield int(part.argmax()) // per_row
    yield int(part.argmin()) // per_row
    if part.size <= LOOKED_AT_TWICE:
        inner = (part != part.max()) & (part != part.min())
        if inner.any():
            limits = np.iinfo(part.dtype)
            yield int(np.where(inner, part, limits.min).argmax()) // per_row
            yield int(np.where(inner, part, limits.max).argmin()) // per_row
