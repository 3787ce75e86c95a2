"""Forecast the run's step from what is known at its start, and compare it with the steps that it made.

Owns ``forecast.json`` in the run's directory and the errors in ``completed.json``. Predicting is left to
`hvdtrain.planning.simulator`, what earlier runs took to `hvdtrain.engine.step_history`.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from hvdtrain.config import inventory
from hvdtrain.core import RunFiles, whole_file
from hvdtrain.core.errors import UserError
from hvdtrain.engine import step_history
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.run import Run
from hvdtrain.engine.step_history import LinkRow, StepRow
from hvdtrain.parallel.pipeline.over_ranks import OverRanks
from hvdtrain.planning import simulator
from hvdtrain.planning.linear import LinearTime, Link
from hvdtrain.planning.simulator import Exchange, Rank, Saves, Scene, StepForecast

SKIPPED_STEPS, LEAST_STEPS = 3, 10
"""First steps of a fit, which trace and allocate; steps after them that tell a mean."""

PARTS = ("compute", "exchange", "input", "update", "saves")
"""Parts of a step whose errors are reported. ``exchange``: with waiting for stragglers."""

FASTEST, SLOWEST = 1e-13, 1e-4
"""Bounds of a link's seconds per byte."""

HALVINGS, MOST_RANKS = 14, 64
"""Simulations in which a link is fitted to a measured step, to half a percent; half of them beyond so many ranks."""

AUTO_S = 60.0
"""Seconds between two saves where the run chooses them by their cost."""

VERSION = 1
EARLIER = "earlier runs"

T = TypeVar("T")
Scenes = Sequence[tuple[Scene, float]]
"""Scenes of a step with a whole batch and of the last one of an epoch, with their fractions of the steps."""


@dataclass(frozen=True)
class RankFacts:
    """Knowledge of a rank at the start: its file, rows of earlier runs, or why there are none."""

    name: str = ""
    rows: tuple[StepRow, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class RankSums:
    """A rank's sums over the measured steps: seconds by phase and of whole steps, samples, saves."""

    steps: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    input_s: float = 0.0
    samples: int = 0
    micros: int = 0
    saves: int = 0
    save_s: float = 0.0

    def plus(self, other: RankSums, sign: int = 1) -> RankSums:
        """Return the sums with those of ``other``, or without them by ``sign`` -1."""
        return RankSums(*(own + sign * more for own, more in zip(vars(self).values(), vars(other).values())))


class RunForecast(Callback):
    """Runs on all ranks, whose times differ. Costs a comparison a step; what fails in it ends no run."""

    where = "all"
    setting = "forecast"
    after = ("Balance", "AutoWire", "Checkpoint")  # their measurements are known, and the cost of saves

    def __init__(self, wanted: bool = True) -> None:
        self._own, self._links, self._found = RankFacts(), "", dict[str, Any]()
        self._scenes: Scenes = ()
        self._mark_at, self._mark, self._short, self._before = 0, RankSums(), RankSums(), RankSums()
        self._written = True

    def fit_start(self, run: Run) -> None:
        """Gather what the ranks know; collective."""
        self._mark_at, self._mark, self._short = run.state.cursor.step + SKIPPED_STEPS, RankSums(), RankSums()
        self._written = False
        self._own = _tried(lambda: _known(run)) or RankFacts(why="what earlier runs took could not be read")
        facts_P = run.control.gather(self._own)
        self._found, self._scenes = {}, ()
        if run.control.rank == 0:
            self._found = _tried(lambda: self._forecast(run, facts_P)) or {
                "version": VERSION, "known": False, "time": time.time(), "why": "the forecast failed"}

    def epoch_start(self, run: Run) -> None:
        if not self._written:
            self._written = True
            if run.control.rank == 0 and run.begun:
                run.state.findings.forecast = self._found
                _tried(lambda: _write(run, self._found))

    def step_start(self, run: Run) -> None:
        if run.state.batch is not None and run.state.batch.n_global != run.config.global_batch and self._mark.steps:
            self._before = _sums(run)

    def step_end(self, run: Run) -> None:
        if run.state.cursor.step == self._mark_at:
            self._mark = _sums(run)
        elif self._before.steps:  # the last, smaller batch of an epoch
            self._short = self._short.plus(_sums(run).plus(self._before, -1))
            self._before = RankSums()

    def fit_end(self, run: Run) -> None:
        """Compare, and keep what this run took for the next ones; collective."""
        short = self._short
        whole = _sums(run).plus(self._mark, -1).plus(short, -1) if self._mark.steps else RankSums()
        sums_P = run.control.gather((short, whole))
        if min(sums.steps for _, sums in sums_P) < LEAST_STEPS:
            return
        error = math.nan
        if run.control.rank == 0:
            compared = _tried(lambda: self._compare(run, sums_P))
            if compared:
                run.state.findings.forecast = {**self._found, **compared}
                run.record("forecast", **compared)
                error = compared.get("error_step", math.nan)
        if self._own.name:
            *small, row = _rows(short, whole, run.control.size == 1)
            _tried(lambda: step_history.add(self._own.name, *small, replace(row, error=error)))

    def _forecast(self, run: Run, facts_P: Sequence[RankFacts]) -> dict[str, Any]:
        """Return the content of ``forecast.json``; rank 0's part."""
        self._links = step_history.hosts_key(run)
        lines = run.state.findings.solo_lines
        exchange, source = _linked(run, _exchange(run), step_history.links(self._links))
        made = _scenes(run, [facts.rows for facts in facts_P], lines, exchange) if exchange is not None else source
        if isinstance(made, str):
            why = next((facts.why for facts in facts_P if facts.why), made)
            return {"version": VERSION, "known": False, "time": time.time(), "why": why}
        self._scenes = made = _with_saves(run, made, [facts.rows for facts in facts_P])
        found = _mean(made)
        errors = [abs(row.error) for row in facts_P[0].rows if math.isfinite(row.error)]
        sources = {"compute": f"{EARLIER}, else the probe of balance" if lines else EARLIER, "update": EARLIER,
                   "input": EARLIER,
                   "exchange": source, "saves": EARLIER if made[0][0].saves else "unknown, left out"}
        return {"version": VERSION, "known": True, "time": time.time(), "from_step": run.state.cursor.step,
                "sources": sources, **_interval(found, errors), "parts_s": _parts(found.parts),
                "samples_per_s": found.samples_per_s, "efficiency": found.efficiency, **_totals(run, found.mid_s)}

    def _compare(self, run: Run, sums_P: Sequence[tuple[RankSums, RankSums]]) -> dict[str, Any]:
        """Return measured and predicted seconds with their errors, and keep the link; rank 0's part."""
        measured = _measured([short.plus(whole) for short, whole in sums_P])
        step_s = math.fsum(measured.values())
        compared: dict[str, Any] = {"measured_s": {"step": step_s, **measured}}
        if self._scenes:
            found = _mean(self._scenes)
            parts = _parts(found.parts)
            errors = {name: (parts[name] - measured[name]) / step_s for name in PARTS}
            errors["step"] = found.mid_s / step_s - 1
            compared |= {"forecast_s": {"step": found.mid_s, **parts},
                         **{f"error_{name}": error for name, error in errors.items()}}
        exchange = _exchange(run)
        made = _scenes(run, [_rows(*sums, False) for sums in sums_P], (), exchange)
        if exchange.bucket_bytes and not isinstance(made, str):
            link = _fitted(run, made, step_s - measured["saves"], step_history.links(self._links))
            step_history.add(self._links, link)
        return compared


def _known(run: Run) -> RankFacts:
    name = step_history.key_of(run)
    return RankFacts(name, tuple(step_history.steps(name)))


def _sums(run: Run) -> RankSums:
    totals, schedule, saver = run.timeline.totals, run.schedule, run.saver
    seconds = totals.seconds
    idle_s = cast(OverRanks, schedule).idle_s if run.mesh.deepest > 1 else 0.0  # of a stage: no waiting for replicas
    spent = saver.spent if saver is not None else None
    return RankSums(totals.steps, totals.step_s + seconds["data"], seconds["compute"] + idle_s,
                    seconds["wait"] - idle_s, seconds["update"], seconds["data"], totals.own_samples,
                    totals.own_micros, spent.saves if spent else 0, spent.blocked_s if spent else 0.0)


def _row(sums: RankSums, alone: bool) -> StepRow:
    n = sums.steps
    return StepRow(sums.samples / n, sums.micros / n, max(0.0, sums.compute_s / n),
                   sums.update_s / n + (sums.wait_s / n if alone else 0.0), sums.input_s / n,
                   sums.save_s / sums.saves if sums.saves else 0.0)


def _rows(short: RankSums, whole: RankSums, alone: bool) -> list[StepRow]:
    """Return a row of an epoch's last batches, where these were smaller, and one of the others."""
    return [_row(sums, alone) for sums in (short, whole) if sums.steps]


def _measured(sums_P: Sequence[RankSums]) -> dict[str, float]:
    """Return the seconds of a mean step by `PARTS`, means over the ranks.

    What is left of the slowest rank's step is the exchange, with agreement and stragglers; of a rank alone, its update.
    """
    rows = [_row(sums, len(sums_P) == 1) for sums in sums_P]
    found = {name: float(np.mean([getattr(row, f"{name}_s") for row in rows])) for name in ("compute", "input",
                                                                                          "update")}
    left_s = max(sums.step_s / sums.steps for sums in sums_P) - math.fsum(found.values())
    found["exchange" if len(rows) > 1 else "update"] = left_s + (found["update"] if len(rows) == 1 else 0.0)
    found["saves"] = max(sums.save_s / sums.steps for sums in sums_P)
    return {name: found.get(name, 0.0) for name in PARTS}


def _scenes(run: Run, rows_P: Sequence[Sequence[StepRow]], lines: Sequence[LinearTime],
            exchange: Exchange) -> Scenes | str:
    """Return the scenes of a step, or why they are not known. ``lines``: of the replicas, measured in this run."""
    hosts = run.topology.hosts
    cut = run.feed.cut_at(run.state.cursor.step)
    scenes: list[tuple[Scene, float]] = []
    for n, share in _batches(run):
        counts = np.diff(cut.offsets(n)).tolist()
        ranks = []
        for copy, members in enumerate(run.mesh.copies):
            made = _rank(counts[copy], len(cut.bounds(counts[copy], copy)), [rows_P[rank] for rank in members],
                         lines[copy] if copy < len(lines) else None)
            if isinstance(made, str):
                if scenes:  # of whole batches enough is known
                    return [(scene, 1.0) for scene, _ in scenes]
                return f"{f'rank {members[0]}' if len(members) == 1 else f'replica {copy}'}: {made}"
            ranks.append(replace(made, host=next(i for i, host in enumerate(hosts) if members[0] in host.ranks)))
        scenes.append((Scene(tuple(ranks), exchange), share))
    return scenes


def _with_saves(run: Run, scenes: Scenes, rows_P: Sequence[Sequence[StepRow]]) -> Scenes:
    """Return ``scenes`` with the saves of the steps that are left, as long as earlier ones were."""
    every, steps = run.config.checkpoint, _steps_left(run)
    save_s = max((row.save_s for rows in rows_P for row in rows[-1:]), default=0.0)
    each_s = every.every_s or (0.0 if every.every == "off" or every.every_steps else AUTO_S)
    if not save_s or not steps:
        return scenes
    saves = int(every.at_end)
    if every.every_steps:
        saves += steps // every.every_steps
    elif each_s:
        saves += int(_mean(scenes).mid_s * steps / each_s)
    found = Saves(save_s, max(1, round(steps / saves))) if saves else None
    return [(replace(scene, saves=found), share) for scene, share in scenes]


def _rank(samples: int, parts: int, rows: Sequence[Sequence[StepRow]], line: LinearTime | None) -> Rank | str:
    """Return a replica's work in a step; of several stages the slowest one's. Or why it is not known."""
    if any(not own for own in rows):
        return "no earlier run of this model on this device"
    update_s, input_s = (max(getattr(own[-1], name) for own in rows) for name in ("update_s", "input_s"))
    if not samples:
        return Rank(0, LinearTime(0.0, 1.0), 0, 0, update_s, input_s)
    lines = [step_history.line_of(own, samples / parts) or line for own in rows]
    if any(one is None for one in lines):
        return f"no earlier run had micro-batches of about {samples / parts:.0f} samples"
    slowest = max((one for one in lines if one is not None), key=lambda one: one.seconds(samples, parts))
    return Rank(0, slowest, samples, parts, update_s, input_s)


def _exchange(run: Run) -> Exchange:
    """Return the exchange of a step, whose links take no time; without buckets where nothing is exchanged."""
    sent = tuple(bucket.nbytes for bucket in run.dp.buckets if bucket.nbytes)
    transport = run.collectives.name
    if len(run.mesh.copies) == 1 or transport == "null" or not sent:
        return Exchange("null", ())
    return Exchange(transport, sent, overlaps=bool(run.dp.overlaps), ratio=run.dp.compressor.bytes_share,
                    zero=int(getattr(run.dp, "stage", 1)) if run.dp.divides_state else 0)


def _linked(run: Run, exchange: Exchange, links: Sequence[LinkRow]) -> tuple[Exchange | None, str]:
    """Return ``exchange`` over the links of earlier runs, and what these were; (None, why) where none is known."""
    if not exchange.bucket_bytes:
        return exchange, "nothing is exchanged"
    ranks = _ranks(run)
    found = step_history.link_of(links, exchange.transport, run.dp.compression, sum(exchange.bucket_bytes), ranks)
    if found is None:
        return None, f"exchange: no earlier run over {exchange.transport} of about as many bytes on these hosts"
    source = EARLIER if found.ranks == ranks else f"an earlier run of {sum(found.ranks)} ranks"
    return _over(exchange, found.within_s_per_byte, found.between_s_per_byte), source


def _over(exchange: Exchange, within: float, between: float) -> Exchange:
    return replace(exchange, within=Link(0.0, within), between=Link(0.0, between))


def _ranks(run: Run) -> tuple[int, ...]:
    return tuple(len(host.ranks) for host in run.topology.hosts)


def _batches(run: Run) -> list[tuple[int, float]]:
    """Return the samples of a step and the fraction of steps that have them: whole batches, and an epoch's last one."""
    n, samples = run.config.global_batch, run.feed.samples
    if samples is None:
        return [(n, 1.0)]
    steps, rest = -(-samples // n), samples % n
    whole = [(n, 1 - 1 / steps if rest else 1.0)] if samples >= n else []
    return whole + ([(rest, 1 / steps)] if rest else [])


def _fitted(run: Run, scenes: Scenes, step_s: float, older: Sequence[LinkRow]) -> LinkRow:
    """Return the link with which a simulated step takes as long as the measured one, by halving its range."""
    exchange, ranks = scenes[0][0].exchange, _ranks(run)
    nbytes, compression = float(sum(exchange.bucket_bytes)), run.dp.compression
    near = [row for row in older if (row.transport, row.compression, len(row.ranks)) == (exchange.transport,
                                                                                     compression, 1)]
    within = near[-1].within_s_per_byte if near else 0.0

    def links(per_byte: float) -> tuple[float, float]:
        return (per_byte, 0.0) if len(ranks) == 1 else (within, per_byte)

    def simulated_s(per_byte: float) -> float:
        return _mean([(replace(scene, saves=None, exchange=_over(exchange, *links(per_byte))), share)
                      for scene, share in scenes]).mid_s

    low, high = FASTEST, SLOWEST
    if simulated_s(low) >= step_s:
        return LinkRow(exchange.transport, compression, nbytes, ranks, *links(0.0))
    for _ in range(HALVINGS if len(scenes[0][0].ranks) <= MOST_RANKS else HALVINGS // 2):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if simulated_s(middle) < step_s else (low, middle)
    return LinkRow(exchange.transport, compression, nbytes, ranks, *links(math.sqrt(low * high)))


def _mean(scenes: Scenes) -> StepForecast:
    """Return the mean step of ``scenes``."""
    found = [(simulator.step(scene), share) for scene, share in scenes]
    mid_s = math.fsum(one.mid_s * share for one, share in found)
    parts = {name: math.fsum(one.parts[name] * share for one, share in found) for name in found[0][0].parts}
    samples = math.fsum(scene.samples * share for scene, share in scenes)
    return replace(found[0][0], low_s=mid_s, mid_s=mid_s, high_s=mid_s, parts=parts, samples_per_s=samples / mid_s)


def _parts(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: parts[name] + (parts["wait"] if name == "exchange" else 0.0) for name in PARTS}


def _interval(found: StepForecast, errors: Sequence[float]) -> dict[str, Any]:
    """Return the step's seconds; the interval is the largest error of earlier forecasts, none without any."""
    largest = max(errors, default=math.nan)
    low, high = (found.mid_s * (1 - largest), found.mid_s * (1 + largest)) if errors else (None, None)
    return {"step_s": {"low": low, "mid": found.mid_s, "high": high}, "interval_of": len(errors)}


def _totals(run: Run, step_s: float) -> dict[str, Any]:
    """Return steps that are left, their hours, and their cost by the inventory; None where unknown."""
    config, steps = run.config, _steps_left(run)
    hours = None if steps is None else steps * step_s / 3600
    cost = currency = None
    if config.inventory and hours is not None:
        with contextlib.suppress(UserError):  # a host without a price
            found = inventory.read(config.inventory)
            cost = hours * sum(found.price_of(host.node) for host in run.topology.hosts)
            currency = found.currency
    return {"steps": steps, "hours": hours, "cost": cost, "currency": currency}


def _steps_left(run: Run) -> int | None:
    config, per_epoch = run.config, run.feed.steps_per_epoch
    whole = [n for n in (None if per_epoch is None else per_epoch * config.epochs, config.max_steps or None) if n]
    return max(0, min(whole) - run.state.cursor.step) if whole else None


def _write(run: Run, found: Mapping[str, Any]) -> None:
    with whole_file(run.out / RunFiles.FORECAST) as draft:
        draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _tried(work: Callable[[], T | None]) -> T | None:
    """Return the result of ``work``, None where it fails: a forecast ends no run."""
    try:
        return work()
    except Exception:
        return None
