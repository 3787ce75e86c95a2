"""Scaling efficiency of a run, lost time by cause, and what to do about it; pure. Others measure.

For rank r, averaged over a window::

    solo_r  = samples_r / (data_s + compute_s + update_s)_r      single-rank throughput
    percent = 100 * (sum of samples / step_s) / sum of solo
    wire    = least wait_s of all ranks: that rank waits for the exchange alone
    slowest = wait_s - wire, of each rank: waiting for stragglers

Lost times are percentages of all ranks' time, ranks * step_s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CAUSES = ("slowest", "wire", "input", "update")

WORTH = 5.0
"""Percent of the ranks' time that a cause has to cost before something is said to be done about it."""

SLOW = 1.5
"""Times as long for a sample as the others' median: such a rank is named while there is time to change the run."""

FASTER = "raise data.workers, store decoded samples as .npy, or use a format with an index"
"""Advice where nothing is known of the data."""

WORTH_GAIN = 10.0
"""Percent of speed that balancing has to give before it is recommended in the middle of a run."""


@dataclass(frozen=True)
class AverageStep:
    """Samples of a rank's average step, and seconds of input, compute, waiting for sums, and the update."""

    samples: float
    data_s: float
    compute_s: float
    wait_s: float
    update_s: float

    @property
    def busy_s(self) -> float:
        """Seconds that do not depend on the other ranks."""
        return self.data_s + self.compute_s + self.update_s


@dataclass(frozen=True)
class Reading:
    """Scaling efficiency in percent, seconds of a step, percent of time lost by cause, and a sentence that says what to
    do.
    """

    percent: float
    step_s: float
    lost: dict[str, float]
    rows: tuple[AverageStep, ...]
    sentence: str


def read(rows_P: Sequence[AverageStep], step_s: float, labels_P: Sequence[str], balance: str, compression: str,
         solo_P: Sequence[float] | None = None, hosts: int = 2, crowded: str = "",
         stages_s: tuple[float, float] | None = None, ranks: int = 0, faster: str = FASTER) -> Reading:
    """Read the meter over a window; 0 everywhere without steps or samples.

    ``labels_P``: "rank 1 on host b". ``balance``, ``compression``: as configured. ``solo_P``: single-rank throughputs
    if they are known better than from the rows. ``hosts``: their number; ``crowded``: "4 ranks share 2 cores" if they
    do. With a model partitioned over ``ranks`` the rows are of its copies, and ``stages_s`` the ranks' seconds of a
    step of waiting for stages and of messages. ``faster``: what makes the data faster (`faster_data`).
    """
    assert len(rows_P) == len(labels_P) and (solo_P is None or len(solo_P) == len(rows_P))
    rows = tuple(rows_P)
    solo = [float(s) for s in solo_P] if solo_P is not None else [_ratio(r.samples, r.busy_s) for r in rows]
    samples = sum(row.samples for row in rows)
    percent = _ratio(100.0 * _ratio(samples, step_s), sum(solo))
    lost = _lost(rows, step_s)
    for cause, seconds in zip(("idle", "channel"), stages_s or ()):
        lost[cause] = max(0.0, _ratio(100.0 * seconds, step_s * ranks))
    if not samples or not step_s > 0:
        sentence = "nothing to do: no step was measured"
    else:
        sentence = _sentence(rows, step_s, labels_P, balance, compression, solo, lost, percent, hosts, crowded, faster)
    return Reading(percent, step_s, lost, rows, sentence)


def slow_rank(reading: Reading, labels_P: Sequence[str]) -> str:
    """Name the rank that computes `SLOW` times as long as the others, and what balancing would give; "" for none. Pure.

    A rank that waits for its input is not meant, nor one that has no sample to give away.
    """
    rows = reading.rows
    speeds = [_ratio(row.samples, row.compute_s) for row in rows]
    if len(rows) < 2 or min(speeds) <= 0:
        return ""
    slow = min(range(len(rows)), key=lambda r: speeds[r])
    ratio = statistics.median(speed for r, speed in enumerate(speeds) if r != slow) / speeds[slow]
    solo = [_ratio(row.samples, row.busy_s) for row in rows]
    best_s = _ratio(sum(row.samples for row in rows), sum(solo)) + min(row.wait_s for row in rows)
    gain = 100.0 * (_ratio(reading.step_s, best_s) - 1.0)
    if ratio < SLOW or gain < WORTH_GAIN or rows[slow].samples <= 1 or reading.lost["slowest"] < WORTH:
        return ""
    return f"{labels_P[slow]} is {ratio:.1f}x slower; balance: auto would gain about {gain:.0f} %"


def _ratio(above: float, below: float) -> float:
    """Return ``above / below``, 0 if that is not finite."""
    value = above / below if below > 0 else 0.0
    return value if math.isfinite(value) else 0.0


def _lost(rows: Sequence[AverageStep], step_s: float) -> dict[str, float]:
    wire_s = min((row.wait_s for row in rows), default=0.0)
    seconds = {"slowest": sum(row.wait_s - wire_s for row in rows), "wire": wire_s * len(rows),
               "input": sum(row.data_s for row in rows), "update": sum(row.update_s for row in rows)}
    return {cause: _ratio(100.0 * seconds[cause], step_s * len(rows)) for cause in CAUSES}


def _sentence(rows: Sequence[AverageStep], step_s: float, labels_P: Sequence[str], balance: str, compression: str,
              solo: Sequence[float], lost: dict[str, float], percent: float, hosts: int, crowded: str,
              faster: str) -> str:
    """Return what to do about the largest loss."""
    cause = max(lost, key=lambda name: lost[name])
    if lost[cause] < WORTH:
        return f"nothing to do: scaling efficiency is {percent:.0f} %"
    share = f"{lost[cause]:.0f} % of the ranks' time"
    if cause == "idle":
        return f"{share} is stages waiting for each other: use more pipeline.micro_batches or a larger global_batch"
    if cause == "channel":
        return f"{share} is messages between stages: use fewer stages, or a pipeline.cut with smaller activations"
    if cause == "wire":
        if crowded:
            return f"{share} is waiting for the exchange and for a core: {crowded}; try fewer ranks"
        cheaper = "--compression auto, " if compression == "none" and hosts > 1 else ""
        fewer = " or fewer hosts" if hosts > 1 else ""
        return f"{share} is gradient exchange: try {cheaper}a larger global_batch{fewer}"
    if cause == "input":
        worst = max(range(len(rows)), key=lambda r: rows[r].data_s)
        most = f", most of it on {labels_P[worst]}" if rows[worst].data_s > SLOW * statistics.median(
            row.data_s for row in rows) else ""
        return f"{share} is waiting for data{most}: {faster}"
    if cause == "update":
        return f"{share} is the optimizer's update: a larger global_batch needs fewer updates"
    return _about_slowest(rows, step_s, labels_P, balance, solo, share, faster)


def faster_data(stream: bool, workers: int, cores: int) -> str:
    """Return what makes data faster; pure.

    ``workers``: processes that read a rank's samples, of ``cores`` that the rank has.
    """
    if stream:
        return ("decode in more threads or processes of the stream (num_workers, num_parallel_calls), or use a format "
                "with an index (docs/how-to/formats.md)")
    if workers + 1 < cores:
        return f"set data.workers: {cores - 1} (now {workers}), or store decoded samples as .npy"
    return "store decoded samples as .npy or use fewer ranks on this host, whose cores all read already"


def _about_slowest(rows: Sequence[AverageStep], step_s: float, labels_P: Sequence[str], balance: str,
                   solo: Sequence[float], share: str, faster: str) -> str:
    """Return what to do about a straggler, by the cause of its delay and by what is configured."""
    awaited = max(range(len(rows)), key=lambda r: rows[r].busy_s)
    who, row = labels_P[awaited], rows[awaited]
    others = [r for r in range(len(rows)) if r != awaited]
    spare_data_s = row.data_s - statistics.median(rows[r].data_s for r in others)
    spare_s = row.busy_s - statistics.median(rows[r].busy_s for r in others)
    if spare_data_s > 0.5 * spare_s:
        return f"{share} is waiting for {who}, which waits for its data: {faster}"
    idle = [r for r in others if rows[r].samples == 0]
    if len(idle) == len(others):
        return f"{who} computes all samples and the other ranks wait: use a larger global_batch, or fewer ranks"
    if not row.samples:
        return f"{who} got no samples and is still the straggler: start without it"
    wire_s = min(r.wait_s for r in rows)
    sample_s = _ratio(row.compute_s, row.samples)
    whole = sample_s > 0.5 * (row.busy_s - statistics.fmean(rows[r].busy_s for r in others))
    best_s = _ratio(sum(r.samples for r in rows), sum(solo)) + wire_s
    win = 100.0 * (_ratio(step_s, best_s) - 1.0)
    if whole and (balance != "off" or row.samples <= 1):
        return f"{share} is waiting for {who}, which can give up only one sample: use a larger global_batch"
    if balance != "auto":
        ratio = _ratio(statistics.median([solo[r] for r in others if solo[r]] or [0.0]), solo[awaited])
        slow = f"{who} is {ratio:.1f} times as slow as the others"
        if ratio < 1.1:
            slow = f"{share} is waiting for {who}"
        planned = " in spite of the plan" if balance == "static" else ""
        return f"{slow}{planned}: --balance auto would gain about {win:.0f} %"
    idle_s = sum(rows[r].wait_s - wire_s for r in idle)
    if idle_s > 0.5 * sum(r.wait_s - wire_s for r in rows):
        one = len(idle) == 1
        names = f"{labels_P[idle[0]]} would only be a straggler" if one else f"{len(idle)} ranks would be stragglers"
        return f"{names} and got no samples: use a larger global_batch, or start without {'it' if one else 'them'}"
    return (f"{share} is waiting for {who}, although --balance auto follows its speed: the speed changes "
            "too fast, so look for other work on its host")
