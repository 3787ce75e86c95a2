import contextlib
import math
import numbers as kinds
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Record, RecordedRun, Report

"""What happened in a run, as one stream of records: the schema, who gets which."""


VERSION = 2
"""Of log.jsonl, in its "start" records. Logs without one are version 1, which had fewer events and values."""


@dataclass(frozen=True)
class EventSchema:
    """An event: when it is recorded, its ``values``: name -> meaning with unit, "" where the name says both, and
    ``often``: how often there is one.
    """

    doc: str
    values: dict[str, str] = field(default_factory=dict)
    often: str = ""


def problems(record: Record) -> list[str]:
    """Return in words where ``record`` is not as documented; [] also for an event of somebody else's."""
    event = EVENTS.get(record.event)
    if event is None:
        return []
    return [f"{record.event} has {name!r}, which is not documented" for name in record.values
            if name not in event.values]


EVENTS = {
    "start": EventSchema("A fit begins or resumes a run.", {
        "schema": "version of this log",
        "world_size": "ranks",
        "hosts": "",
        "pipeline": "order, copies (ranks) and blocks of each replica by stage; null: unpartitioned",
        "notes": "those printed before",
        "framework": "torch, tensorflow or numpy",
        "model": "",
        "wire": "transport of gradients",
        "memory": "estimated, as in end",
        "config": "",
        "epochs": "of the whole run",
        "steps": "of the whole run",
        "pid": "process of rank 0",
    }),
    "note": EventSchema("A note, as printed.", {"text": ""}),
    "step": EventSchema("A step has ended with its update.", {
        "epoch": "complete epochs before",
        "samples": "samples of this epoch so far",
        "loss": "mean over the global batch",
        "grad_norm": "L2 norm of the summed gradient before clipping; null: not computed",
        "lr": "",
        "samples_per_s": "of all ranks, over the last steps",
        "phases_s": "of rank 0 so far: data, compute, wait, update",
        "percent_of_solo": "scaling efficiency: percent of the sum of single-rank throughputs; null: one rank",
    }, "every log_every steps"),
    "non_finite": EventSchema("A step was skipped because a loss or gradient was not finite.",
                        {"ranks": "those where it was not finite"}),
    "eval": EventSchema("The evaluation data was evaluated.", {
        "epoch": "complete epochs before",
        "metrics": "name -> value; of an evaluation set NAME/METRIC",
        "samples_per_s": "training throughput before the evaluation",
        "unread": "unreadable samples",
    }),
    "checkpoint": EventSchema("A checkpoint was due here."),
    "ledger": EventSchema("An epoch's samples were counted.", {
        "epoch": "", "whole": "each sample is verified to be seen exactly once",
        "skipped": "samples of skipped steps",
        "unread": "unreadable samples",
        "ledger": "totals so far", "got": "samples seen, where some are missing or "
                                          "repeated", "want": "samples of the epoch",
        "words": "fault, or reason why the epoch is not verified",
    }),
    "balance": EventSchema("Ranks get new shares of the batch.", {
        "stage": "plan: at the start; replan: during training; ceilings: a rank's memory holds less",
        "samples": "samples of a step by rank",
        "columns": "of rows", "rows": "the probe's table", "lines": "by rank [seconds per call, seconds per sample]",
        "equal_s": "of a step with equal shares", "plan_s": "of a step with these shares",
        "from_step": "", "ceilings": "rank -> largest micro-batch in samples",
    }),
    "pipeline": EventSchema("Partition of the model over ranks: as planned at the start, as measured at the end.", {
        "stage": "planned or measured",
        "stages": "by replica and stage: copy (of the model), stage, rank, host, device, blocks; busy_s: seconds of a "
                  "step in forward and backward; micro_batches of a step; parameters_bytes, gradients_bytes, "
                  "optimizer_bytes, activations_bytes as planned; capacity_bytes, 0: unknown",
        "step_s": "forward and backward of a step", "idle_share": "fraction of the ranks' time, "
        "without input, update and exchange, spent waiting",
        "wire_s": "of a step in the exchange between replicas", "steps": "full steps measured; null: planned",
    }),
    "compression": EventSchema("`compression: auto` has decided, or checked its choice.", {
        "stage": "decided or checked", "choice": "", "reason": "",
        "base": "measurements of a step without compression", "rows": "estimate for each compressor",
        "refused": "those that cannot be used, with the reason", "sweep_s": "spent measuring",
        "links": "kind of collective -> its linear cost", "measured_s": "of a step with the choice",
        "wire": "transport after the decision",
    }),
    "wire": EventSchema("`collectives: auto` has chosen a transport, checked it, or detected that the link has "
                        "changed.", {
        "stage": "rule: chosen without measuring; decided; tried: the next best, since steps waited longer than "
        "estimated; checked; changed: chosen again, since the link changed",
        "choice": "", "reason": "", "bytes": "of a step's gradients as sent",
        "rows": "estimate for each transport: wire_s, busy_s (processor seconds), cost_s (upper bound for a step), "
        "idle_cores (kept busy without work), rate_Bps", "measured": "linear cost of each transport: seconds by "
        "bytes, cores that it keeps busy, bytes of the largest sum",
        "refused": "transports that are no candidates, with the reason",
        "short": "fraction of a core that a transport lacks while ranks compute", "sweep_s": "spent measuring",
        "hosts": "by host: node, ranks, cores, numa (nodes)",
        "step_s": "", "wait_s": "of a step, spent waiting for gradients",
    }),
    "compile": EventSchema("`compile: auto` has decided.",
                           {"option": "as tried", "kinds": "device -> times and choice"}),
    "memory_fit": EventSchema("Micro-batch and blocks with activation checkpointing were chosen by "
                              "memory.", {"ranks": ""}),
    "out_of_memory": EventSchema("A rank ran out of memory.", {
        "rank": "", "at_step": "", "phase": "training, evaluation or an audit",
        "size": "samples of its micro-batch", "then": "samples tried next; -1: no smaller size is left",
        "why": "",
    }),
    "meter": EventSchema("Use of the ranks' time over the run; before end.", {
        "percent_of_solo": "as in step", "step_s": "mean",
        "lost_percent": "cause -> percent of the ranks' time",
        "ranks": "by rank, or replica of a partitioned model: samples and seconds of a mean step",
        "advice": "",
    }),
    "forecast": EventSchema("The forecast of the start, compared with the steps of the run.", {
        "forecast_s": "of a mean step and its parts; none where too little was known",
        "measured_s": "of a mean step and its parts",
        **{f"error_{name}": "as a fraction of the measured step" for name in (
            "step", "compute", "exchange", "input", "update", "saves")},
    }),
    "seconds": EventSchema("Time breakdown of each rank since the previous record of this kind.", {
        "from_step": "last step before the window",
        "window_s": "by rank 0's clock",
        "ranks": "by rank, cause -> seconds; causes: hvdtrain.core.timeline.CAUSES; their sum is the rank's whole time",
        "waits": "[rank, straggler, seconds] of each rank's longest waits; the rank itself: straggler unknown",
        "idles": "[rank, other rank, seconds] that a stage of a pipeline waited for another one",
        "decodes": "training samples decoded by all ranks and their workers since the start or the resume; "
                   "rows read to compare ranks are not counted",
    }, "about every 5 s, and last of all, after end"),
    "system": EventSchema("Memory and use of each rank's process and device.", {
        "ranks": "by rank: rss_bytes, swap_bytes, cpu_percent (200: two busy cores), quota_percent (percent of "
                 "the periods in which the processor quota was used up), threads; memory: kind -> bytes "
                 "(hvdtrain.core.units); of a GPU also allocated_bytes, reserved_bytes, peak_bytes, "
                 "fragmentation (fraction of reserved), retries, utilisation_percent, sm_mhz, most_sm_mhz, throttled "
                 "(reasons), temperature_c, power_w, used_bytes (of all processes); more_gpus: the same of a rank's "
                 "further GPUs",
        "mfu": "model FLOPs utilisation by rank, 0 to 1, since the record before, at the end since the first steps",
        "flops": "floating-point operations of one sample, forward and backward, by rank",
        "flops_unknown": "by rank the reason; empty: known",
        "peak_flops": "peak FLOP/s of the rank's devices, by rank",
        "peak_source": "by rank the source of that peak",
    }, "about every 5 s, and before end"),
    "saved": EventSchema("A checkpoint is on disk, or could not be written; the final one comes after \"end\".", {
        "at_step": "", "took_s": "",
        "blocked_s": "of rank 0", "bytes": "",
        "error": "of a failure; empty: written",
    }),
    "clocks": EventSchema("Offsets of the hosts' clocks.", {
        "ranks": "by rank {offset_s, within_s}: ahead of rank 0's clock, largest error",
    }),
    "environment": EventSchema("Software, hosts and devices of the run.", {
        "versions": "of packages", "python": "", "mpi": "", "launcher": "",
        "hosts": "by host: node, ranks, cores, memory_bytes in all, cpu, system, driver (of its GPUs)",
        "devices": "by rank",
        "differs": "key -> value, for keys that differ from their default",
        "resumed_from": "step; null: none", "attempt": "number under a supervisor; null: none",
    }),
    "whatif": EventSchema("Estimated speed of the run without one of its ranks, from the steps so far.", {
        "ranks": "by rank: percent more samples a second of the rest (negative: fewer)",
        "step_s": "mean, with all ranks",
        "without_s": "by rank, of a step without that rank",
    }, "after 64, 128, 256, ... steps, and before end, where there are several ranks"),
    "trace": EventSchema("A trace was written.", {
        "path": "file in the run's directory", "steps": "[first, last]", "within_s": "bound of the clock error",
        "events": "number in the file", "dropped": "those beyond the size bound", "bytes": "",
        "overlap_percent": "by rank, percent of the exchange that overlapped with backward",
        "critical": "[[rank, what, seconds]] of the critical path of a mean step",
    }),
    "failed": EventSchema("The fit has failed with an error, or without a message.", {
        "error": "type and text of the error on rank 0, or that rank 0 was killed",
        "rank": "the rank that the text names, else 0",
    }),
    "end": EventSchema("The fit has ended.", {
        "epoch": "complete epochs", "stop": "reason of an early stop; empty: none", "metrics": "of the last evaluation",
        "ledger": "result of the check of the samples",
        "memory": "by rank, bytes: estimated state, free at the start, measured peak; estimated at "
                  "the start and measured at the end: kind -> bytes (hvdtrain.core.units)",
    }),
}


MOST_HELD = 1000
"""Records kept until the run begins; beyond these the oldest are lost."""

checks: list[Callable[[Record], None]] = []
"""Called with every record, before any report; tests hold them against the schema here."""


class RecordStream:
    """Gives records to the reports of ``make`` in order, on rank 0. ``latest``: the last of each event."""

    def __init__(self, make: Callable[[], Sequence[Report]] = list) -> None:
        self.latest: dict[str, Record] = {}
        self._make = make
        self._reports: list[tuple[Report, Turns]] = []
        self._held: deque[Record] = deque(maxlen=MOST_HELD)
        self._also: list[Report] = []

    def also(self, report: Report) -> None:
        """Give the records of the next fit to ``report`` too."""
        self._also.append(report)

    def open(self) -> None:
        """Make the reports, where they are not open: they have all records from now on. A fit begins with it."""
        if not self._reports:
            self._reports = [(report, Turns(report.every, f"{type(report).__name__}.every is {report.every!r}"))
                             for report in [*self._make(), *self._also]]

    def wanted(self, run: RecordedRun) -> bool:
        """Return whether the "step" record of the step that has just ended is any report's turn; ask once a step."""
        due = False
        for _, turns in self._reports:
            due = turns.ask(run) or due
        return due

    def write(self, run: RecordedRun, event: str, values: dict[str, Any]) -> None:
        """Make a record and hand it on."""
        record = Record(event, run.state.cursor.step, time.time(), values)
        for check in checks:
            check(record)
        self.latest[event] = record
        if not self._reports:
            return
        self.flush(run)
        if not run.begun:
            self._held.append(record)
        for report, turns in list(self._reports):
            if (event != "step" or turns.due) and (run.begun or report.at_once):
                self._give(run, report, record)

    def flush(self, run: RecordedRun) -> None:
        """Hand over what has waited for the run to begin, if it has."""
        while run.begun and self._held:
            record = self._held.popleft()
            for report, _ in list(self._reports):
                if not report.at_once:
                    self._give(run, report, record)

    def close(self, run: RecordedRun) -> None:
        """End every report; what has waited for a run that did not begin is forgotten."""
        self.flush(run)
        self._held.clear()
        reports, self._reports, self._also = self._reports, [], []
        for report, _ in reports:
            try:
                report.close()
            except Exception as error:  # whatever a tracker's library raises
                self._failed(run, report, error)

    def _give(self, run: RecordedRun, report: Report, record: Record) -> None:
        if all(other is not report for other, _ in self._reports):
            return  # it failed over the note that another has failed, and that was said
        try:
            report.write(record)
        except Exception as error:  # whatever a tracker's library raises
            self._reports = [(other, turns) for other, turns in self._reports if other is not report]
            self._failed(run, report, error)

    @staticmethod
    def _failed(run: RecordedRun, report: Report, error: Exception) -> None:
        name = getattr(report, "name", type(report).__name__)
        run.note(f"{name} fails ({type(error).__name__}: {error}); training continues without it")


class Turns:
    """Says at which steps it is somebody's turn who wants ``every``: "50 step", "2 epoch", "5 s", "" each.

    ``got``: what a `UserError` says of an ``every`` that means nothing. ``clock``: seconds may be meant, as on rank 0
    alone, since clocks differ. ``due``: what `ask` has returned last.
    """

    def __init__(self, every: str, got: str, clock: bool = True) -> None:
        self.due = True
        self._last = -math.inf
        count, _, self._unit = every.partition(" ")
        if every and (not re.fullmatch(r"\d+(\.\d+)?" if self._unit == "s" else r"\d+", count) or float(count) == 0
                      or self._unit not in ("step", "epoch", *(["s"] if clock else []))):
            raise UserError(got, "'N step', 'N epoch', or, on root only, 'N s'",
                            "correct it")
        self._count = float(count or 0)

    def ask(self, run: RecordedRun) -> bool:
        """Return whether it is its turn after the step that has just ended; ask once a step."""
        if self._unit == "step":
            self.due = run.state.cursor.step % int(self._count) == 0
        elif self._unit == "epoch":
            left = run.feed.steps_left(run.state.cursor)
            self.due = left == 0 and (run.state.cursor.epoch + 1) % int(self._count) == 0
        elif self._unit == "s":
            now = time.monotonic()
            self.due = now - self._last >= self._count
            self._last = now if self.due else self._last
        return self.due


GROUPS = {"step": "train", "eval": "test", "system": "system", "seconds": "percent_of_time", "saved": "checkpoint",
          "meter": "meter"}
"""Events of the house with numbers that change while a run continues -> the first part of their names."""

LEFT_OUT = {"step": ("samples", "phases_s"), "eval": ("samples_per_s",), "seconds": ("from_step", "window_s", "waits"),
            "saved": ("at_step",)}
"""Event -> values that are a position, a sum since the start, or told by another event."""


def numbers(record: Record) -> dict[str, float]:
    """Return the record's numbers by name, null ones left out; {} for an event that has none to draw.

    A value of each rank ends in "/rank0", "/rank1" and so on. Seconds by cause become percent of the rank's time. An
    event of a user's own (`Run.record`) has its numbers under its own name.
    """
    group = GROUPS.get(record.event) or ("" if record.event in EVENTS else record.event)
    if not group:
        return {}
    values = {name: value for name, value in record.values.items() if name not in LEFT_OUT.get(record.event, ())}
    if record.event == "eval":
        values.update(values.pop("metrics", {}))
    if record.event == "seconds":
        values["ranks"] = [_percent(causes) for causes in values.get("ranks", ())]
    return {f"{group}/{name}": value for name, value in _flat(values)}


def settings(record: Record) -> dict[str, bool | int | float | str]:
    """Return what a "start" or "environment" record says of the run, by dotted name: configuration, ranks, versions.

    {} for other events. Lists and what else has no simple type become text.
    """
    if record.event == "start":
        world = {name: record.values.get(name) for name in ("world_size", "hosts", "framework", "wire")}
        return _simple({**record.values.get("config", {}), **world})
    if record.event == "environment":
        told_by_start = ("differs", "hosts")
        return _simple({name: value for name, value in record.values.items() if name not in told_by_start})
    return {}


def _percent(causes: dict[str, float]) -> dict[str, float]:
    whole_s = sum(causes.values())
    return {cause: 100.0 * seconds / whole_s for cause, seconds in causes.items()} if whole_s > 0 else {}


def _flat(values: dict[str, Any], rank: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of nested values; entries of a list are the ranks'."""
    for name, value in values.items():
        if isinstance(value, kinds.Real) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # a whole number beyond any float is no curve's
                yield f"{name}{rank}", float(value)
        elif isinstance(value, dict):
            yield from ((f"{name}/{inner}", number) for inner, number in _flat(value, rank))
        elif isinstance(value, (list, tuple)) and not rank:
            for r, own in enumerate(value):
                ranked = own if name == "ranks" and isinstance(own, dict) else {name: own}
                yield from _flat(ranked, f"/rank{r}")


def _simple(values: dict[str, Any]) -> dict[str, bool | int | float | str]:
    return {name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in flat(values).items()}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted name, such as ``optimizer.args.momentum``; an empty section is one value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found
