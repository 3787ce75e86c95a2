"""The verdict: what was lost, if anything, and the table of faults. Reads the weights and checkpoints of runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.campaign import Leg, Outcome
from benchmarks.chaos.plan import KILL, RANK, SAVE, START, STEP
from hvdtrain.checkpoint import CheckpointError, CheckpointStore, read_snapshot
from hvdtrain.core import comparison

HEADERS = ("fault", "planned", "hit", "went on", "seconds, median", "largest", "steps lost, median", "largest")
MOMENTS = {START: "while it starts", SAVE: "in a save", STEP: "between"}


@dataclass(frozen=True)
class Finding:
    """A check and its result: ``good`` or not, and ``words`` about it."""

    good: bool
    words: str


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Rows for `HEADERS`: kills by target and by the moment that they fell in, then the other kinds. Pure."""
    names: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        names.setdefault(_name(outcome), []).append(outcome)
    return [_row(name, names[name]) for name in sorted(names)]


def findings(outcomes: Sequence[Outcome], planned: int, trouble: str, legs: Sequence[Leg],
             reference: Mapping[str, Any]) -> list[Finding]:
    """Judge everything but the weights: the faults, the samples, the checkpoints."""
    missed = [o for o in outcomes if not o.hit]
    behind = [o for o in outcomes if o.hit and not o.recovered]
    found = [Finding(not trouble, trouble or "nothing hung, and no supervisor gave up")]
    found.append(Finding(len(outcomes) == planned and not missed,
                         f"{len(outcomes) - len(missed)} of {planned} faults hit what was alive"))
    found.append(Finding(not behind, f"the training went on after {sum(o.recovered for o in outcomes)} of them"))
    found.append(Finding(bool(legs), f"{len(legs)} trainings came to their end"))
    return found + [finding for leg in legs for finding in (_samples(leg, reference), _saves(leg))]


def same_weights(legs: Sequence[Leg], reference: comparison.Weights, load: Callable[[Path], comparison.Weights],
                 bits: bool, limit: Callable[[], comparison.Tolerance], caveats: Sequence[str]) -> list[Finding]:
    """Compare every training's final weights with those of a run that nobody disturbed.

    ``bits``: they must be equal to the bit. Else ``limit`` (measured only where it is needed) is what they may differ
    by, and ``caveats`` what the runs said that makes them depend on the number of ranks.
    """
    found = []
    for leg in legs:
        weights = load(leg.out)
        if comparison.same_bits(reference, weights):
            found.append(Finding(True, f"{leg.out.name}: the weights are those of the undisturbed run, to the bit"))
            continue
        difference, where = comparison.largest_difference(reference, weights)
        words = f"{leg.out.name}: the weights differ from the undisturbed run's by {difference:.1e} at most, in {where}"
        if bits:
            found.append(Finding(False, f"{words}, and must not: ranks and shares were held"))
            continue
        tolerance = limit()
        if difference > tolerance.value and tolerance.noise > comparison.MOST:
            found.append(Finding(False, f"{words}, and cannot be judged: this training magnifies rounding to "
                                 f"{tolerance.noise:.1e}; take a smaller lr, fewer --steps, or --hold-ranks"))
        elif difference > tolerance.value and caveats:
            found.append(Finding(True, f"{words}; not judged, since the number of ranks changed and: {caveats[0]}"))
        else:
            found.append(Finding(difference <= tolerance.value,
                                 f"{words}; up to {tolerance.value:.1e} is rounding at changing ranks"))
    return found


def _samples(leg: Leg, reference: Mapping[str, Any]) -> Finding:
    """Return whether the ledger of the run says that each sample came once, as in the undisturbed run."""
    name, got, want = leg.out.name, leg.record.get("ledger") or {}, reference.get("ledger") or {}
    if not got:
        return Finding(False, f"{name}: no ledger of its samples")
    keys = ("epochs", "samples", "partial")
    unlike = [f"{key} {got.get(key)} for {want.get(key)}" for key in keys if got.get(key) != want.get(key)]
    if leg.record["steps"] != reference["steps"]:
        unlike.append(f"steps {leg.record['steps']} for {reference['steps']}")
    if got.get("unchecked"):
        unlike.append(f"epochs {got['unchecked']} not verified")
    total = got.get("samples", 0) + got.get("partial", 0)
    good = f"0 lost and 0 doubled of {total} samples in {leg.record['steps']} steps"
    return Finding(not unlike, f"{name}: {'; '.join(unlike) if unlike else good}")


def _saves(leg: Leg) -> Finding:
    """Return whether every checkpoint is whole but those whose bits were changed, and those were refused."""
    torn = leg.refused - leg.flipped
    unseen = leg.flipped - leg.refused
    whole = 0
    for one in CheckpointStore(leg.out / "checkpoints", 1).everything():
        try:
            if one.error is not None:
                raise one.error
            read_snapshot(one.path)
            whole += 1
        except CheckpointError:
            torn |= {one.path.name} - leg.flipped
    words = [f"torn: {', '.join(sorted(torn))}"] if torn else []
    words += [f"used although a bit was changed: {', '.join(sorted(unseen))}"] if unseen else []
    good = f"all {whole} saves that are kept are whole"
    good += f"; {len(leg.flipped)} with a changed bit were refused" if leg.flipped else ""
    return Finding(not words and whole > 0, f"{leg.out.name}: " + ("; ".join(words) if words else good))


def _name(outcome: Outcome) -> str:
    fault = outcome.fault
    if fault.kind != KILL:
        return fault.kind
    whom = "" if fault.target == RANK else f" of the {fault.target}"
    return f"kill{whom}, {MOMENTS.get(outcome.moment, 'not brought about')}"


def _row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    seconds = [o.seconds for o in outcomes if o.seconds is not None]
    steps = [o.steps_lost for o in outcomes if o.steps_lost is not None]
    return [name, str(len(outcomes)), str(sum(o.hit for o in outcomes)), str(sum(o.recovered for o in outcomes)),
            f"{statistics.median(seconds):.1f}" if seconds else "-", f"{max(seconds):.1f}" if seconds else "-",
            f"{statistics.median(steps):g}" if steps else "-", str(max(steps)) if steps else "-"]
